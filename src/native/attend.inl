// R8 for instruction sets that provide two inner loops, in the namespace of rules.inl:
//   score_tile(codes, q, head_dim, out)   exact block sums of one query against 16 keys
//   value_tile(codes, c, head_dim, acc)   acc[d] += sum over 16 positions of c * v
// Included after rows.inl.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// 2^-delta in Q16 for 16 values of delta >= 0.
inline void exp2_negative(const int32_t* delta, int32_t* out) {
  for (int i = 0; i < kTile; ++i) {
    const uint32_t f = uint32_t(delta[i]) & 0xFFFF;
    uint32_t t = 3496u - ((454u * f) >> 16);
    t = 15698u - ((t * f) >> 16);
    t = 45423u - ((t * f) >> 16);
    const uint32_t p = 65536u - ((t * f + (1u << 15)) >> 16);  // t < 2^16: the product is below 2^32
    const uint32_t whole = uint32_t(delta[i]) >> 16;
    const uint32_t n = whole < 31 ? whole : 31;
    out[i] = int32_t((p + ((1u << n) >> 1)) >> n);
  }
}

// Scores of one query against one tile, in log2 units, Q16; returns the largest of the first `count`.
inline int32_t score_row(const AttentionShape& shape, const uint8_t* tile, const Query& q, int count, int32_t* out) {
  const int blocks = shape.head_dim / kBlock, r = dot_shift(blocks);
  const TileFields at(shape.head_dim);
  const int16_t* scales = reinterpret_cast<const int16_t*>(tile + at.key_scales);
  const int16_t* exponents = reinterpret_cast<const int16_t*>(tile + at.key_exponent);
  alignas(64) int32_t sums[kMaxHeadBlocks * kTile], acc[kTile] = {0};
  score_tile(reinterpret_cast<const int8_t*>(tile), q.codes, shape.head_dim, sums);
  for (int b = 0; b < blocks; ++b) {
    const int32_t a = q.scales[b];
    for (int j = 0; j < kTile; ++j) {
      const int32_t narrow = (sums[b * kTile + j] + 8) >> 4;            // within +-32258
      const int32_t c = (scales[b * kTile + j] * a + (1 << 14)) >> 15;  // at most 8321
      acc[j] += (narrow * c) >> r;                                      // below 2^29 before the shift
    }
  }
  int32_t top = INT32_MIN;
  for (int j = 0; j < kTile; ++j) {
    out[j] = score_of(acc[j], shape.scale_mantissa, q.base - exponents[j]);
    if (j < count && out[j] > top) top = out[j];
  }
  return top;
}

// Combined weights of one tile: c = shift_round(w * a_v, 16 + top - E_v), 0 beyond `count`; 15 bits.
inline void combine(const int32_t* w, const int16_t* scales, const int16_t* exponents, int top, int blocks, int count,
                    int32_t* c) {
  alignas(64) int32_t shift[kTile];
  alignas(64) uint32_t half[kTile];
  for (int j = 0; j < kTile; ++j) {
    const int n = 16 + top - exponents[j];
    const bool none = n > 31 || j >= count;  // w * a_v < 2^31, so a shift beyond 31 rounds to 0
    shift[j] = none ? 31 : n;
    half[j] = none ? 0 : 1u << (n - 1);
  }
  for (int b = 0; b < blocks; ++b) {
    for (int j = 0; j < kTile; ++j) {
      const uint32_t product = uint32_t(w[j]) * uint32_t(uint16_t(scales[b * kTile + j]));
      const uint32_t value = (product + half[j]) >> shift[j];
      c[b * kTile + j] = half[j] == 0 ? 0 : int32_t(value);
    }
  }
}

// One query head from its scores to its output. scores i32[tiles * 16] becomes weights.
inline void mix_row(const AttentionShape& shape, const uint8_t* const* tiles, int visible, int32_t top_score,
                    int32_t* scores, int32_t* out, int64_t* clipped) {
  const int head_dim = shape.head_dim, blocks = head_dim / kBlock, num_tiles = (visible + kTile - 1) / kTile;
  const TileFields at(head_dim);
  int64_t total = 0;
  int top = INT32_MIN;
  for (int t = 0; t < num_tiles; ++t) {
    const int count = visible - t * kTile < kTile ? visible - t * kTile : kTile;
    const int16_t* exponents = reinterpret_cast<const int16_t*>(tiles[t] + at.value_exponent);
    int32_t* s = scores + t * kTile;
    alignas(64) int32_t delta[kTile];
    for (int j = 0; j < kTile; ++j) delta[j] = j < count ? top_score - s[j] : INT32_MAX;
    exp2_negative(delta, s);
    for (int j = 0; j < count; ++j) {
      total += s[j];
      top = exponents[j] > top ? exponents[j] : top;
    }
  }
  int64_t acc[kMaxHeadDim] = {0};
  alignas(64) int32_t part[kMaxHeadDim] = {0};
  alignas(64) int32_t c[kMaxHeadBlocks * kTile];
  for (int t = 0; t < num_tiles; ++t) {
    const int count = visible - t * kTile < kTile ? visible - t * kTile : kTile;
    const int16_t* scales = reinterpret_cast<const int16_t*>(tiles[t] + at.value_scales);
    const int16_t* exponents = reinterpret_cast<const int16_t*>(tiles[t] + at.value_exponent);
    combine(scores + t * kTile, scales, exponents, top, blocks, count, c);
    value_tile(reinterpret_cast<const int8_t*>(tiles[t] + at.value_codes), c, head_dim, part);
    if (t % 32 == 31 || t + 1 == num_tiles) {  // 512 positions: 512 * 16513 * 127 < 2^31
      for (int d = 0; d < head_dim; ++d) acc[d] += part[d], part[d] = 0;
    }
  }
  const Division divide(total, top, shape.fraction_bits);
  for (int d = 0; d < head_dim; ++d) out[d] = divide(acc[d], clipped);
}

void attend(const AttentionShape& shape, const uint8_t* const* tiles, const int32_t* const* q, const int32_t* visible,
            int rows, int32_t* const* out, void* scratch, int64_t* clipped) {
  int32_t* scores = static_cast<int32_t*>(scratch);
  for (int i = 0; i < rows; ++i) {
    Query query;
    const int32_t exponent = quantize_to(q[i], shape.head_dim, -shape.fraction_bits, query.codes, query.scales, query.sums);
    query.base = score_base(shape, exponent);
    int32_t top = INT32_MIN;
    for (int t = 0; t * kTile < visible[i]; ++t) {
      const int count = visible[i] - t * kTile < kTile ? visible[i] - t * kTile : kTile;
      const int32_t best = score_row(shape, tiles[t], query, count, scores + t * kTile);
      top = best > top ? best : top;
    }
    mix_row(shape, tiles, visible[i], top, scores, out[i], clipped);
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
