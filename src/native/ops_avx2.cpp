// The AVX2 tier.
#define HEADRACE_ISA avx2
#define HEADRACE_TIER_NAME "avx2"
#define HEADRACE_PROJECT project_avx2
#define HEADRACE_KEY_CENTRE 0
#define HEADRACE_OWN_PRODUCTS

#include <immintrin.h>

#include "project.h"
#include "rules.inl"
#include "rows_avx2.inl"
#include "rows.inl"
#include "attention.inl"
#include "attend_avx2.inl"
#include "attend.inl"
#include "tier.inl"
