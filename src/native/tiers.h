// Which instruction sets this build has and this processor can run.
#pragma once

#include "ops.h"

namespace headrace {

struct TierStatus {
  const char* name;
  const Tier* tier;      // null when unavailable
  const char* reason;    // why it is unavailable, or "" when it is not
};

constexpr int kNumTiers = 5;

// Best first: amx, avx512, avx2, neon, portable.
const TierStatus* tier_table();

// The tier of that name, or null.
const Tier* find_tier(const char* name);

}  // namespace headrace
