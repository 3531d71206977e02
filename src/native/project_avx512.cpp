// R3 for AVX-512 (F, BW, VL, DQ) with VNNI: 16 rows are one register of int32.
#include <immintrin.h>

#include "project.h"
#include "project_chunk.h"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own headers
#define UNROLL _Pragma("GCC unroll 16")

namespace headrace {
namespace {

constexpr int kMaxTokens = 12;  // 12 block sums and 12 accumulators, with the weights, fill 32 registers

inline __m512i broadcast(const void* four_bytes) {
  int32_t word;
  __builtin_memcpy(&word, four_bytes, 4);
  return _mm512_set1_epi32(word);
}

// Block sums in int32: |sum| <= 32 * 255 * 127 + 128 * 4064 whatever the order.
template <int Bits, int M>
inline void block_sums(const uint8_t* codes, const Block* x, __m512i* sums) {
  UNROLL for (int m = 0; m < M; ++m) sums[m] = _mm512_set1_epi32(x[m].start);
  UNROLL for (int j = 0; j < Bits; ++j) {
    const __m512i code = _mm512_loadu_si512(codes + 64 * j);
    if (Bits == 4) {
      const __m512i mask = _mm512_set1_epi8(15);
      const __m512i low = _mm512_and_si512(code, mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(code, 4), mask);
      UNROLL for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], low, broadcast(x[m].codes + 4 * j));
      UNROLL for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], high, broadcast(x[m].codes + 16 + 4 * j));
    } else {
      UNROLL for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], code, broadcast(x[m].codes + 4 * j));
    }
  }
  if (Bits == 8)
    UNROLL for (int m = 0; m < M; ++m) sums[m] = _mm512_srai_epi32(sums[m], 4);
}

// The sums now fit int16 (32512), so one vpmaddwd multiplies by the combined scale: below 2^29, and the
// shifted terms of all blocks stay in int32 (see project_portable.cpp).
template <int Bits, int M>
void dot(const uint8_t* codes, const int16_t* scales, const Shape& s, int blocks_per_group, const Block* x,
         int32_t* out) {
  const __m512i shift = _mm512_set1_epi32(s.dot_shift);
  __m512i acc[M];
  for (int m = 0; m < M; ++m) acc[m] = _mm512_setzero_si512();
  for (int b = 0; b < s.blocks; ++b, codes += 64 * Bits, x += M) {
    __m512i sums[M];
    block_sums<Bits, M>(codes, x, sums);
    const __m512i scale = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)scales));
    if (blocks_per_group == 1 || (b & 1)) scales += kTile;
    UNROLL for (int m = 0; m < M; ++m) {
      const __m512i combined = _mm512_mulhrs_epi16(scale, _mm512_set1_epi32(x[m].scale));
      const __m512i product = _mm512_madd_epi16(sums[m], combined);
      acc[m] = _mm512_add_epi32(acc[m], _mm512_srav_epi32(product, shift));
    }
  }
  for (int m = 0; m < M; ++m) _mm512_storeu_si512(out + kTile * m, acc[m]);
}

// Minimum terms of M vectors: the four of a supergroup are summed below 2^31, then shifted.
template <int M>
void min_dot(const int16_t* mins, const Shape& s, const GroupSums* x, int32_t* out) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  const __m512i shift = _mm512_set1_epi32(s.min_shift);
  __m512i acc[M];
  for (int m = 0; m < M; ++m) acc[m] = _mm512_setzero_si512();
  for (int g = 0; g < s.supergroups; ++g, mins += 64, x += M) {
    const __m512i a = _mm512_loadu_si512(mins), b = _mm512_loadu_si512(mins + 32);
    const __m512i first = _mm512_permutex2var_epi32(a, even, b), second = _mm512_permutex2var_epi32(a, odd, b);
    UNROLL for (int m = 0; m < M; ++m) {
      const __m512i half = _mm512_madd_epi16(first, broadcast(x[m].sum));
      const __m512i term = _mm512_dpwssd_epi32(half, second, broadcast(x[m].sum + 2));
      acc[m] = _mm512_add_epi32(acc[m], _mm512_srav_epi32(term, shift));
    }
  }
  for (int m = 0; m < M; ++m) _mm512_storeu_si512(out + kTile * m, acc[m]);
}

// The rows of one tile, as `finish` needs them: even and odd rows apart, in 64-bit lanes.
struct Rows {
  __m512i mantissa[2];      // << align: below 2^22
  __m512i min_mantissa[2];  // << min_shift: below 2^29
  __m512i places[2];        // right shift for a vector of exponent 0
  RowRange range;
  __mmask16 valid;
};

Rows load_rows(const Call& c, int tile) {
  RowConstants k;
  Rows rows;
  rows.range = load_row_constants(c.w, c.shape, c.out, tile, &k);
  rows.valid = __mmask16((1u << rows.range.count) - 1);
  for (int i = 0; i < 2; ++i) {
    rows.mantissa[i] = _mm512_load_si512(k.mantissa[i]);
    rows.min_mantissa[i] = _mm512_load_si512(k.min_mantissa[i]);
    rows.places[i] = _mm512_load_si512(k.places[i]);
  }
  return rows;
}

