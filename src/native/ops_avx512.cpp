// The AVX-512 tier (F, BW, VL, DQ, VNNI).
#define HEADRACE_ISA avx512
#define HEADRACE_TIER_NAME "avx512"
#define HEADRACE_PROJECT project_avx512
#define HEADRACE_KEY_CENTRE 128  // vpdpbusd wants one unsigned operand: keys are read as k + 128
#define HEADRACE_OWN_PRODUCTS
#define HEADRACE_OWN_SIGMOID
#define HEADRACE_OWN_ROPE

#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own headers
#include <immintrin.h>

#include "project.h"
#include "rules.inl"
#include "rows_avx512.inl"
#include "rows.inl"
#include "attention.inl"
#include "attend_avx512.inl"
#include "attend.inl"
#include "tier.inl"
