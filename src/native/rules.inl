// What the operations of one instruction set share: R1, and the parts of R2, R4 and R8 that are done once
// a block or a vector. The including file defines HEADRACE_ISA, a namespace name, so that code compiled for
// one instruction set is never linked into another.
#include <cstring>

#include "ops.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int32_t kInt32Max = 2147483647;
constexpr int kMaxHeadDim = 512;
constexpr int kMaxHeadBlocks = kMaxHeadDim / kBlock;

inline int bit_length(uint64_t x) { return x == 0 ? 0 : 64 - __builtin_clzll(x); }

// R1.
inline int64_t shift_round(int64_t x, int64_t shift) {
  if (shift > 62) return 0;
  if (shift > 0) return (x + (int64_t(1) << (shift - 1))) >> shift;
  const int left = shift < -62 ? 62 : int(-shift);
  const int64_t limit = (int64_t(1) << 62) >> left;
  const int64_t held = x > limit ? limit : x < -limit ? -limit : x;
  return int64_t(uint64_t(held) << left);
}

inline int32_t saturate(int64_t x, int64_t* clipped) {
  const int64_t low = x < -kInt32Max ? -kInt32Max : x;
  const int64_t held = low > kInt32Max ? kInt32Max : low;
  *clipped += held != x;
  return int32_t(held);
}

// A rounding shift as two plain ones, (x << left >> right) + 1 >> 1: the sum cannot wrap, and both counts
// are the same for a whole vector. For |x| of at most `bits - 1` bits that are not shifted out at the left.
struct Rounding {
  explicit Rounding(int shift) : left(shift < 1 ? 1 - shift : 0), right(shift < 1 ? 0 : shift - 1) {}
  int left, right;
};

// ---- R2 ----------------------------------------------------------------------------------------------

// What quantising one block needs, from its largest magnitude and the shift that gives the vector's 21 bits.
struct BlockPlan {
  int32_t scale, inverse;  // a <= 16513; floor(2^places / a) <= 127 * 2^8
  int down;                // R1 shift to 15 bits
};

inline BlockPlan plan_block(uint64_t peak, int shift) {
  BlockPlan plan{0, 0, 0};
  if (peak == 0) return plan;
  if (shift >= 0) {
    plan.scale = int32_t(((uint32_t(peak) << shift) + 126) / 127);
  } else {  // ceil(p / (127 * 2^n)) = ceil(ceil(p / 2^n) / 127): the inner quotient has 21 bits
    plan.scale = int32_t((uint32_t((peak + (uint64_t(1) << -shift) - 1) >> -shift) + 126) / 127);
  }
  const int width = bit_length(peak), places = 7 + width + shift;
  plan.inverse = places >= 0 ? int32_t((uint32_t(1) << places) / uint32_t(plan.scale)) : 0;
  plan.down = width - 15;
  return plan;
}

// R3's rounded scale * sum: within +-8192.
inline int16_t rounded_sum(int32_t scale, int32_t sum) { return int16_t((scale * sum + (1 << 12)) >> 13); }

// ---- R4 ----------------------------------------------------------------------------------------------

// floor(sqrt(x)) for x in [2^60, 2^62). Newton's iteration from above; the first guess is the tangent at
// 2.25 * 2^60, 8 % too large at most, so three or four steps do.
inline uint32_t isqrt(uint64_t x) {
  uint64_t root = (x >> 30) / 3 + (uint64_t(3) << 28) + 2;
  for (uint64_t next; (next = (root + x / root) / 2) < root;) root = next;
  return uint32_t(root);
}

// R4 after the sum of squares: the factor of every element is inverse / 2^31.
struct NormPlan {
  uint32_t inverse;  // 2^30 < inverse <= 2^31, or 0 for a zero vector
  int32_t exponent;
};

// The shift that gives a vector's largest magnitude 24 bits: left by 12 at most, right by 7.
inline int norm_shift(uint32_t peak) {
  const int shift = 24 - bit_length(peak);
  return shift > 12 ? 12 : shift;
}

inline NormPlan plan_norm(int64_t squares, int k, int shift, const NormGain& g, int fraction_bits) {
  int64_t mean = squares / k;
  const int places = -g.eps_exponent - 2 * (fraction_bits + shift);
  if (places < 63) mean += places >= 0 ? int64_t(g.eps_mantissa) >> places : int64_t(g.eps_mantissa) << -places;
  if (mean == 0) return {0, 0};
  const int lift = (62 - bit_length(uint64_t(mean))) / 2;
  const uint64_t root = isqrt(uint64_t(mean) << (2 * lift));
  return {uint32_t((uint64_t(1) << 61) / root), 17 + lift - 30 + g.gain_exponent};
}

// ---- R7, R8 ------------------------------------------------------------------------------------------

// Where the fields of a KV tile record lie.
struct TileFields {
  explicit TileFields(int head_dim)
      : value_codes(size_t(kTile) * head_dim),
        key_scales(2 * value_codes),
        value_scales(key_scales + size_t(head_dim / kBlock) * kTile * 2),
        key_exponent(value_scales + size_t(head_dim / kBlock) * kTile * 2),
        value_exponent(key_exponent + kTile * 2) {}
  size_t value_codes, key_scales, value_scales, key_exponent, value_exponent;
};

inline int dot_shift(int blocks) {
  const int bits = bit_length(uint64_t(blocks - 1));
  return bits < 2 ? 0 : bits - 2;
}

// A query head ready for scoring. `base` is the shift of its scores before the key's exponent is taken off.
struct Query {
  alignas(64) int8_t codes[kMaxHeadDim];
  int16_t scales[kMaxHeadBlocks], sums[kMaxHeadBlocks];
  int32_t base;
};

inline int32_t score_base(const AttentionShape& shape, int32_t query_exponent) {
  return -(15 + 4 + dot_shift(shape.head_dim / kBlock) + query_exponent + shape.scale_exponent + 16);
}

// The end of R3 for one score: clip(round(acc * mantissa / 2^shift)).
inline int32_t score_of(int32_t acc, int32_t mantissa, int shift) {
  const int64_t limit = int64_t(1) << 30, s = shift_round(acc * int64_t(mantissa), shift);
  return int32_t(s > limit ? limit : s < -limit ? -limit : s);
}

// acc * 2^(16 + exponent) / total: acc is shifted to 31 bits, times 2^61 / (total as 31 bits), shifted.
struct Division {
  Division(int64_t total, int exponent, int fraction_bits) {
    const int width = bit_length(uint64_t(total));
    const uint64_t normal = width > 31 ? uint64_t(total) >> (width - 31) : uint64_t(total) << (31 - width);
    inverse = int64_t((uint64_t(1) << 61) / normal);
    first = width - 25;
    last = 39 - exponent - fraction_bits;
  }
  int32_t operator()(int64_t acc, int64_t* clipped) const {
    return saturate(shift_round(shift_round(acc, first) * inverse, last), clipped);
  }
  int64_t inverse;
  int first, last;
};

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
