// The portable tier: C++17 for any processor.
#define HEADRACE_ISA portable
#define HEADRACE_TIER_NAME "portable"
#define HEADRACE_PROJECT project_portable
#define HEADRACE_KEY_CENTRE 0

#include "project.h"
#include "rules.inl"
#include "rows.inl"
#include "attention.inl"
#include "attend_portable.inl"
#include "attend.inl"
#include "tier.inl"
