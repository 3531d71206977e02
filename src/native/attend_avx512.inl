// The hooks of attend.inl for AVX-512 with VNNI.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

#define UNROLL _Pragma("GCC unroll 16")

inline __m512i broadcast4(const void* bytes) {
  int32_t word;
  std::memcpy(&word, bytes, 4);
  return _mm512_set1_epi32(word);
}

// Lanes of tile t that a query sees which sees `visible` keys.
inline __mmask16 seen_lanes(int visible, int t) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(visible - t * kTile));
}

// ---- scores ------------------------------------------------------------------------------------------

// Blocks blocks of one tile of keys, from block `first` on, with what ends a score: the exponents of even and
// odd keys plus one, and whether all shifts lie in 1..62.
template <int Blocks>
struct Keys {
  __m512i code[8 * Blocks], scale[Blocks], even, odd;
  const int16_t* exponents;
  bool plain;
};

template <int Blocks>
inline Keys<Blocks> read_keys(const uint8_t* tile, int t, int first, const Queries& q) {
  const TileFields at(q.head_dim);
  Keys<Blocks> keys;
  UNROLL for (int p = 0; p < 8 * Blocks; ++p)
    keys.code[p] = _mm512_xor_si512(load512(tile + (first * 8 + p) * 64), _mm512_set1_epi8(char(0x80)));
  UNROLL for (int b = 0; b < Blocks; ++b)
    keys.scale[b] = _mm512_cvtepu16_epi32(load256(tile + at.key_scales + size_t(first + b) * kTile * 2));
  keys.exponents = words(tile, at.key_exponent);
  const __m512i all = _mm512_cvtepi16_epi32(load256(keys.exponents));
  const __m512i e = _mm512_mask_mov_epi32(_mm512_set1_epi32(keys.exponents[0]), seen_lanes(q.most, t), all);
  const __m512i next = _mm512_add_epi32(e, _mm512_set1_epi32(1));
  keys.even = _mm512_srai_epi64(_mm512_slli_epi64(next, 32), 32);
  keys.odd = _mm512_srai_epi64(next, 32);
  keys.plain = q.lowest_base - _mm512_reduce_max_epi32(e) >= 1 && q.highest_base - _mm512_reduce_min_epi32(e) <= 62;
  return keys;
}

template <int Blocks>
__attribute__((noinline)) __m512i finish_slowly(__m512i acc, const Keys<Blocks>& keys, int32_t base, int32_t mantissa) {
  alignas(64) int32_t values[kTile];
  store512(values, acc);
  for (int j = 0; j < kTile; ++j) values[j] = score_of(values[j], mantissa, base - keys.exponents[j]);
  return load512(values);
}

// Scores are acc * mantissa / 2^n, rounded, n = base - key exponent; the products are below 2^61. The shift stops
// one place early; adding 2^31 + 1 then rounds, and leaves a 32-bit number exactly when no score needs a clip.
template <int Blocks>
inline __m512i finish_scores(__m512i acc, const Keys<Blocks>& keys, int32_t base, int32_t mantissa) {
  if (__builtin_expect(!keys.plain, 0)) return finish_slowly(acc, keys, base, mantissa);
  const __m512i factor = _mm512_set1_epi64(mantissa), shift = _mm512_set1_epi64(base);
  const __m512i offset = _mm512_set1_epi64((int64_t(1) << 31) + 1), upper = _mm512_set1_epi64(~int64_t(UINT32_MAX));
  const __m512i first = _mm512_mul_epi32(acc, factor), second = _mm512_mul_epi32(_mm512_srli_epi64(acc, 32), factor);
  const __m512i even = _mm512_add_epi64(_mm512_srav_epi64(first, _mm512_sub_epi64(shift, keys.even)), offset);
  const __m512i odd = _mm512_add_epi64(_mm512_srav_epi64(second, _mm512_sub_epi64(shift, keys.odd)), offset);
  if (__builtin_expect(_mm512_test_epi64_mask(_mm512_or_si512(even, odd), upper), 0))
    return finish_slowly(acc, keys, base, mantissa);
  const __m512i both = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  return _mm512_sub_epi32(_mm512_srli_epi32(both, 1), _mm512_set1_epi32(1 << 30));
}

