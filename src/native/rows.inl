// R2, R4, R5, R6, R7, R9 and R10 in plain C++, in the shapes that compilers vectorise well: 32-bit lanes where
// the bounds allow, one shift count a block, 64-bit products of 32-bit factors. Included by the file of each
// instruction set, after rules.inl.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// ---- products ----------------------------------------------------------------------------------------

#ifndef HEADRACE_OWN_PRODUCTS

// out[i] = (a[i] * b[i * step] + half) >> shift, plus a[i] if `add`. What is shifted fits int32 afterwards, so
// that the shift, of 1 to 31, may be logical. step 0 multiplies by b[0]. out may be a.
inline void mul_round(const int32_t* a, const int32_t* b, int step, int count, int shift, int32_t* out, bool add) {
  const int64_t half = int64_t(1) << (shift - 1);
  for (int i = 0; i < count; ++i) {
    const int64_t wide = int64_t(a[i]) * b[i * step] + half;
    out[i] = int32_t(uint64_t(wide) >> shift) + (add ? a[i] : 0);
  }
}

// Sum of squares of |x| <= 2^24: below 2^62 for count <= 16384.
inline int64_t sum_squares(const int32_t* x, int count) {
  int64_t sum = 0;
  for (int i = 0; i < count; ++i) sum += int64_t(x[i]) * x[i];
  return sum;
}

#endif

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

inline uint32_t norm_peak(const int32_t* x, int k) {
  int32_t peak = 0;
  for (int i = 0; i < k; ++i) {
    const int32_t m = x[i] < 0 ? -x[i] : x[i];
    peak = m > peak ? m : peak;
  }
  return uint32_t(peak);
}

// out = x shifted to 24 bits.
inline void reduce_norm(const int32_t* x, int k, int shift, int32_t* out) {
  const Rounding by(-shift);
  for (int i = 0; i < k; ++i) out[i] = ((int32_t(uint32_t(x[i]) << by.left) >> by.right) + 1) >> 1;
}

