// The portable tier: C++17 for any processor.
#define HEADRACE_ISA portable
#define HEADRACE_TIER_NAME "portable"
#define HEADRACE_PROJECT project_portable

#include "project.h"
#include "attend_portable.inl"
#include "vector_ops.inl"