// R3's accumulators of Rows queries, several at once to hide vpdpbusd's latency. Block sums fit int16, so
// vpmaddwd multiplies them by their combined scale.
template <int Blocks, int Rows, bool Shift>
inline void add_blocks(const Keys<Blocks>& keys, int first, const Queries& q, const int32_t* record, __m512i* acc) {
  UNROLL for (int b = 0; b < Blocks; ++b) {
    const int32_t *start = record + 2 + first + b, *scale = start + q.blocks;
    const int32_t* code = record + q.codes + 8 * (first + b);
    __m512i sum[Rows];
    UNROLL for (int i = 0; i < Rows; ++i) sum[i] = _mm512_set1_epi32(start[i * q.stride]);
    UNROLL for (int p = 0; p < 8; ++p)
      UNROLL for (int i = 0; i < Rows; ++i)
        sum[i] = _mm512_dpbusd_epi32(sum[i], keys.code[8 * b + p], _mm512_set1_epi32(code[i * q.stride + p]));
    UNROLL for (int i = 0; i < Rows; ++i) {
      const __m512i combined = _mm512_mulhrs_epi16(keys.scale[b], _mm512_set1_epi32(scale[i * q.stride]));
      const __m512i product = _mm512_madd_epi16(_mm512_srai_epi32(sum[i], 4), combined);
      acc[i] = _mm512_add_epi32(acc[i], Shift ? _mm512_srai_epi32(product, dot_shift(q.blocks)) : product);
    }
  }
}

// Scores of Rows queries from `row` on. The accumulators of heads wider than Blocks wait in the scores.
template <int Blocks, int Rows, bool Shift>
inline void score_rows(const Keys<Blocks>& keys, int t, int first, const Queries& q, int row) {
  const int32_t* record = q.record(row);
  int32_t* out = q.scores_of(row) + t * kTile;
  const ptrdiff_t step = ptrdiff_t(q.score_tiles) * kTile;
  __m512i acc[Rows];
  UNROLL for (int i = 0; i < Rows; ++i) acc[i] = first == 0 ? _mm512_setzero_si512() : load512(out + i * step);
  add_blocks<Blocks, Rows, Shift>(keys, first, q, record, acc);
  if (first + Blocks == q.blocks) {
    UNROLL for (int i = 0; i < Rows; ++i) {
      acc[i] = finish_scores(acc[i], keys, record[i * q.stride], q.mantissa);
      int32_t* best = q.best + (row + i) * kTile;
      const __m512i before = load512(best);
      store512(best, _mm512_mask_max_epi32(before, seen_lanes(record[i * q.stride + 1], t), before, acc[i]));
    }
  }
  UNROLL for (int i = 0; i < Rows; ++i) store512(out + i * step, acc[i]);
}

template <int Blocks, bool Shift>
void score_blocks(const uint8_t* tile, int t, int first, const Queries& q) {
  const Keys<Blocks> keys = read_keys<Blocks>(tile, t, first, q);
  int row = 0;
  for (; row + 4 <= q.rows; row += 4) score_rows<Blocks, 4, Shift>(keys, t, first, q, row);
  for (; row < q.rows; ++row) score_rows<Blocks, 1, Shift>(keys, t, first, q, row);
}

template <bool Shift>
void score_all_blocks(const uint8_t* tile, int t, const Queries& q) {
  int b = 0;
  for (; b + 2 <= q.blocks; b += 2) score_blocks<2, Shift>(tile, t, b, q);
  if (b < q.blocks) score_blocks<1, Shift>(tile, t, b, q);
}

inline void score_tile(const uint8_t* tile, int t, const Queries& q) {
  (dot_shift(q.blocks) == 0 ? score_all_blocks<false> : score_all_blocks<true>)(tile, t, q);
}

// ---- weights -----------------------------------------------------------------------------------------

