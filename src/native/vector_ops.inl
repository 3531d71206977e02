// Every operation except the projection, in plain C++ that the compiler vectorises for the flags of the
// file that includes it. That file defines HEADRACE_ISA (a namespace name) and, inside it, the four inner
// loops of attention:
//   score_tile(codes, q, sums, head_dim, out)   exact block sums of one query against 16 keys
//   value_tile(codes, c, head_dim, acc)         acc[d] += sum over 16 positions of c * v
// or a whole `attend` of its own (HEADRACE_OWN_ATTEND), so that an instruction set is one file. Rules R1..R10 are those of docs/arithmetic.md.

#include <cstring>

#include "ops.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int32_t kInt32Max = 2147483647;

inline int bit_length(uint64_t x) { return x == 0 ? 0 : 64 - __builtin_clzll(x); }
inline int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

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
  if (x > kInt32Max || x < -int64_t(kInt32Max)) {
    ++*clipped;
    return x > 0 ? kInt32Max : -kInt32Max;
  }
  return int32_t(x);
}

// ---- R2 ----------------------------------------------------------------------------------------------

// ceil(peak * 2^shift / 127). peak < 2^62 and the result is at most 16513: peak << shift has 21 bits.
inline int32_t block_scale(uint64_t peak, int shift) {
  if (shift >= 0) return int32_t(((uint32_t(peak) << shift) + 126) / 127);
  const uint64_t denominator = uint64_t(127) << -shift;  // shift >= -41
  return int32_t((peak + denominator - 1) / denominator);
}

template <typename T>
inline void block_codes(const T* x, int width, int32_t scale, int shift, int8_t* codes) {
  const int places = 7 + width + shift;
  const int32_t inverse = places >= 0 ? int32_t((uint32_t(1) << places) / uint32_t(scale)) : 0;
  const int down = width - 15;
  int32_t reduced[kBlock];
  if (down > 0) {
    const T half = T(1) << (down - 1);  // width <= bits of T, so x + half cannot wrap in int64
    for (int i = 0; i < kBlock; ++i) reduced[i] = int32_t((int64_t(x[i]) + half) >> down);
  } else {
    for (int i = 0; i < kBlock; ++i) reduced[i] = int32_t(x[i]) * (1 << -down);
  }
  // |reduced| <= 2^15 and inverse <= 127 * 2^8, so the product is below 2^30.
  for (int i = 0; i < kBlock; ++i) codes[i] = int8_t((reduced[i] * inverse + (1 << 21)) >> 22);
}

template <typename T>
inline uint64_t block_peak(const T* x) {
  uint64_t bits = 0, peak = 0;
  for (int i = 0; i < kBlock; ++i) {
    const uint64_t m = uint64_t(magnitude(int64_t(x[i])));
    peak = m > peak ? m : peak;
    bits |= m;
  }
  return peak;
}

template <>
inline uint64_t block_peak<int32_t>(const int32_t* x) {
  int32_t peak = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int32_t m = x[i] < 0 ? -x[i] : x[i];
    peak = m > peak ? m : peak;
  }
  return uint64_t(peak);
}

// One vector's codes and scales; returns its exponent. peaks is scratch for k / 32 values at most 1024 x 8.
template <typename T>
inline int32_t quantize_to(const T* x, int k, int exponent, int8_t* codes, int16_t* scales) {
  const int blocks = k / kBlock;
  uint64_t top = 0;
  for (int b = 0; b < blocks; ++b) {
    const uint64_t peak = block_peak(x + b * kBlock);
    top = peak > top ? peak : top;
  }
  if (top == 0) {
    std::memset(codes, 0, size_t(k));
    std::memset(scales, 0, size_t(blocks) * sizeof(int16_t));
    return 0;
  }
  const int shift = 21 - bit_length(top);
  for (int b = 0; b < blocks; ++b) {
    const uint64_t peak = block_peak(x + b * kBlock);
    if (peak == 0) {
      scales[b] = 0;
      std::memset(codes + b * kBlock, 0, kBlock);
      continue;
    }
    const int32_t scale = block_scale(peak, shift);
    scales[b] = int16_t(scale);
    block_codes(x + b * kBlock, bit_length(peak), scale, shift, codes + b * kBlock);
  }
  return exponent - shift;
}

inline void block_sums(const int8_t* codes, const int16_t* scales, int blocks, int16_t* sums, int16_t* rounded) {
  for (int b = 0; b < blocks; ++b) {
    int32_t sum = 0;
    for (int i = 0; i < kBlock; ++i) sum += codes[b * kBlock + i];
    sums[b] = int16_t(sum);                                       // within +-4064
    if (rounded) rounded[b] = int16_t((scales[b] * sum + (1 << 12)) >> 13);  // within +-8192
  }
}

