// The hooks of attend.inl in plain C++. An instruction set that brings its own products of int8 defines
// HEADRACE_OWN_DOTS and provides block_sums, kMixRows, combine_tile and add_values.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

#ifndef HEADRACE_OWN_DOTS

// sums[j] = sum of q * k over block b of key j. codes int8 [head_dim / 4][16][4].
inline void block_sums(const int8_t* codes, const int8_t* q, int b, int32_t* sums) {
  for (int j = 0; j < kTile; ++j) sums[j] = 0;
  for (int p = b * 8; p < b * 8 + 8; ++p) {
    for (int j = 0; j < kTile; ++j) {
      const int8_t* k = codes + (p * kTile + j) * 4;
      sums[j] += k[0] * q[4 * p] + k[1] * q[4 * p + 1] + k[2] * q[4 * p + 2] + k[3] * q[4 * p + 3];
    }
  }
}

#endif

// Scores of one query in log2 units, Q16.
inline void score_row(const uint8_t* tile, int t, const Queries& q, int row) {
  const TileFields at(q.head_dim);
  const int32_t *record = q.record(row), *a = record + 2 + q.blocks;
  const int16_t *scales = words(tile, at.key_scales), *exponents = words(tile, at.key_exponent);
  const int r = dot_shift(q.blocks);
  alignas(64) int32_t sums[kTile], acc[kTile] = {0};
  for (int b = 0; b < q.blocks; ++b, scales += kTile) {
    block_sums(reinterpret_cast<const int8_t*>(tile), reinterpret_cast<const int8_t*>(record + q.codes), b, sums);
    for (int j = 0; j < kTile; ++j) {
      const int32_t narrow = (sums[j] + 8) >> 4;                   // within +-32258
      const int32_t c = (scales[j] * a[b] + (1 << 14)) >> 15;      // at most 8321
      acc[j] += (narrow * c) >> r;                                 // below 2^29 before the shift
    }
  }
  int32_t *out = q.scores_of(row) + t * kTile, *best = q.best + row * kTile;
  for (int j = 0; j < kTile; ++j) {
    out[j] = score_of(acc[j], q.mantissa, record[0] - exponents[j]);
    if (t * kTile + j < record[1] && out[j] > best[j]) best[j] = out[j];
  }
}

inline void score_tile(const uint8_t* tile, int t, const Queries& q) {
  for (int row = 0; row < q.rows; ++row)
    if (q.record(row)[1] > t * kTile) score_row(tile, t, q, row);
}

inline int64_t weigh(int32_t* scores, int visible, int32_t best) {
  int64_t total = 0;
  for (int i = 0; i < visible; ++i) {
    const uint32_t delta = uint32_t(best) - uint32_t(scores[i]), f = delta & 0xFFFF, n = delta >> 16;
    uint32_t t = 3496u - ((454u * f) >> 16);
    t = 15698u - ((t * f) >> 16);
    t = 45423u - ((t * f) >> 16);
    const uint32_t p = 65536u - ((t * f + (1u << 15)) >> 16);  // t < 2^16: the product is below 2^32
    scores[i] = int32_t((p + ((1u << (n < 31 ? n : 31)) >> 1)) >> (n < 31 ? n : 31));
    total += scores[i];
  }
  for (int i = visible; i % kTile != 0; ++i) scores[i] = 0;
  return total;
}

// c = shift_round(w * a_v, 16 + top - E_v), 15 bits, of block b; 0 for unseen positions, whose weight is 0.
inline bool combine(const uint8_t* tile, const TileFields& at, int b, int top, const int32_t* weights, int16_t* c) {
  const int16_t *scales = words(tile, at.value_scales) + b * kTile, *exponents = words(tile, at.value_exponent);
  bool any = false;
  for (int j = 0; j < kTile; ++j) {
    const int n = 16 + top - exponents[j];
    const bool none = n > 31 || weights[j] == 0;  // w * a_v < 2^31, so a shift beyond 31 rounds to 0
    const uint32_t product = uint32_t(weights[j]) * uint16_t(scales[j]), half = none ? 0 : 1u << (n - 1);
    c[j] = none ? int16_t(0) : int16_t((product + half) >> n);
    any |= c[j] != 0;
  }
  return any;
}

#ifndef HEADRACE_OWN_DOTS

constexpr int kMixRows = 1;

// Bytes of a mix: int16 [2][16], the combined weights of two blocks.
inline bool combine_tile(const uint8_t* tile, const TileFields& at, int blocks, int top, const int32_t* weights,
                         uint8_t* out) {
  bool any = false;
  for (int b = 0; b < blocks; ++b, out += 2 * kTile)
    any |= combine(tile, at, b, top, weights, reinterpret_cast<int16_t*>(out));
  return any;
}

template <int Rows>
inline void add_values(const uint8_t* const* tiles, const TileFields& at, int head_dim, const Mix& mix, int pair,
                       int blocks, int64_t (*acc)[kMaxHeadDim]) {
  for (int i = 0; i < mix.count; ++i) {
    const int16_t* c = reinterpret_cast<const int16_t*>(mix.of(i, 0) + pair * 64);
    for (int g = 0; g < 4; ++g, c += 4) {
      const uint8_t* codes = tiles[mix.list[i]] + at.value_codes + (g * head_dim + pair * 64) * 4;
      const int8_t* v = reinterpret_cast<const int8_t*>(codes);
      for (int d = 0; d < blocks * kBlock; ++d, v += 4) {
        const int16_t* w = c + d / kBlock * kTile;
        acc[0][pair * 64 + d] += w[0] * v[0] + w[1] * v[1] + w[2] * v[2] + w[3] * v[3];
      }
    }
  }
}

#endif

inline void divide(const int64_t* acc, int head_dim, const Division& by, int32_t* out, int64_t* clipped) {
  for (int d = 0; d < head_dim; ++d) out[d] = by(acc[d], clipped);
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
