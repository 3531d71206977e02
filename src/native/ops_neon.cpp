// The Arm tier: Advanced SIMD with the dot product extension.
#define HEADRACE_ISA neon
#define HEADRACE_TIER_NAME "neon"
#define HEADRACE_PROJECT project_neon
#define HEADRACE_KEY_CENTRE 0
#define HEADRACE_OWN_DOTS

#include <arm_neon.h>

#include "project.h"
#include "rules.inl"
#include "rows.inl"
#include "attention.inl"
#include "attend_neon.inl"
#include "attend_portable.inl"
#include "attend.inl"
#include "tier.inl"
