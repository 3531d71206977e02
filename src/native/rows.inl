// R2, R4, R5, R6, R7, R9 and R10 in plain C++, in the shapes that compilers vectorise well: 32-bit lanes where
// the bounds allow, one shift count a block, 64-bit products of 32-bit factors. Included by the file of each
// instruction set, after rules.inl.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// ---- R2 ----------------------------------------------------------------------------------------------

inline uint64_t block_peak(const int32_t* x) {
  int32_t peak = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int32_t m = x[i] < 0 ? -x[i] : x[i];
    peak = m > peak ? m : peak;
  }
  return uint64_t(peak);
}

inline uint64_t block_peak(const int64_t* x) {
  int64_t peak = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int64_t m = x[i] < 0 ? -x[i] : x[i];
    peak = m > peak ? m : peak;
  }
  return uint64_t(peak);
}

// The block rounded to 15 bits by its own largest element: |u| <= 2^15.
inline void reduce_block(const int32_t* x, int down, int32_t* u) {
  const Rounding by(down);
  for (int i = 0; i < kBlock; ++i) u[i] = ((int32_t(uint32_t(x[i]) << by.left) >> by.right) + 1) >> 1;
}

// The low 32 bits of a 64-bit shift by at most 32 hold the whole value, also when the shift is logical; the
// rest of the count is left to 32-bit lanes.
inline void reduce_block(const int64_t* x, int down, int32_t* u) {
  const Rounding by(down);
  const int wide = by.right < 32 ? by.right : 32, narrow = by.right - wide;
  for (int i = 0; i < kBlock; ++i) {
    const int32_t low = int32_t(uint32_t((uint64_t(x[i]) << by.left) >> wide));
    u[i] = ((low >> narrow) + 1) >> 1;
  }
}

// |u * inverse| <= 2^15 * 32512 < 2^30; codes within +-127.
inline int32_t block_codes(const int32_t* u, int32_t inverse, int8_t* codes) {
  int32_t sum = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int32_t code = (u[i] * inverse + (1 << 21)) >> 22;
    codes[i] = int8_t(code);
    sum += code;
  }
  return sum;
}

constexpr int kPeakBlocks = 128;  // peaks remembered between the two passes; those of later blocks are found again

// One vector's codes, scales and code sums; returns its exponent.
template <typename T>
inline int32_t quantize_to(const T* x, int k, int exponent, int8_t* codes, int16_t* scales, int16_t* sums) {
  const int blocks = k / kBlock;
  uint64_t top = 0, peaks[kPeakBlocks];
  for (int b = 0; b < blocks; ++b) {
    const uint64_t peak = block_peak(x + b * kBlock);
    if (b < kPeakBlocks) peaks[b] = peak;
    top = peak > top ? peak : top;
  }
  if (top == 0) {
    std::memset(codes, 0, size_t(k));
    std::memset(scales, 0, size_t(blocks) * sizeof(int16_t));
    std::memset(sums, 0, size_t(blocks) * sizeof(int16_t));
    return 0;
  }
  const int shift = 21 - bit_length(top);
  for (int b = 0; b < blocks; ++b) {
    const BlockPlan plan = plan_block(b < kPeakBlocks ? peaks[b] : block_peak(x + b * kBlock), shift);
    alignas(64) int32_t u[kBlock];
    reduce_block(x + b * kBlock, plan.down, u);
    scales[b] = int16_t(plan.scale);
    sums[b] = int16_t(block_codes(u, plan.inverse, codes + b * kBlock));  // within +-4064
  }
  return exponent - shift;
}

template <typename T>
inline void quantize_row(const T* x, int exponent, const Activations& out, int m) {
  const int blocks = out.k / kBlock;
  const ptrdiff_t at = ptrdiff_t(m) * blocks;
  int16_t *scales = out.scales + at, *sums = out.sums + at, *rounded = out.rounded + at;
  out.exponent[m] = quantize_to(x, out.k, exponent, out.codes + ptrdiff_t(m) * out.k, scales, sums);
  for (int b = 0; b < blocks; ++b) rounded[b] = rounded_sum(scales[b], sums[b]);
}