// The normalised vector times its gain: values below 2^30 into out (may be x); returns the exponent.
inline int32_t rms_norm(const int32_t* x, int k, const NormGain& g, int fraction_bits, int32_t* out) {
  const int shift = norm_shift(norm_peak(x, k));
  reduce_norm(x, k, shift, out);
  const NormPlan plan = plan_norm(sum_squares(out, k), k, shift, g, fraction_bits);
  if (plan.inverse == 0) return 0;  // x is 0
  // 24 bits, times inverse / 2^31, rounded to 24 bits. The inverse is taken off 2^31, which makes it a signed
  // factor of 32 bits: x * 2^31 >> 31 is x, whatever is added below.
  const int32_t less = int32_t(int64_t(plan.inverse) - (int64_t(1) << 31));
  mul_round(out, &less, 0, k, 31, out, true);
  mul_round(out, g.gain, 1, k, 17, out, false);  // times 23 bits, rounded to 30
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

// Sigmoid of x[i], Q24, for any number of fraction bits.
inline void sigmoid_wide(const int32_t* x, const int32_t* table, int fraction_bits, int count, int32_t* out) {
  const int step = fraction_bits - 6;
  const int64_t limit = int64_t(16) << fraction_bits, half = int64_t(1) << (step - 1);
  for (int i = 0; i < count; ++i) {
    int64_t inside = x[i] + limit;
    inside = inside < 0 ? 0 : inside > 2 * limit - 1 ? 2 * limit - 1 : inside;
    const int64_t low = table[inside >> step], high = table[(inside >> step) + 1];
    const int64_t between = ((high - low) * (inside & ((int64_t(1) << step) - 1)) + half) >> step;
    out[i] = int32_t(x[i] < -limit ? 0 : x[i] >= limit ? int64_t(1) << 24 : low + between);
  }
}

constexpr int kSiluChunk = 64;  // elements whose intermediates wait in memory between loops

#ifndef HEADRACE_OWN_SIGMOID

// Sigmoid of x[i], Q24. With 20 fraction bits or less everything fits int32: neighbours in the table differ by
// at most 2^16, and the position between them has fraction_bits - 6 bits.
inline void sigmoid(const int32_t* x, const int32_t* table, int fraction_bits, int count, int32_t* out) {
  const int step = fraction_bits - 6;
  const int32_t limit = 16 << fraction_bits, half = 1 << (step - 1), mask = (1 << step) - 1;
  int32_t index[kSiluChunk], rest[kSiluChunk], low[kSiluChunk], high[kSiluChunk];
  for (int i = 0; i < count; ++i) {
    const int32_t held = x[i] < -limit ? -limit : x[i] > limit - 1 ? limit - 1 : x[i];
    index[i] = (held + limit) >> step;
    rest[i] = (held + limit) & mask;
  }
  for (int i = 0; i < count; ++i) low[i] = table[index[i]], high[i] = table[index[i] + 1];
  for (int i = 0; i < count; ++i) {
    const int32_t inside = low[i] + (((high[i] - low[i]) * rest[i] + half) >> step);
    out[i] = x[i] < -limit ? 0 : x[i] >= limit ? 1 << 24 : inside;
  }
}

#endif

// silu(gate) * up, below 2^62. gate * sigmoid / 2^24 is no larger than gate.
inline void silu_mul(const int32_t* gate, const int32_t* up, const int32_t* table, int fraction_bits, int k,
                     int64_t* out) {
  for (int at = 0; at < k; at += kSiluChunk) {
    const int count = k - at < kSiluChunk ? k - at : kSiluChunk;
    int32_t s[kSiluChunk];
    (fraction_bits <= 20 ? sigmoid : sigmoid_wide)(gate + at, table, fraction_bits, count, s);
    mul_round(s, gate + at, 1, count, 24, s, false);
    for (int i = 0; i < count; ++i) out[at + i] = int64_t(s[i]) * up[at + i];
  }
}

void silu_mul_quantize(const int32_t* gate, const int32_t* up, const int32_t* table, int fraction_bits,
                       const Activations& out, int m, int64_t* scratch) {
  silu_mul(gate, up, table, fraction_bits, out.k, scratch);
  quantize_row(scratch, -2 * fraction_bits, out, m);
}

// ---- R12, R14, R15 -----------------------------------------------------------------------------------

// Products are below 2^30; |sum| < 2^44.
inline int64_t dot_words(const int16_t* a, const int16_t* b, int k) {
  int64_t sum = 0;
  for (int i = 0; i < k; ++i) sum += int32_t(a[i]) * b[i];
  return sum;
}

void route(const int32_t* x, const NormGain& g, int fraction_bits, const RouterRows& router, int32_t* logits,
           int32_t* scratch, int64_t* clipped) {
  const int k = router.k;
  const int32_t exponent = rms_norm(x, k, g, fraction_bits, scratch);
  const int shift = bit_length(norm_peak(scratch, k)) - 15;
  int16_t* reduced = reinterpret_cast<int16_t*>(scratch + k);
  for (int i = 0; i < k; ++i) {
    const int64_t value = shift_round(scratch[i], shift);
    reduced[i] = int16_t(value > 32767 ? 32767 : value);
  }
  for (int row = 0; row < router.rows; ++row) {
    const int64_t acc = dot_words(router.codes + ptrdiff_t(row) * k, reduced, k);
    logits[row] = saturate(shift_round(acc, -(int64_t(router.exponents[row]) + exponent + shift + fraction_bits)), clipped);
  }
}

// |output * share| < 2^61; at most 64 rounded products of 2^(31 + headroom) are summed.
constexpr int kTermShift = 30 - kExpertHeadroom;
constexpr int64_t kTermHalf = int64_t(1) << (kTermShift - 1);

void mix(int32_t* x, const int32_t* const* outputs, const int32_t* shares, int count, int k, int64_t* clipped) {
  for (int i = 0; i < k; ++i) {
    int64_t sum = x[i];
    for (int j = 0; j < count; ++j) sum += (int64_t(outputs[j][i]) * shares[j] + kTermHalf) >> kTermShift;
    x[i] = saturate(sum, clipped);
  }
}

void add_terms(int64_t* sums, const int32_t* const* outputs, const int32_t* shares, int count, int k, bool first) {
  constexpr int piece = 512;  // sums that stay in a core's nearest cache from term to term
  for (int at = 0; at < k; at += piece) {
    const int size = k - at < piece ? k - at : piece;
    int64_t* to = sums + at;
    if (first) std::memset(to, 0, size_t(size) * sizeof(int64_t));
    for (int j = 0; j < count; ++j) {
      const int32_t* from = outputs[j] + at;
      const int32_t share = shares[j];
      for (int i = 0; i < size; ++i) to[i] += (int64_t(from[i]) * share + kTermHalf) >> kTermShift;
    }
  }
}

void add_sums(int32_t* x, const int64_t* sums, int k, int64_t* clipped) {
  for (int i = 0; i < k; ++i) x[i] = saturate(x[i] + sums[i], clipped);
}

void add_shared(int32_t* x, const int32_t* output, int32_t gate, const int32_t* table, int fraction_bits, int k,
                int64_t* clipped) {
  int32_t share;
  sigmoid_wide(&gate, table, fraction_bits, 1, &share);
  for (int i = 0; i < k; ++i)
    x[i] = saturate(x[i] + ((int64_t(output[i]) * share + (int64_t(1) << 23)) >> 24), clipped);
}

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
