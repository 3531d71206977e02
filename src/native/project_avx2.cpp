// R3 for AVX2: 8 rows are one register, as int16 pairs while a block is summed, then as int32.
#include <immintrin.h>

#include "project.h"
#include "project_chunk.h"

#define UNROLL _Pragma("GCC unroll 16")

namespace headrace {
namespace {

constexpr int kMaxTokens = 4;  // 8 block sums, two registers of weights and their products; 16 registers in all

inline __m256i broadcast(const void* four_bytes) {
  int32_t word;
  __builtin_memcpy(&word, four_bytes, 4);
  return _mm256_set1_epi32(word);
}

inline __m256i load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Keeps the compiler from turning a chain of additions into a tree, which would need more registers.
inline void in_order(__m256i& x) { asm("" : "+x"(x)); }

// sums[m][h] += codes of 4 elements of rows 8h.. with the 4 of x at `offset`, two elements to an int16.
template <int M>
inline void add_products(__m256i code0, __m256i code1, const Block* x, int offset, __m256i (*sums)[2]) {
  UNROLL for (int m = 0; m < M; ++m) {
    const __m256i four = broadcast(x[m].codes + offset);
    sums[m][0] = _mm256_add_epi16(sums[m][0], _mm256_maddubs_epi16(code0, four));
    sums[m][1] = _mm256_add_epi16(sums[m][1], _mm256_maddubs_epi16(code1, four));
    in_order(sums[m][0]);
    in_order(sums[m][1]);
  }
}

// Each row's block sum as two int16 whose sum it is. One int16 collects 16 of the block's 32 elements; with
// the start, -4 times the sum of all 32, it ends as sum_16((q - 4) x) - 4 sum_other(x): within
// 16 * 127 * (11 + 4) = 30480. On the way there it may wrap, which modulo 2^16 does no harm.
template <int M>
inline void block_sums_4(const uint8_t* codes, const Block* x, __m256i (*sums)[2]) {
  const __m256i mask = _mm256_set1_epi8(15);
  UNROLL for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = broadcast(&x[m].start);
  UNROLL for (int j = 0; j < 4; ++j) {
    const __m256i a = load(codes + 64 * j), b = load(codes + 64 * j + 32);
    add_products<M>(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask), x, 4 * j, sums);
    add_products<M>(_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask),
                    x, 16 + 4 * j, sums);
  }
}

// The same from opened codes; with `rounding` the start is 8 instead.
template <int M>
inline void block_sums_open(const uint8_t* codes, const Block* x, bool rounding, __m256i (*sums)[2]) {
  UNROLL for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = rounding ? _mm256_set1_epi32(8) : broadcast(&x[m].start);
  UNROLL for (int j = 0; j < 8; ++j) add_products<M>(load(codes + 64 * j), load(codes + 64 * j + 32), x, 4 * j, sums);
}

// Codes of 8 bits are two of 4, q - 128 = 16 (high - 8) + low, each summed as above; the low ones have no
// centre: within 16 * 127 * 15 = 30480, and 8 for rounding. The int32 result is (sum + 8) >> 4.
template <int M>
inline void join_nibbles(const __m256i (*low)[2], __m256i (*sums)[2]) {
  UNROLL for (int m = 0; m < M; ++m)
    UNROLL for (int h = 0; h < 2; ++h) {
      const __m256i sixteen = _mm256_madd_epi16(sums[m][h], _mm256_set1_epi16(16));
      const __m256i sum = _mm256_add_epi32(sixteen, _mm256_madd_epi16(low[m][h], _mm256_set1_epi16(1)));
      sums[m][h] = _mm256_srai_epi32(sum, 4);
    }
}

template <int M>
inline void block_sums_8(const uint8_t* codes, const Block* x, __m256i (*sums)[2]) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i low[M][2];
  UNROLL for (int m = 0; m < M; ++m) {
    sums[m][0] = sums[m][1] = broadcast(&x[m].start);
    low[m][0] = low[m][1] = _mm256_set1_epi32(8);
  }
  UNROLL for (int j = 0; j < 8; ++j) {
    const __m256i a = load(codes + 64 * j), b = load(codes + 64 * j + 32);
    add_products<M>(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask), x, 4 * j, low);
    add_products<M>(_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask),
                    x, 4 * j, sums);
  }
  join_nibbles<M>(low, sums);
}