// a + b, or false where a sum leaves the symmetric int32 range.
inline bool add_exact(__m512i* a, __m512i b) {
  const __m512i sum = _mm512_add_epi32(*a, b);
  const __m512i wrapped = _mm512_and_si512(_mm512_xor_si512(*a, sum), _mm512_xor_si512(b, sum));
  const __mmask16 lowest = _mm512_cmpeq_epi32_mask(sum, _mm512_set1_epi32(INT32_MIN));
  *a = sum;
  return (_mm512_movepi32_mask(wrapped) | lowest) == 0;
}

// The end of R3 for one vector, when nothing needs to be clipped; otherwise false, and nothing is written.
// |acc * mantissa| < 2^53 and |min_acc * min_mantissa| < 2^60. The shift stops one place early; adding
// 2^31 + 1 then rounds, and leaves a 32-bit number exactly when the result lies within +-2^30.
template <bool Mins>
inline bool finish_fast(const Rows& rows, const Output& out, int tile, int m, int exponent, const int32_t* acc,
                        const int32_t* min_acc) {
  if (!rows.range.fits(exponent)) return false;
  const __m512i less = _mm512_set1_epi64(int64_t(exponent) + 1);
  const __m512i offset = _mm512_set1_epi64((int64_t(1) << 31) + 1);
  __m512i value[2];
  for (int i = 0; i < 2; ++i) {
    const __m512i a = _mm512_loadu_si512(acc);
    value[i] = _mm512_mul_epi32(i ? _mm512_srli_epi64(a, 32) : a, rows.mantissa[i]);
    if (Mins) {
      const __m512i b = _mm512_loadu_si512(min_acc);
      value[i] = _mm512_add_epi64(value[i], _mm512_mul_epi32(i ? _mm512_srli_epi64(b, 32) : b, rows.min_mantissa[i]));
    }
    value[i] = _mm512_add_epi64(_mm512_srav_epi64(value[i], _mm512_sub_epi64(rows.places[i], less)), offset);
  }
  if (_mm512_test_epi64_mask(_mm512_or_si512(value[0], value[1]), _mm512_set1_epi64(~int64_t(UINT32_MAX)))) return false;
  const __m512i both = _mm512_mask_blend_epi32(0xAAAA, value[0], _mm512_slli_epi64(value[1], 32));
  __m512i result = _mm512_sub_epi32(_mm512_srli_epi32(both, 1), _mm512_set1_epi32(1 << 30));
  int32_t* y = out.y + m * out.stride + tile * kTile;
  if (out.bias && !add_exact(&result, _mm512_maskz_loadu_epi32(rows.valid, out.bias + tile * kTile))) return false;
  if (out.residual && !add_exact(&result, _mm512_maskz_loadu_epi32(rows.valid, y))) return false;
  _mm512_mask_storeu_epi32(y, rows.valid, result);
  return true;
}

// One tile of rows against M vectors from m on.
template <int Bits, int M>
void tile_by(const Call& c, const Rows& rows, int tile, int m, const Block* blocks, const GroupSums* sums) {
  alignas(64) int32_t acc[M * kTile], min_acc[M * kTile];
  dot<Bits, M>(tile_codes(c.w, c.shape, tile), tile_scales(c.w, c.shape, tile), c.shape, c.w.group / kBlock, blocks, acc);
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

using TileBy = void (*)(const Call&, const Rows&, int, int, const Block*, const GroupSums*);

template <int Bits>
TileBy tile_by_count(int count) {
  switch (count) {
    case 1: return tile_by<Bits, 1>;
    case 2: return tile_by<Bits, 2>;
    case 3: return tile_by<Bits, 3>;
    case 4: return tile_by<Bits, 4>;
    case 6: return tile_by<Bits, 6>;
    case 8: return tile_by<Bits, 8>;
    default: return tile_by<Bits, kMaxTokens>;
  }
}

struct Avx512 {
  using Rows = headrace::Rows;
  static constexpr int kMaxTokens = headrace::kMaxTokens;

  static int step(int rest) { return rest >= 12 ? 12 : rest >= 8 ? 8 : rest >= 6 ? 6 : least(rest, 4); }
  // For 8 bits with the half that rounds a sum to 16 bits.
  static int32_t start(int bits, int sum) { return bits == 4 ? -8 * sum : 8 - 128 * sum; }
  // Zero-extended: the upper half makes vpmaddwd ignore the upper half of a sum.
  static int32_t scale(int, int a) { return a; }
  static Rows load_rows(const Call& c, int tile) { return headrace::load_rows(c, tile); }

  static void run_tile(const Call& c, const Rows& rows, int tile, int m, int count, const Block* blocks,
                       const GroupSums* sums) {
    const TileBy run = c.w.bits == 4 ? tile_by_count<4>(count) : tile_by_count<8>(count);
    run(c, rows, tile, m, blocks, sums);
  }
};

}  // namespace

void project_avx512(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                    const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                    int64_t* clipped) {
  const Call call{w, x, shape_of(w), {bias, residual, y, y_stride, fraction_bits, clipped}};
  project_chunks<Avx512>(call, m_begin, m_end, t_begin, t_end);
}

}  // namespace headrace