// 2^-delta in Q16 for two times 16 lanes of delta >= 0, in place. The fractions of both share 16-bit lanes:
// all products are t * f >> 16, which is vpmulhuw.
inline void exp2_pair(__m512i* a, __m512i* b) {
  const __m512i f = _mm512_mask_blend_epi16(0xAAAAAAAA, *a, _mm512_slli_epi32(*b, 16));
  __m512i t = _mm512_sub_epi16(_mm512_set1_epi16(3496), _mm512_mulhi_epu16(_mm512_set1_epi16(454), f));
  t = _mm512_sub_epi16(_mm512_set1_epi16(15698), _mm512_mulhi_epu16(t, f));
  t = _mm512_sub_epi16(_mm512_set1_epi16(short(45423)), _mm512_mulhi_epu16(t, f));
  const __m512i carry = _mm512_srli_epi16(_mm512_mullo_epi16(t, f), 15);
  const __m512i less = _mm512_add_epi16(_mm512_mulhi_epu16(t, f), carry);  // 65536 - p, at most 32768
  // p / 2^n, rounded: (2 p >> n) + 1 >> 1, 0 beyond n = 31 as vpsrlvd does.
  const __m512i one = _mm512_set1_epi32(1), twice = _mm512_set1_epi32(1 << 17);
  const __m512i pa = _mm512_sub_epi32(twice, _mm512_slli_epi32(_mm512_and_si512(less, _mm512_set1_epi32(0xFFFF)), 1));
  const __m512i pb = _mm512_sub_epi32(twice, _mm512_slli_epi32(_mm512_srli_epi32(less, 16), 1));
  *a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_srlv_epi32(pa, _mm512_srli_epi32(*a, 16)), one), 1);
  *b = _mm512_srli_epi32(_mm512_add_epi32(_mm512_srlv_epi32(pb, _mm512_srli_epi32(*b, 16)), one), 1);
}

inline __m512i combine(__m512i weights, const int16_t* scales, __m512i shift) {
  const __m512i product = _mm512_mullo_epi32(weights, _mm512_cvtepu16_epi32(load256(scales)));  // below 2^31
  return _mm512_srli_epi32(_mm512_add_epi32(_mm512_srlv_epi32(product, shift), _mm512_set1_epi32(1)), 1);
}

// Bytes of a mix: u8 [4][2][2][4], for four positions the low and high bytes of the first and second block's
// weights c = shift_round(w * a_v, 16 + top - E_v), 15 bits. Unseen positions have weight 0, and so c = 0.
inline bool combine_tile(const uint8_t* tile, const TileFields& at, int blocks, int top, const int32_t* weight_lanes,
                         uint8_t* out) {
  const __m512i by_byte = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i weights = load512(weight_lanes), exponents = _mm512_cvtepi16_epi32(load256(tile + at.value_exponent));
  const __m512i shift = _mm512_sub_epi32(_mm512_set1_epi32(15 + top), exponents);
  const int16_t* scales = words(tile, at.value_scales);
  __m512i any = _mm512_setzero_si512();
  for (int b = 0; b < blocks; b += 2, out += 64) {
    __m512i c = combine(weights, scales + b * kTile, shift);
    if (b + 1 < blocks) c = _mm512_or_si512(c, _mm512_slli_epi32(combine(weights, scales + (b + 1) * kTile, shift), 16));
    store512(out, _mm512_shuffle_epi8(c, by_byte));
    any = _mm512_or_si512(any, c);
  }
  return _mm512_test_epi32_mask(any, any) != 0;
}

inline __m512i distance(const int32_t* scores, int t, int visible, __m512i best) {
  if (t * kTile >= visible) return _mm512_set1_epi32(INT32_MAX);  // weight 0
  return _mm512_mask_sub_epi32(_mm512_set1_epi32(INT32_MAX), seen_lanes(visible, t), best, load512(scores + t * kTile));
}

inline int64_t sum_unsigned(__m512i v) {
  const __m512i low = _mm512_and_si512(v, _mm512_set1_epi64(0xFFFFFFFF));
  return _mm512_reduce_add_epi64(_mm512_add_epi64(low, _mm512_srli_epi64(v, 32)));
}

// Scores become weights, of an even number of tiles; returns their total.
inline int64_t weigh(int32_t* scores, int visible, int32_t best) {
  const __m512i most = _mm512_set1_epi32(best);
  __m512i part = _mm512_setzero_si512();
  int64_t total = 0;
  for (int t = 0; t * kTile < visible; t += 2) {
    __m512i a = distance(scores, t, visible, most), b = distance(scores, t + 1, visible, most);
    exp2_pair(&a, &b);
    store512(scores + t * kTile, a);
    store512(scores + (t + 1) * kTile, b);
    part = _mm512_add_epi32(part, _mm512_add_epi32(a, b));
    if (t % 32768 == 32766) total += sum_unsigned(part), part = _mm512_setzero_si512();  // 32768 * 65536 = 2^31
  }
  return total + sum_unsigned(part);
}

// ---- values ------------------------------------------------------------------------------------------

constexpr int kFlushTiles = 2048;  // 32768 positions: 32768 * 255 * 127 < 2^31

