// The AVX-512 tier (F, BW, VL, DQ, VNNI).
#define HEADRACE_ISA avx512
#define HEADRACE_TIER_NAME "avx512"
#define HEADRACE_PROJECT project_avx512

#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own headers
#include <immintrin.h>

#include "project.h"
#include "rules.inl"
#include "rows.inl"
#include "attend_avx512.inl"
#include "tier.inl"