template <int M>
inline void block_sums_open_8(const uint8_t* codes, const Block* x, __m256i (*sums)[2]) {
  __m256i low[M][2];
  block_sums_open<M>(codes, x, true, low);
  block_sums_open<M>(codes + 512, x, false, sums);
  join_nibbles<M>(low, sums);
}

// The scales of 8 rows, each twice.
inline __m256i load_scales(const int16_t* scales) {
  const __m256i twice = _mm256_setr_epi8(0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, 8, 9, 8, 9, 10, 11, 10, 11, 12,
                                         13, 12, 13, 14, 15, 14, 15);
  const __m128i eight = _mm_loadu_si128((const __m128i*)scales);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(eight), twice);
}

// One vpmaddwd adds the halves of a sum (|sum| <= 32512) and multiplies by the combined scale: below 2^29;
// each half's product is below 30480 * 16513 < 2^29, too. For 8 bits the scale's upper half is 0 and the
// sum's upper half its sign. The shifted terms of all blocks stay in int32 (see project_portable.cpp).
template <Codes Kind, int M>
void dot(const uint8_t* codes, const int16_t* scales, const Shape& s, int blocks_per_group, const Block* x,
         int32_t* out) {
  constexpr int kBytes = Kind == Codes::kPacked4 ? 256 : Kind == Codes::kOpen8 ? 1024 : 512;
  const __m256i shift = _mm256_set1_epi32(s.dot_shift);
  __m256i acc[M][2];
  for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = _mm256_setzero_si256();
  for (int b = 0; b < s.blocks; ++b, codes += kBytes, x += M) {
    __m256i sums[M][2];
    if (M <= 2) prefetch_codes<kBytes>(codes);
    if (Kind == Codes::kPacked4) block_sums_4<M>(codes, x, sums);
    if (Kind == Codes::kOpen4) block_sums_open<M>(codes, x, false, sums);
    if (Kind == Codes::kEight) block_sums_8<M>(codes, x, sums);
    if (Kind == Codes::kOpen8) block_sums_open_8<M>(codes, x, sums);
    UNROLL for (int h = 0; h < 2; ++h) {
      const __m256i scale = load_scales(scales + 8 * h);
      UNROLL for (int m = 0; m < M; ++m) {
        const __m256i combined = _mm256_mulhrs_epi16(scale, broadcast(&x[m].scale));
        const __m256i product = _mm256_madd_epi16(sums[m][h], combined);
        acc[m][h] = _mm256_add_epi32(acc[m][h], _mm256_srav_epi32(product, shift));
      }
    }
    if (blocks_per_group == 1 || (b & 1)) scales += kTile;
  }
  for (int m = 0; m < M; ++m)
    for (int h = 0; h < 2; ++h) _mm256_storeu_si256((__m256i*)(out + kTile * m + 8 * h), acc[m][h]);
}

// The two minima of each of 8 rows at `pair` (0 or 1) of a supergroup; rows in the order 0 1 4 5 2 3 6 7.
inline __m256i min_pairs(const int16_t* mins, int pair) {
  const __m256 a = _mm256_castsi256_ps(load(mins)), b = _mm256_castsi256_ps(load(mins + 16));
  return _mm256_castps_si256(pair == 0 ? _mm256_shuffle_ps(a, b, 0x88) : _mm256_shuffle_ps(a, b, 0xDD));
}