template <typename T>
inline void quantize_row(const T* x, int exponent, const Activations& out, int m) {
  const int blocks = out.k / kBlock;
  int8_t* codes = out.codes + ptrdiff_t(m) * out.k;
  const ptrdiff_t at = ptrdiff_t(m) * blocks;
  out.exponent[m] = quantize_to(x, out.k, exponent, codes, out.scales + at);
  block_sums(codes, out.scales + at, blocks, out.sums + at, out.rounded + at);
}

void quantize_i32(const int32_t* x, int exponent, const Activations& out, int m) {
  quantize_row(x, exponent, out, m);
}

void quantize_i64(const int64_t* x, int exponent, const Activations& out, int m) {
  quantize_row(x, exponent, out, m);
}

// ---- R4, R5 ------------------------------------------------------------------------------------------

inline uint32_t isqrt(uint64_t x) {  // floor(sqrt(x)), bit by bit: once a vector, so not worth more
  uint64_t root = 0;
  for (uint64_t bit = uint64_t(1) << 31; bit != 0; bit >>= 1) {
    const uint64_t next = root | bit;
    if (next * next <= x) root = next;
  }
  return uint32_t(root);
}

// The normalised vector times its gain: values below 2^30 into out (may be x); returns the exponent.
inline int32_t rms_norm(const int32_t* x, int k, const NormGain& g, int fraction_bits, int32_t* out) {
  int32_t peak = 0;
  for (int i = 0; i < k; ++i) {
    const int32_t m = x[i] < 0 ? -x[i] : x[i];
    peak = m > peak ? m : peak;
  }
  int shift = 24 - bit_length(uint64_t(peak));
  if (shift > 12) shift = 12;
  const int64_t half = shift < 0 ? int64_t(1) << (-shift - 1) : 0;
  const int down = shift < 0 ? -shift : 0, up = shift > 0 ? shift : 0;
  int64_t squares = 0;  // k <= 16384 squares of 2^24: below 2^62
  for (int i = 0; i < k; ++i) {
    const int64_t v = ((int64_t(x[i]) + half) >> down) * (int64_t(1) << up);
    squares += v * v;
  }
  int64_t mean = squares / k;
  const int places = -g.eps_exponent - 2 * (fraction_bits + shift);
  if (places < 63) mean += places >= 0 ? int64_t(g.eps_mantissa) >> places : int64_t(g.eps_mantissa) << -places;
  if (mean == 0) {
    std::memset(out, 0, size_t(k) * sizeof(int32_t));
    return 0;
  }
  const int lift = (62 - bit_length(uint64_t(mean))) / 2;
  const int64_t inverse = int64_t((uint64_t(1) << 61) / isqrt(uint64_t(mean) << (2 * lift)));
  for (int i = 0; i < k; ++i) {
    const int64_t v = ((int64_t(x[i]) + half) >> down) * (int64_t(1) << up);
    const int64_t y = (v * inverse + (int64_t(1) << 30)) >> 31;  // 24 + 31 bits
    out[i] = int32_t((y * g.gain[i] + (1 << 16)) >> 17);          // 24 + 23 bits
  }
  return 17 + lift - 30 + g.gain_exponent;
}

void norm_quantize(const int32_t* x, const NormGain& g, int fraction_bits, const Activations& out, int m,
                   int32_t* scratch) {
  const int32_t exponent = rms_norm(x, out.k, g, fraction_bits, scratch);
  quantize_row(scratch, exponent, out, m);
}

void norm_rescale(int32_t* x, int k, const NormGain& g, int fraction_bits, int64_t* clipped) {
  const int32_t exponent = rms_norm(x, k, g, fraction_bits, x);
  for (int i = 0; i < k; ++i) x[i] = saturate(shift_round(x[i], -(exponent + fraction_bits)), clipped);
}

// ---- R6 ----------------------------------------------------------------------------------------------

void rotary(const RopeTables& tables, int head_dim, int position, int32_t* cos_sin) {
  const int half = head_dim / 2;
  const int32_t* low = tables.low + ptrdiff_t(position % 256) * head_dim;
  const int32_t* high = tables.high + ptrdiff_t(position / 256) * head_dim;
  for (int i = 0; i < half; ++i) {
    const int64_t lc = low[2 * i], ls = low[2 * i + 1], hc = high[2 * i], hs = high[2 * i + 1];
    cos_sin[2 * i] = int32_t(shift_round(hc * lc - hs * ls, 30));
    cos_sin[2 * i + 1] = int32_t(shift_round(hs * lc + hc * ls, 30));
  }
}

