// The hooks of attend.inl for AVX2.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

#define UNROLL _Pragma("GCC unroll 16")

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

inline __m256i broadcast8(const void* bytes) {
  int64_t word;
  std::memcpy(&word, bytes, 8);
  return _mm256_set1_epi64x(word);
}

// All ones in the lanes of half a tile, from key `first` on, that a query sees which sees `visible` keys.
inline __m256i seen_lanes(int visible, int first) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(visible - first), lane);
}

// ---- scores ------------------------------------------------------------------------------------------

struct KeyRange {
  int lowest, highest;  // exponents of the keys that any query sees
};

inline KeyRange key_range(const int16_t* exponents, int count) {
  KeyRange out{exponents[0], exponents[0]};
  for (int j = 1; j < (count < kTile ? count : kTile); ++j) {
    out.lowest = exponents[j] < out.lowest ? exponents[j] : out.lowest;
    out.highest = exponents[j] > out.highest ? exponents[j] : out.highest;
  }
  return out;
}

// R3's accumulators of Rows queries against 8 keys. vpmaddubsw multiplies |k| by q with k's sign: a pair is at
// most 2 * 127 * 127 = 32258. Block sums fit int16, so vpmaddwd multiplies them by their combined scale.
template <int Rows>
inline void add_blocks(const uint8_t* codes, const int16_t* scales, const Queries& q, const int32_t* record, __m256i* acc) {
  const __m256i ones = _mm256_set1_epi16(1), r = _mm256_set1_epi32(dot_shift(q.blocks));
  const int32_t *start = record + 2, *scale = start + q.blocks, *code = record + q.codes;
  for (int b = 0; b < q.blocks; ++b, ++start, ++scale, scales += kTile) {
    __m256i sum[Rows];
    UNROLL for (int i = 0; i < Rows; ++i) sum[i] = _mm256_set1_epi32(start[i * q.stride]);
    UNROLL for (int p = 0; p < 8; ++p, codes += 64, ++code) {
      const __m256i k = load(codes), size = _mm256_abs_epi8(k);
      UNROLL for (int i = 0; i < Rows; ++i) {
        const __m256i x = _mm256_sign_epi8(_mm256_set1_epi32(code[i * q.stride]), k);
        sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(_mm256_maddubs_epi16(size, x), ones));
      }
    }
    const __m256i s = _mm256_cvtepu16_epi32(load128(scales));
    UNROLL for (int i = 0; i < Rows; ++i) {
      const __m256i combined = _mm256_mulhrs_epi16(s, _mm256_set1_epi32(scale[i * q.stride]));
      const __m256i product = _mm256_madd_epi16(_mm256_srai_epi32(sum[i], 4), combined);
      acc[i] = _mm256_add_epi32(acc[i], _mm256_srav_epi32(product, r));
    }
  }
}

// Scores are acc * mantissa / 2^n, rounded, n = base - key exponent. The upper half of the 64-bit product is a
// shift by 32, the rest is left to 32-bit lanes; where n < 33, acc is shifted left first, if it has the room.
inline __m256i finish_scores(__m256i acc, const int16_t* exponents, const KeyRange& range, int32_t base, int32_t mantissa) {
  const int fewest = base - range.highest, up = fewest < 33 ? 33 - fewest : 0;
  const __m128i count = _mm_cvtsi32_si128(up);
  const __m256i raised = _mm256_sll_epi32(acc, count);
  const __m256i lost = _mm256_xor_si256(_mm256_sra_epi32(raised, count), acc);
  if (__builtin_expect(up > 30 || base - range.lowest > 62 || !_mm256_testz_si256(lost, lost), 0)) {
    alignas(32) int32_t values[8];
    store(values, acc);
    for (int j = 0; j < 8; ++j) values[j] = score_of(values[j], mantissa, base - exponents[j]);
    return load(values);
  }
  const __m256i factor = _mm256_set1_epi32(mantissa), e = _mm256_cvtepi16_epi32(load128(exponents));
  const __m256i even = _mm256_mul_epi32(raised, factor), odd = _mm256_mul_epi32(_mm256_srli_epi64(raised, 32), factor);
  const __m256i upper = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  const __m256i s = _mm256_srav_epi32(upper, _mm256_sub_epi32(_mm256_set1_epi32(base + up - 33), e));
  return _mm256_srai_epi32(_mm256_add_epi32(s, _mm256_set1_epi32(1)), 1);
}