// Minimum terms of M vectors: the four of a supergroup are summed below 2^31, then shifted.
template <int M>
void min_dot(const int16_t* mins, const Shape& s, const GroupSums* x, int32_t* out) {
  const __m256i shift = _mm256_set1_epi32(s.min_shift);
  __m256i acc[M][2];
  for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = _mm256_setzero_si256();
  for (int g = 0; g < s.supergroups; ++g, mins += 64, x += M)
    UNROLL for (int h = 0; h < 2; ++h) {
      const __m256i first = min_pairs(mins + 32 * h, 0), second = min_pairs(mins + 32 * h, 1);
      UNROLL for (int m = 0; m < M; ++m) {
        const __m256i a = _mm256_madd_epi16(first, broadcast(x[m].sum));
        const __m256i b = _mm256_madd_epi16(second, broadcast(x[m].sum + 2));
        acc[m][h] = _mm256_add_epi32(acc[m][h], _mm256_srav_epi32(_mm256_add_epi32(a, b), shift));
      }
    }
  for (int m = 0; m < M; ++m)
    for (int h = 0; h < 2; ++h)
      _mm256_storeu_si256((__m256i*)(out + kTile * m + 8 * h), _mm256_permute4x64_epi64(acc[m][h], 0xD8));
}

// a + b, or false where a sum leaves the symmetric int32 range.
inline bool add_exact(__m256i* a, __m256i b) {
  const __m256i sum = _mm256_add_epi32(*a, b);
  const __m256i wrapped = _mm256_and_si256(_mm256_xor_si256(*a, sum), _mm256_xor_si256(b, sum));
  const __m256i lowest = _mm256_cmpeq_epi32(sum, _mm256_set1_epi32(INT32_MIN));
  *a = sum;
  return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(wrapped, lowest))) == 0;
}

// The odd lanes in the place of the even ones.
inline __m256i odd(__m256i x) { return _mm256_shuffle_epi32(x, 0xF5); }

// 64-bit values shifted right, one place too few, plus 2^31 + 1. AVX2 has no arithmetic shift of 64 bits: 2^62
// is added before the shift and 2^62 >> shift taken away after it. |value| < 2^61.
inline __m256i shifted(__m256i value, __m256i shift) {
  const __m256i top = _mm256_set1_epi64x(int64_t(1) << 62), offset = _mm256_set1_epi64x((int64_t(1) << 31) + 1);
  const __m256i raised = _mm256_srlv_epi64(_mm256_add_epi64(value, top), shift);
  return _mm256_sub_epi64(raised, _mm256_sub_epi64(_mm256_srlv_epi64(top, shift), offset));
}

// Rows 8h.. of `finish_fast`: even rows in value[0], odd rows in value[1].
// |acc * mantissa| < 2^53 and |min_acc * min_mantissa| < 2^60.
template <bool Mins>
inline void scale_half(const Rows& rows, int h, int exponent, const int32_t* acc, const int32_t* min_acc,
                       __m256i* value) {
  const __m256i a = load(acc + 8 * h), mantissa = load(rows.mantissa + 8 * h);
  const __m256i less = _mm256_set1_epi32(int32_t(uint32_t(exponent) + 1));
  const __m256i shift = _mm256_sub_epi32(load(rows.places + 8 * h), less);
  value[0] = _mm256_mul_epi32(a, mantissa), value[1] = _mm256_mul_epi32(odd(a), odd(mantissa));
  if (Mins) {
    const __m256i b = load(min_acc + 8 * h), min_mantissa = load(rows.min_mantissa + 8 * h);
    value[0] = _mm256_add_epi64(value[0], _mm256_mul_epi32(b, min_mantissa));
    value[1] = _mm256_add_epi64(value[1], _mm256_mul_epi32(odd(b), odd(min_mantissa)));
  }
  value[0] = shifted(value[0], _mm256_blend_epi32(shift, _mm256_setzero_si256(), 0xAA));
  value[1] = shifted(value[1], _mm256_srli_epi64(shift, 32));
}