void quantize_i32(const int32_t* x, int exponent, const Activations& out, int m) { quantize_row(x, exponent, out, m); }

void quantize_i64(const int64_t* x, int exponent, const Activations& out, int m) { quantize_row(x, exponent, out, m); }

// ---- R4, R5 ------------------------------------------------------------------------------------------

#ifndef HEADRACE_OWN_NORM

inline uint32_t norm_peak(const int32_t* x, int k) {
  int32_t peak = 0;
  for (int i = 0; i < k; ++i) {
    const int32_t m = x[i] < 0 ? -x[i] : x[i];
    peak = m > peak ? m : peak;
  }
  return uint32_t(peak);
}

// out = x shifted to 24 bits; returns the sum of squares, below 2^62 for k <= 16384.
inline int64_t reduce_norm(const int32_t* x, int k, int shift, int32_t* out) {
  const Rounding by(-shift);
  int64_t squares = 0;
  for (int i = 0; i < k; ++i) {
    const int32_t v = ((int32_t(uint32_t(x[i]) << by.left) >> by.right) + 1) >> 1;
    out[i] = v;
    squares += int64_t(v) * v;
  }
  return squares;
}

// x: 24 bits, times 31 bits, rounded to 24; times a gain of 23 bits, rounded to 30. The results fit int32, so
// the shifts may be logical.
inline void scale_norm(int32_t* x, int k, uint32_t inverse, const int32_t* gain) {
  for (int i = 0; i < k; ++i) {
    const int64_t wide = int64_t(x[i]) * int64_t(inverse) + (int64_t(1) << 30);
    x[i] = int32_t(uint64_t(wide) >> 31);
  }
  for (int i = 0; i < k; ++i) {
    const int64_t wide = int64_t(x[i]) * gain[i] + (1 << 16);
    x[i] = int32_t(uint64_t(wide) >> 17);
  }
}

#endif

// The normalised vector times its gain: values below 2^30 into out (may be x); returns the exponent.
inline int32_t rms_norm(const int32_t* x, int k, const NormGain& g, int fraction_bits, int32_t* out) {
  const int shift = norm_shift(norm_peak(x, k));
  const NormPlan plan = plan_norm(reduce_norm(x, k, shift, out), k, shift, g, fraction_bits);
  scale_norm(out, k, plan.inverse, g.gain);
  return plan.exponent;
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
    cos_sin[2 * i] = int32_t((hc * lc - hs * ls + (1 << 29)) >> 30);
    cos_sin[2 * i + 1] = int32_t((hs * lc + hc * ls + (1 << 29)) >> 30);
  }
}

#ifndef HEADRACE_OWN_ROPE
void rope(int32_t* x, int head_dim, const int32_t* cos_sin, int64_t* clipped) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const int64_t a = x[i], b = x[i + half], c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    x[i] = saturate((a * c - b * s + (1 << 29)) >> 30, clipped);
    x[i + half] = saturate((b * c + a * s + (1 << 29)) >> 30, clipped);
  }
}
#endif

// ---- R7 ----------------------------------------------------------------------------------------------

void land(uint8_t* tile, int slot, const int32_t* key, const int32_t* value, int head_dim, int fraction_bits) {
  const TileFields at(head_dim);
  int8_t codes[kMaxHeadDim];
  int16_t scales[kMaxHeadBlocks], sums[kMaxHeadBlocks];
  const int blocks = head_dim / kBlock;
  const int32_t ke = quantize_to(key, head_dim, -fraction_bits, codes, scales, sums);
  for (int j = 0; j < head_dim / 4; ++j) std::memcpy(tile + (size_t(j) * kTile + slot) * 4, codes + 4 * j, 4);
  int16_t* words = reinterpret_cast<int16_t*>(tile + at.key_scales);
  for (int b = 0; b < blocks; ++b) words[b * kTile + slot] = scales[b];
  reinterpret_cast<int16_t*>(tile + at.key_exponent)[slot] = int16_t(ke);

  const int32_t ve = quantize_to(value, head_dim, -fraction_bits, codes, scales, sums);
  uint8_t* out = tile + at.value_codes + size_t(slot / 4) * head_dim * 4 + slot % 4;
  for (int d = 0; d < head_dim; ++d) out[4 * d] = uint8_t(codes[d]);
  words = reinterpret_cast<int16_t*>(tile + at.value_scales);
  for (int b = 0; b < blocks; ++b) words[b * kTile + slot] = scales[b];
  reinterpret_cast<int16_t*>(tile + at.value_exponent)[slot] = int16_t(ve);
}

