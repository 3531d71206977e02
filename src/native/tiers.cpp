// The only file that asks what processor this is.
#include "tiers.h"

#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace headrace {

namespace portable { extern const Tier kTier; }
#if defined(HEADRACE_X86)
namespace avx2 { extern const Tier kTier; }
namespace avx512 { extern const Tier kTier; }
#endif
#if defined(HEADRACE_ARM)
namespace neon { extern const Tier kTier; }
#endif

namespace {

#if defined(HEADRACE_X86)
TierStatus avx2_status() {
  if (!__builtin_cpu_supports("avx2")) return {"avx2", nullptr, "this processor has no AVX2"};
  return {"avx2", &avx2::kTier, ""};
}

TierStatus avx512_status() {
  const bool ok = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vnni");
  if (!ok) return {"avx512", nullptr, "this processor has no AVX-512 with BW, DQ, VL and VNNI"};
  return {"avx512", &avx512::kTier, ""};
}
#else
TierStatus avx2_status() { return {"avx2", nullptr, "built for another processor family"}; }
TierStatus avx512_status() { return {"avx512", nullptr, "built for another processor family"}; }
#endif

#if defined(HEADRACE_ARM)
TierStatus neon_status() {
  if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) return {"neon", nullptr, "this processor has no dot product extension"};
  return {"neon", &neon::kTier, ""};
}
#else
TierStatus neon_status() { return {"neon", nullptr, "built for another processor family"}; }
#endif

}  // namespace

const TierStatus* tier_table() {
  static const TierStatus table[kNumTiers] = {
      avx512_status(), avx2_status(), neon_status(), {"portable", &portable::kTier, ""}};
  return table;
}

const Tier* find_tier(const char* name) {
  for (int i = 0; i < kNumTiers; ++i) {
    if (std::strcmp(tier_table()[i].name, name) == 0) return tier_table()[i].tier;
  }
  return nullptr;
}

}  // namespace headrace