// The end of R3 for one vector and a whole tile, when nothing needs to be clipped; otherwise false, and
// nothing is written. What `scale_half` gives is a 32-bit number exactly when the result lies within +-2^30.
template <bool Mins>
inline bool finish_fast(const Rows& rows, const Output& out, int tile, int m, int exponent, const int32_t* acc,
                        const int32_t* min_acc) {
  if (!rows.fits(exponent) || rows.count != kTile) return false;
  __m256i value[4];
  for (int h = 0; h < 2; ++h) scale_half<Mins>(rows, h, exponent, acc, min_acc, value + 2 * h);
  const __m256i any = _mm256_or_si256(_mm256_or_si256(value[0], value[1]), _mm256_or_si256(value[2], value[3]));
  if (!_mm256_testz_si256(any, _mm256_set1_epi64x(~int64_t(UINT32_MAX)))) return false;
  __m256i result[2];
  for (int h = 0; h < 2; ++h) {
    const __m256i both = _mm256_blend_epi32(value[2 * h], _mm256_slli_epi64(value[2 * h + 1], 32), 0xAA);
    result[h] = _mm256_sub_epi32(_mm256_srli_epi32(both, 1), _mm256_set1_epi32(1 << 30));
  }
  int32_t* y = out.y + m * out.stride + tile * kTile;
  for (int h = 0; h < 2; ++h) {
    if (out.bias && !add_exact(&result[h], load(out.bias + tile * kTile + 8 * h))) return false;
    if (out.residual && !add_exact(&result[h], load(y + 8 * h))) return false;
  }
  for (int h = 0; h < 2; ++h) _mm256_storeu_si256((__m256i*)(y + 8 * h), result[h]);
  return true;
}

// One tile of rows against M vectors from m on.
template <Codes Kind, int M>
void tile_by(const Call& c, const Rows& rows, int tile, int m, const uint8_t* codes, const Block* blocks,
             const GroupSums* sums) {
  int32_t acc[M * kTile], min_acc[M * kTile];
  dot<Kind, M>(codes, tile_scales(c.w, c.shape, tile), c.shape, c.w.group / kBlock, blocks, acc);
  const bool mins = c.w.mins != nullptr;
  if (mins) min_dot<M>(tile_mins(c.w, c.shape, tile), c.shape, sums, min_acc);
  for (int i = 0; i < M; ++i) {
    const int32_t *a = acc + i * kTile, *b = min_acc + i * kTile;
    const int exponent = c.x.exponent[m + i];
    const bool done = mins ? finish_fast<true>(rows, c.out, tile, m + i, exponent, a, b)
                           : finish_fast<false>(rows, c.out, tile, m + i, exponent, a, b);
    if (!done) finish_tile(c.w, c.shape, c.x, c.out, tile, m + i, a, mins ? b : nullptr);
  }
}

using TileBy = void (*)(const Call&, const Rows&, int, int, const uint8_t*, const Block*, const GroupSums*);

template <Codes Kind>
TileBy tile_by_count(int count) {
  switch (count) {
    case 1: return tile_by<Kind, 1>;
    case 2: return tile_by<Kind, 2>;
    case 3: return tile_by<Kind, 3>;
    default: return tile_by<Kind, kMaxTokens>;
  }
}

TileBy tile_by_codes(Codes kind, int count) {
  switch (kind) {
    case Codes::kPacked4: return tile_by_count<Codes::kPacked4>(count);
    case Codes::kOpen4: return tile_by_count<Codes::kOpen4>(count);
    case Codes::kOpen8: return tile_by_count<Codes::kOpen8>(count);
    default: return tile_by_count<Codes::kEight>(count);
  }
}

struct Avx2 {
  static constexpr int kMaxTokens = headrace::kMaxTokens;

  static int open_from(int bits) { return bits == 4 ? 8 : 3; }
  static int step(int rest) { return least(rest, kMaxTokens); }
  // -4 * sum in both halves: |sum| <= 4064, so it fits int16.
  static int32_t start(int, int sum) { return int32_t(uint16_t(-4 * sum) * 0x10001u); }
  // For 4 bits in both halves; for 8 bits the upper half stays 0.
  static int32_t scale(int bits, int a) { return bits == 4 ? a * 0x10001 : a; }

  static void run_tile(const Call& c, const Rows& rows, int tile, int m, int count, Codes kind, const uint8_t* codes,
                       const Block* blocks, const GroupSums* sums) {
    tile_by_codes(kind, count)(c, rows, tile, m, codes, blocks, sums);
  }
};

}  // namespace

void project_avx2(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                  const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                  int64_t* clipped) {
  const Call call{w, x, shape_of(w), {bias, residual, y, y_stride, fraction_bits, clipped, m_begin}};
  project_chunks<Avx2>(call, m_begin, m_end, t_begin, t_end);
}

}  // namespace headrace