template <int Rows>
inline void score_rows(const uint8_t* tile, int t, const Queries& q, const KeyRange& range, int row) {
  const TileFields at(q.head_dim);
  const int32_t* record = q.record(row);
  for (int first = 0; first < kTile; first += 8) {
    const int16_t* exponents = words(tile, at.key_exponent) + first;
    __m256i acc[Rows];
    UNROLL for (int i = 0; i < Rows; ++i) acc[i] = _mm256_setzero_si256();
    add_blocks<Rows>(tile + 4 * first, words(tile, at.key_scales) + first, q, record, acc);
    UNROLL for (int i = 0; i < Rows; ++i) {
      const __m256i s = finish_scores(acc[i], exponents, range, record[i * q.stride], q.mantissa);
      int32_t* best = q.best + (row + i) * kTile + first;
      const __m256i before = load(best), seen = seen_lanes(record[i * q.stride + 1], t * kTile + first);
      store(best, _mm256_max_epi32(before, _mm256_blendv_epi8(before, s, seen)));
      store(q.scores_of(row + i) + t * kTile + first, s);
    }
  }
}

inline void score_tile(const uint8_t* tile, int t, const Queries& q) {
  const TileFields at(q.head_dim);
  const KeyRange range = key_range(words(tile, at.key_exponent), q.most - t * kTile);
  int row = 0;
  for (; row + 4 <= q.rows; row += 4) score_rows<4>(tile, t, q, range, row);
  for (; row < q.rows; ++row) score_rows<1>(tile, t, q, range, row);
}

// ---- weights -----------------------------------------------------------------------------------------

// 2^-delta in Q16 for two times 8 lanes of delta >= 0, in place. The fractions of both share 16-bit lanes: all
// products are t * f >> 16, which is vpmulhuw.
inline void exp2_pair(__m256i* a, __m256i* b) {
  const __m256i f = _mm256_blend_epi16(*a, _mm256_slli_epi32(*b, 16), 0xAA);
  __m256i t = _mm256_sub_epi16(_mm256_set1_epi16(3496), _mm256_mulhi_epu16(_mm256_set1_epi16(454), f));
  t = _mm256_sub_epi16(_mm256_set1_epi16(15698), _mm256_mulhi_epu16(t, f));
  t = _mm256_sub_epi16(_mm256_set1_epi16(short(45423)), _mm256_mulhi_epu16(t, f));
  const __m256i carry = _mm256_srli_epi16(_mm256_mullo_epi16(t, f), 15);
  const __m256i less = _mm256_add_epi16(_mm256_mulhi_epu16(t, f), carry);  // 65536 - p, at most 32768
  // p / 2^n, rounded: (2 p >> n) + 1 >> 1, 0 beyond n = 31 as vpsrlvd does.
  const __m256i one = _mm256_set1_epi32(1), twice = _mm256_set1_epi32(1 << 17);
  const __m256i pa = _mm256_sub_epi32(twice, _mm256_slli_epi32(_mm256_and_si256(less, _mm256_set1_epi32(0xFFFF)), 1));
  const __m256i pb = _mm256_sub_epi32(twice, _mm256_slli_epi32(_mm256_srli_epi32(less, 16), 1));
  *a = _mm256_srli_epi32(_mm256_add_epi32(_mm256_srlv_epi32(pa, _mm256_srli_epi32(*a, 16)), one), 1);
  *b = _mm256_srli_epi32(_mm256_add_epi32(_mm256_srlv_epi32(pb, _mm256_srli_epi32(*b, 16)), one), 1);
}

inline __m256i distance(const int32_t* scores, int first, int visible, __m256i best) {
  const __m256i delta = _mm256_sub_epi32(best, load(scores + first));
  return _mm256_blendv_epi8(_mm256_set1_epi32(INT32_MAX), delta, seen_lanes(visible, first));
}

inline int64_t sum_unsigned(__m256i v) {
  alignas(32) uint32_t lanes[8];
  store(lanes, v);
  int64_t sum = 0;
  for (int j = 0; j < 8; ++j) sum += lanes[j];
  return sum;
}

inline int64_t weigh(int32_t* scores, int visible, int32_t best) {
  const __m256i most = _mm256_set1_epi32(best);
  __m256i part = _mm256_setzero_si256();
  int64_t total = 0;
  for (int first = 0; first < visible; first += kTile) {
    __m256i a = distance(scores, first, visible, most), b = distance(scores, first + 8, visible, most);
    exp2_pair(&a, &b);
    store(scores + first, a);
    store(scores + first + 8, b);
    part = _mm256_add_epi32(part, _mm256_add_epi32(a, b));
    if (first / kTile % 16384 == 16383) total += sum_unsigned(part), part = _mm256_setzero_si256();  // 2^14 * 2^17
  }
  return total + sum_unsigned(part);
}

