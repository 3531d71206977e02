// The only file that asks what processor this is.
#include "tiers.h"

#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include "project.h"
#endif
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

// The system lends the tile registers to a process that asks; threads that start later inherit the grant.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// AVX-512 with the projection of many vectors on AMX tiles.
TierStatus amx_status() {
  const bool ok = avx512_status().tier != nullptr && __builtin_cpu_supports("avx512vbmi") &&
                  __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8");
  if (!ok) return {"amx", nullptr, "this processor has no AMX-INT8 beside AVX-512 with VBMI"};
  if (!tiles_granted()) return {"amx", nullptr, "the system does not grant the AMX tile registers"};
  static const Tier tier = [] {
    Tier copy = avx512::kTier;
    copy.name = "amx";
    copy.project = project_amx;
    return copy;
  }();
  return {"amx", &tier, ""};
}
#else
TierStatus amx_status() { return {"amx", nullptr, "built for another processor family"}; }
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
      amx_status(), avx512_status(), avx2_status(), neon_status(), {"portable", &portable::kTier, ""}};
  return table;
}

const Tier* find_tier(const char* name) {
  for (int i = 0; i < kNumTiers; ++i) {
    if (std::strcmp(tier_table()[i].name, name) == 0) return tier_table()[i].tier;
  }
  return nullptr;
}

}  // namespace headrace