// ---- R9, R10 -----------------------------------------------------------------------------------------

// silu(gate) * up, below 2^62.
inline void silu_mul(const int32_t* gate, const int32_t* up, const int32_t* table, int fraction_bits, int k,
                     int64_t* out) {
  const int step = fraction_bits - 6;
  const int64_t limit = int64_t(16) << fraction_bits, half = int64_t(1) << (step - 1);
  for (int i = 0; i < k; ++i) {
    const int64_t g = gate[i];
    int64_t inside = g + limit;
    inside = inside < 0 ? 0 : inside > 2 * limit - 1 ? 2 * limit - 1 : inside;
    const int64_t index = inside >> step, rest = inside & ((int64_t(1) << step) - 1);
    const int64_t low = table[index], high = table[index + 1];
    int64_t sigmoid = low + (((high - low) * rest + half) >> step);
    sigmoid = g < -limit ? 0 : g >= limit ? int64_t(1) << 24 : sigmoid;
    out[i] = ((g * sigmoid + (1 << 23)) >> 24) * up[i];  // 31 + 31 bits
  }
}

#ifndef HEADRACE_OWN_SILU
void silu_mul_quantize(const int32_t* gate, const int32_t* up, const int32_t* table, int fraction_bits,
                       const Activations& out, int m, int64_t* scratch) {
  silu_mul(gate, up, table, fraction_bits, out.k, scratch);
  quantize_row(scratch, -2 * fraction_bits, out, m);
}
#endif

// The code at element i of a block for row `lane` of its tile, centred.
inline int code_at(const uint8_t* block, int bits, int lane, int i) {
  if (bits == 8) return block[(i / 4 * kTile + lane) * 4 + i % 4] - 128;
  const uint8_t byte = block[(i % 16 / 4 * kTile + lane) * 4 + i % 4];
  return (i < 16 ? byte & 15 : byte >> 4) - 8;
}

void embed(const PackedWeight& w, int row, int fraction_bits, int32_t* out, int64_t* clipped) {
  const int tile = row / kTile, lane = row % kTile, blocks = w.k / kBlock, groups = (w.k + w.group - 1) / w.group;
  const int tiles = (w.n + kTile - 1) / kTile, supers = (groups + kSupergroup - 1) / kSupergroup;
  const int64_t mantissa = w.row[row];
  const int64_t places = int64_t(w.row[tiles * kTile + row]) + fraction_bits;
  const int32_t min_shift = w.row[2 * tiles * kTile + row];
  for (int b = 0; b < blocks; ++b) {
    const int g = b * kBlock / w.group;
    const int64_t s = w.scales[(ptrdiff_t(tile) * groups + g) * kTile + lane];
    const ptrdiff_t super = ptrdiff_t(tile) * supers + g / kSupergroup;
    const int64_t min = w.mins ? w.mins[(super * kTile + lane) * kSupergroup + g % kSupergroup] : 0;
    const uint8_t* codes = w.codes + (ptrdiff_t(tile) * blocks + b) * kBlock * kTile * w.bits / 8;
    for (int i = 0; i < kBlock; ++i) {
      const int64_t value = s * code_at(codes, w.bits, lane, i) + min * (int64_t(1) << min_shift);
      out[b * kBlock + i] = saturate(shift_round(value * mantissa, -places), clipped);
    }
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