void rope(int32_t* x, int head_dim, const int32_t* cos_sin, int64_t* clipped) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const int64_t a = x[i], b = x[i + half], c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    x[i] = saturate((a * c - b * s + (1 << 29)) >> 30, clipped);
    x[i + half] = saturate((b * c + a * s + (1 << 29)) >> 30, clipped);
  }
}

// ---- R7 ----------------------------------------------------------------------------------------------

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

constexpr int kMaxHeadDim = 512;
constexpr int kMaxHeadBlocks = kMaxHeadDim / kBlock;

void land(uint8_t* tile, int slot, const int32_t* key, const int32_t* value, int head_dim, int fraction_bits) {
  const TileFields at(head_dim);
  int8_t codes[kMaxHeadDim];
  int16_t scales[kMaxHeadBlocks];
  const int blocks = head_dim / kBlock;
  const int32_t ke = quantize_to(key, head_dim, -fraction_bits, codes, scales);
  for (int j = 0; j < head_dim / 4; ++j) std::memcpy(tile + (size_t(j) * kTile + slot) * 4, codes + 4 * j, 4);
  int16_t* words = reinterpret_cast<int16_t*>(tile + at.key_scales);
  for (int b = 0; b < blocks; ++b) words[b * kTile + slot] = scales[b];
  reinterpret_cast<int16_t*>(tile + at.key_exponent)[slot] = int16_t(ke);

  const int32_t ve = quantize_to(value, head_dim, -fraction_bits, codes, scales);
  uint8_t* out = tile + at.value_codes + size_t(slot / 4) * head_dim * 4 + slot % 4;
  for (int d = 0; d < head_dim; ++d) out[4 * d] = uint8_t(codes[d]);
  words = reinterpret_cast<int16_t*>(tile + at.value_scales);
  for (int b = 0; b < blocks; ++b) words[b * kTile + slot] = scales[b];
  reinterpret_cast<int16_t*>(tile + at.value_exponent)[slot] = int16_t(ve);
}

// ---- R8 ----------------------------------------------------------------------------------------------

inline int dot_shift(int blocks) {
  const int bits = bit_length(uint64_t(blocks - 1));
  return bits < 2 ? 0 : bits - 2;
}

// A query head ready for scoring.
struct Query {
  int8_t codes[kMaxHeadDim];
  int16_t scales[kMaxHeadBlocks], sums[kMaxHeadBlocks];
  int32_t exponent;
};

inline void make_query(const int32_t* q, const AttentionShape& shape, Query* out) {
  out->exponent = quantize_to(q, shape.head_dim, -shape.fraction_bits, out->codes, out->scales);
  block_sums(out->codes, out->scales, shape.head_dim / kBlock, out->sums, nullptr);
}

// acc * 2^(16 + exponent) / total in fixed point.
inline void divide(const int64_t* acc, int head_dim, int64_t total, int exponent, int fraction_bits, int32_t* out,
                   int64_t* clipped) {
  const int width = bit_length(uint64_t(total));
  const uint64_t normal = width > 31 ? uint64_t(total) >> (width - 31) : uint64_t(total) << (31 - width);
  const int64_t inverse = int64_t((uint64_t(1) << 61) / normal);
  for (int d = 0; d < head_dim; ++d) {
    const int64_t reduced = shift_round(acc[d], width - 25);
    out[d] = saturate(shift_round(reduced * inverse, 39 - exponent - fraction_bits), clipped);
  }
}

#ifndef HEADRACE_OWN_ATTEND

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
  alignas(64) int32_t sums[kMaxHeadBlocks * kTile];
  score_tile(reinterpret_cast<const int8_t*>(tile), q.codes, q.sums, shape.head_dim, sums);
  alignas(64) int32_t acc[kTile] = {0};
  for (int b = 0; b < blocks; ++b) {
    const int32_t a = q.scales[b];
    for (int j = 0; j < kTile; ++j) {
      const int32_t narrow = (sums[b * kTile + j] + 8) >> 4;          // within +-32258
      const int32_t c = (scales[b * kTile + j] * a + (1 << 14)) >> 15;  // at most 8322
      acc[j] += (narrow * c) >> r;                                     // below 2^29 before the shift
    }
  }
  const int base = -(15 + 4 + r + q.exponent + shape.scale_exponent + 16);
  const int64_t mantissa = shape.scale_mantissa;
  int low = 99, high = -99;
  for (int j = 0; j < kTile; ++j) {
    const int n = base - exponents[j];
    low = n < low ? n : low;
    high = n > high ? n : high;
  }
  const int64_t limit = int64_t(1) << 30;
  if (low > 0 && high <= 62) {
    for (int j = 0; j < kTile; ++j) {
      const int64_t n = base - exponents[j];
      int64_t s = (acc[j] * mantissa + (int64_t(1) << (n - 1))) >> n;
      s = s > limit ? limit : s;
      out[j] = int32_t(s < -limit ? -limit : s);
    }
  } else {
    for (int j = 0; j < kTile; ++j) {
      const int64_t s = shift_round(acc[j] * mantissa, base - exponents[j]);
      out[j] = int32_t(s > limit ? limit : s < -limit ? -limit : s);
    }
  }
  int32_t top = INT32_MIN;
  for (int j = 0; j < count; ++j) top = out[j] > top ? out[j] : top;
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
  divide(acc, head_dim, total, top, shape.fraction_bits, out, clipped);
}

