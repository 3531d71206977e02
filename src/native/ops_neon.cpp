// The Arm tier: Advanced SIMD with the dot product extension.
#define HEADRACE_ISA neon
#define HEADRACE_TIER_NAME "neon"
#define HEADRACE_PROJECT project_neon

#include <arm_neon.h>

#include "project.h"
#include "rules.inl"
#include "rows.inl"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

inline int8x16_t broadcast4(const int8_t* bytes) {
  int32_t word;
  __builtin_memcpy(&word, bytes, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

inline void score_tile(const int8_t* codes, const int8_t* q, int head_dim, int32_t* out) {
  for (int b = 0; b < head_dim / kBlock; ++b) {
    int32x4_t acc[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
    for (int p = b * 8; p < b * 8 + 8; ++p) {
      const int8x16_t x = broadcast4(q + 4 * p);
      for (int j = 0; j < 4; ++j) acc[j] = vdotq_s32(acc[j], vld1q_s8(codes + p * 64 + j * 16), x);
    }
    for (int j = 0; j < 4; ++j) vst1q_s32(out + b * kTile + j * 4, acc[j]);
  }
}

// c = 128 hi + lo with lo <= 127; hi <= 129 does not fit int8, so hi is taken as 64 + (hi - 64).
inline void value_tile(const int8_t* codes, const int32_t* c, int head_dim, int32_t* acc) {
  for (int b = 0; b < head_dim / kBlock; ++b) {
    int8_t lo[kTile], hi[kTile];
    for (int j = 0; j < kTile; ++j) {
      lo[j] = int8_t(c[b * kTile + j] & 127);
      hi[j] = int8_t((c[b * kTile + j] >> 7) - 64);
    }
    const int8x16_t bias = vdupq_n_s8(64);
    for (int d = b * kBlock; d < b * kBlock + kBlock; d += 4) {
      int32x4_t low = vld1q_s32(acc + d), high = vdupq_n_s32(0);
      for (int g = 0; g < 4; ++g) {
        const int8x16_t v = vld1q_s8(codes + (g * head_dim + d) * 4);
        low = vdotq_s32(low, v, broadcast4(lo + 4 * g));
        high = vdotq_s32(vdotq_s32(high, v, broadcast4(hi + 4 * g)), v, bias);
      }
      vst1q_s32(acc + d, vaddq_s32(low, vshlq_n_s32(high, 7)));
    }
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

#include "attend.inl"
#include "tier.inl"