// c = shift_round(w * a_v, 16 + top - E_v), 15 bits, of 8 positions; `shift` is one less.
inline __m256i combine(__m256i weights, const int16_t* scales, __m256i shift) {
  const __m256i product = _mm256_mullo_epi32(weights, _mm256_cvtepu16_epi32(load128(scales)));  // below 2^31
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_srlv_epi32(product, shift), _mm256_set1_epi32(1)), 1);
}

// Bytes of a mix: int16 [2][16], the combined weights of two blocks. Unseen positions have weight 0, and so c = 0.
inline bool combine_tile(const uint8_t* tile, const TileFields& at, int blocks, int top, const int32_t* weights,
                         uint8_t* out) {
  const int16_t *exponents = words(tile, at.value_exponent), *scales = words(tile, at.value_scales);
  const __m256i less = _mm256_set1_epi32(15 + top), w0 = load(weights), w1 = load(weights + 8);
  const __m256i shift0 = _mm256_sub_epi32(less, _mm256_cvtepi16_epi32(load128(exponents)));
  const __m256i shift1 = _mm256_sub_epi32(less, _mm256_cvtepi16_epi32(load128(exponents + 8)));
  __m256i any = _mm256_setzero_si256();
  for (int b = 0; b < blocks; ++b, scales += kTile, out += 2 * kTile) {
    const __m256i c = _mm256_packs_epi32(combine(w0, scales, shift0), combine(w1, scales + 8, shift1));
    store(out, _mm256_permute4x64_epi64(c, 0xD8));
    any = _mm256_or_si256(any, c);
  }
  return !_mm256_testz_si256(any, any);
}

// ---- values ------------------------------------------------------------------------------------------

constexpr int kFlushTiles = 64;  // two positions a lane and product: 64 * 4 * 2 * 16513 * 127 < 2^31

inline void add_wide(int64_t* acc, __m128i four) { store(acc, _mm256_add_epi64(load(acc), _mm256_cvtepi32_epi64(four))); }

// acc[0..32) += one block over the listed tiles [begin, end); `c` is the byte offset of its weights in a mix.
inline void add_block(const uint8_t* const* tiles, size_t offset, int head_dim, const Mix& mix, int c, int begin,
                      int end, int64_t* acc) {
  __m256i sum[8];
  UNROLL for (int j = 0; j < 8; ++j) sum[j] = _mm256_setzero_si256();
  for (int i = begin; i < end; ++i) {
    const uint8_t *weights = mix.of(i, 0) + c, *v = tiles[mix.list[i]] + offset;
    for (int g = 0; g < 4; ++g, weights += 8, v += head_dim * 4) {
      const __m256i w = broadcast8(weights);
      UNROLL for (int j = 0; j < 8; ++j)
        sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(_mm256_cvtepi8_epi16(load128(v + 16 * j)), w));
    }
  }
  UNROLL for (int j = 0; j < 8; j += 2) {  // lanes hold two sums for each dimension
    const __m256i both = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[j], sum[j + 1]), 0xD8);
    add_wide(acc + 4 * j, _mm256_castsi256_si128(both));
    add_wide(acc + 4 * j + 4, _mm256_extracti128_si256(both, 1));
  }
}

constexpr int kMixRows = 1;

template <int Rows>
inline void add_values(const uint8_t* const* tiles, const TileFields& at, int head_dim, const Mix& mix, int pair,
                       int blocks, int64_t (*acc)[kMaxHeadDim]) {
  for (int begin = 0; begin < mix.count; begin += kFlushTiles) {
    const int end = mix.count - begin < kFlushTiles ? mix.count : begin + kFlushTiles;
    for (int b = 0; b < blocks; ++b)
      add_block(tiles, at.value_codes + size_t(pair * 2 + b) * 128, head_dim, mix, pair * 64 + b * 32, begin, end,
                acc[0] + pair * 64 + b * 32);
  }
}

inline void divide(const int64_t* acc, int head_dim, const Division& by, int32_t* out, int64_t* clipped) {
  for (int d = 0; d < head_dim; ++d) out[d] = by(acc[d], clipped);
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