inline void add_wide(int64_t* acc, __m512i low, __m512i high) {
  for (int half = 0; half < 2; ++half) {
    const __m256i l = half ? _mm512_extracti64x4_epi64(low, 1) : _mm512_castsi512_si256(low);
    const __m256i h = half ? _mm512_extracti64x4_epi64(high, 1) : _mm512_castsi512_si256(high);
    const __m512i sum = _mm512_add_epi64(_mm512_cvtepi32_epi64(l), _mm512_slli_epi64(_mm512_cvtepi32_epi64(h), 8));
    store512(acc + 8 * half, _mm512_add_epi64(load512(acc + 8 * half), sum));
  }
}

constexpr int kMixRows = 2;

// acc[row][d] += sum of c * v over the listed tiles for the Blocks blocks of pair `pair`. A single row has two
// sets of sums, which keeps vpdpbusd's latency hidden.
template <int Blocks, int Rows>
void add_pair(const uint8_t* const* tiles, const TileFields& at, int head_dim, const Mix& mix, int pair,
              int64_t (*acc)[kMaxHeadDim]) {
  const size_t offset = at.value_codes + size_t(pair) * 256;
  for (int begin = 0; begin < mix.count; begin += kFlushTiles) {
    const int end = mix.count - begin < kFlushTiles ? mix.count : begin + kFlushTiles;
    __m512i low[2][2 * Blocks], high[2][2 * Blocks];
    UNROLL for (int i = 0; i < 2; ++i)
      UNROLL for (int j = 0; j < 2 * Blocks; ++j) low[i][j] = high[i][j] = _mm512_setzero_si512();
    for (int i = begin; i < end; ++i) {
      const uint8_t *c = mix.of(i, 0) + pair * 64, *values = tiles[mix.list[i]] + offset;
      const ptrdiff_t row_bytes = ptrdiff_t(mix.pairs) * 64;
      UNROLL for (int g = 0; g < 4; ++g, c += 16, values += head_dim * 4) {
        UNROLL for (int b = 0; b < Blocks; ++b) {
          UNROLL for (int j = 2 * b; j < 2 * b + 2; ++j) {
            __m512i v = load512(values + 64 * j);
            asm("" : "+v"(v));  // one load for all products
            UNROLL for (int row = 0; row < Rows; ++row) {
              const int set = Rows == 1 ? g & 1 : row;
              const uint8_t* weight = c + row * row_bytes + 8 * b;
              low[set][j] = _mm512_dpbusd_epi32(low[set][j], broadcast4(weight), v);
              high[set][j] = _mm512_dpbusd_epi32(high[set][j], broadcast4(weight + 4), v);
            }
          }
        }
      }
    }
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2 * Blocks; ++j) add_wide(acc[Rows == 1 ? 0 : i] + pair * 64 + 16 * j, low[i][j], high[i][j]);
  }
}

template <int Rows>
inline void add_values(const uint8_t* const* tiles, const TileFields& at, int head_dim, const Mix& mix, int pair,
                       int blocks, int64_t (*acc)[kMaxHeadDim]) {
  (blocks == 2 ? add_pair<2, Rows> : add_pair<1, Rows>)(tiles, at, head_dim, mix, pair, acc);
}

// The rounding shifts of `Division` for 8 elements, when both counts are those of ordinary attention.
inline void divide(const int64_t* acc, int head_dim, const Division& by, int32_t* out, int64_t* clipped) {
  for (int d = 0; d < head_dim; d += 8) {
    alignas(64) int64_t value[8];
    const __m512i x = load512(acc + d), one = _mm512_set1_epi64(1);
    const __m512i reduced =
        by.first < 1 ? _mm512_sll_epi64(x, _mm_cvtsi32_si128(-by.first))
                     : _mm512_srai_epi64(_mm512_add_epi64(_mm512_sra_epi64(x, _mm_cvtsi32_si128(by.first - 1)), one), 1);
    const __m512i product = _mm512_mullo_epi64(reduced, _mm512_set1_epi64(by.inverse));
    if (by.last >= 1 && by.last <= 62) {
      const __m512i early = _mm512_sra_epi64(product, _mm_cvtsi32_si128(by.last - 1));
      const __m512i y = _mm512_srai_epi64(_mm512_add_epi64(early, one), 1);
      const __m512i size = _mm512_abs_epi64(y);
      if (_mm512_cmpgt_epi64_mask(size, _mm512_set1_epi64(kInt32Max)) == 0) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), _mm512_cvtepi64_epi32(y));
        continue;
      }
    }
    store512(value, product);
    for (int i = 0; i < 8; ++i) out[d + i] = saturate(shift_round(value[i], by.last), clipped);
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