void attend(const AttentionShape& shape, const uint8_t* const* tiles, const int32_t* const* q, const int32_t* visible,
            int rows, int32_t* const* out, void* scratch, int64_t* clipped) {
  int32_t* scores = static_cast<int32_t*>(scratch);
  for (int i = 0; i < rows; ++i) {
    Query query;
    make_query(q[i], shape, &query);
    int32_t top = INT32_MIN;
    for (int t = 0; t * kTile < visible[i]; ++t) {
      const int count = visible[i] - t * kTile < kTile ? visible[i] - t * kTile : kTile;
      const int32_t best = score_row(shape, tiles[t], query, count, scores + t * kTile);
      top = best > top ? best : top;
    }
    mix_row(shape, tiles, visible[i], top, scores, out[i], clipped);
  }
}

#endif  // HEADRACE_OWN_ATTEND

// ---- R9, R10 -----------------------------------------------------------------------------------------

void silu_mul_quantize(const int32_t* gate, const int32_t* up, const int32_t* table, int fraction_bits,
                       const Activations& out, int m, int64_t* scratch) {
  const int step = fraction_bits - 6;
  const int64_t limit = int64_t(16) << fraction_bits, half = int64_t(1) << (step - 1);
  for (int i = 0; i < out.k; ++i) {
    const int64_t g = gate[i];
    int64_t inside = g + limit;
    inside = inside < 0 ? 0 : inside > 2 * limit - 1 ? 2 * limit - 1 : inside;
    const int64_t index = inside >> step, rest = inside & ((int64_t(1) << step) - 1);
    const int64_t low = table[index], high = table[index + 1];
    int64_t sigmoid = low + (((high - low) * rest + half) >> step);
    sigmoid = g < -limit ? 0 : g >= limit ? int64_t(1) << 24 : sigmoid;
    scratch[i] = ((g * sigmoid + (1 << 23)) >> 24) * up[i];  // 31 + 31 bits
  }
  quantize_row(scratch, -2 * fraction_bits, out, m);
}

void embed(const PackedWeight& w, int row, int fraction_bits, int32_t* out, int64_t* clipped) {
  const int tile = row / kTile, lane = row % kTile, blocks = w.k / kBlock, groups = w.k / w.group;
  const int tiles = (w.n + kTile - 1) / kTile, supers = (groups + kSupergroup - 1) / kSupergroup;
  const int64_t mantissa = w.row[row];
  const int64_t places = int64_t(w.row[tiles * kTile + row]) + fraction_bits;
  const int32_t min_shift = w.row[2 * tiles * kTile + row];
  for (int b = 0; b < blocks; ++b) {
    const int g = b * kBlock / w.group;
    const int64_t s = w.scales[(ptrdiff_t(tile) * groups + g) * kTile + lane];
    const int64_t m =
        w.mins ? w.mins[((ptrdiff_t(tile) * supers + g / kSupergroup) * kTile + lane) * kSupergroup + g % kSupergroup] : 0;
    const uint8_t* codes = w.codes + (ptrdiff_t(tile) * blocks + b) * kBlock * kTile * w.bits / 8;
    for (int i = 0; i < kBlock; ++i) {
      int code;
      if (w.bits == 4) {
        const uint8_t byte = codes[((i % 16) / 4 * kTile + lane) * 4 + i % 4];
        code = (i < 16 ? byte & 15 : byte >> 4) - 8;
      } else {
        code = codes[(i / 4 * kTile + lane) * 4 + i % 4] - 128;
      }
      const int64_t value = (s * code + m * (int64_t(1) << min_shift)) * mantissa;
      out[b * kBlock + i] = saturate(shift_round(value, -places), clipped);
    }
  }
}

}  // namespace

#define HEADRACE_DEFINE_TIER                                                                                   \
  extern const Tier kTier;                                                                                     \
  const Tier kTier = {HEADRACE_TIER_NAME, HEADRACE_PROJECT, quantize_i32, quantize_i64, norm_quantize, norm_rescale, \
                      rotary, rope, land, attend, silu_mul_quantize, embed};

#ifndef HEADRACE_OWN_ATTEND
HEADRACE_DEFINE_TIER
#endif

}  // namespace HEADRACE_ISA
}  // namespace headrace
