// R3 for AVX-512 (F, BW, VL, DQ) with VNNI: 16 rows are one register of int32.
#include <immintrin.h>

#include "project.h"
#include "project_common.h"

namespace headrace {
namespace {

constexpr int kMaxTokens = 12;  // 12 block sums and 12 accumulators, with the weights, fill 32 registers

// One block of one vector, as the kernel reads it. Blocks of the vectors that are computed together
// follow one another, so that the kernel walks a single stream whatever k is.
struct Block {
  int8_t codes[kBlock];
  int32_t start;  // initial sum: removes the codes' centre; for 8 bits it also holds the rounding half
  int32_t scale;  // zero-extended: the upper half makes vpmaddwd ignore the sum's upper half
};

constexpr int kPreparedBlocks = 6144;

void prepare(const PackedWeight& w, const Shape& s, const Activations& x, int m, int count, Block* out) {
  const int centre = w.bits == 4 ? 8 : 128, half = w.bits == 4 ? 0 : 8;
  for (int i = 0; i < count; ++i)
    for (int b = 0; b < s.blocks; ++b) {
      const size_t at = size_t(m + i) * s.blocks + b;
      Block& block = out[b * count + i];
      _mm256_storeu_si256((__m256i*)block.codes, _mm256_loadu_si256((const __m256i*)(x.codes + at * kBlock)));
      block.start = half - centre * x.sums[at];
      block.scale = x.scales[at];
    }
}

inline __m512i broadcast(const int8_t* codes) {
  int32_t four;
  __builtin_memcpy(&four, codes, 4);
  return _mm512_set1_epi32(four);
}

// Block sums in int32: |sum| <= 32 * 255 * 127 + 128 * 4064 whatever the order.
template <int Bits, int M>
inline void block_sums(const uint8_t* codes, const Block* x, __m512i* sums) {
  for (int m = 0; m < M; ++m) sums[m] = _mm512_set1_epi32(x[m].start);
  for (int j = 0; j < Bits; ++j) {
    const __m512i code = _mm512_loadu_si512(codes + 64 * j);
    if (Bits == 4) {
      const __m512i mask = _mm512_set1_epi8(15);
      const __m512i low = _mm512_and_si512(code, mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(code, 4), mask);
      for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], low, broadcast(x[m].codes + 4 * j));
      for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], high, broadcast(x[m].codes + 16 + 4 * j));
    } else {
      for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], code, broadcast(x[m].codes + 4 * j));
    }
  }
  if (Bits == 8)
    for (int m = 0; m < M; ++m) sums[m] = _mm512_srai_epi32(sums[m], 4);
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
    for (int m = 0; m < M; ++m) {
      const __m512i combined = _mm512_mulhrs_epi16(scale, _mm512_set1_epi32(x[m].scale));
      const __m512i product = _mm512_madd_epi16(sums[m], combined);
      acc[m] = _mm512_add_epi32(acc[m], _mm512_srav_epi32(product, shift));
    }
  }
  for (int m = 0; m < M; ++m) _mm512_storeu_si512(out + kTile * m, acc[m]);
}

using Dot = void (*)(const uint8_t*, const int16_t*, const Shape&, int, const Block*, int32_t*);

template <int Bits>
Dot dot_for(int count) {
  switch (count) {
    case 1: return dot<Bits, 1>;
    case 2: return dot<Bits, 2>;
    case 3: return dot<Bits, 3>;
    case 4: return dot<Bits, 4>;
    case 6: return dot<Bits, 6>;
    case 8: return dot<Bits, 8>;
    default: return dot<Bits, kMaxTokens>;
  }
}

int step(int rest) { return rest >= 12 ? 12 : rest >= 8 ? 8 : rest >= 6 ? 6 : least(rest, 4); }

}  // namespace

void project_avx512(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                    const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                    int64_t* clipped) {
  const Shape s = shape_of(w);
  const Output out{bias, residual, y, y_stride, fraction_bits, clipped};
  alignas(64) Block prepared[kPreparedBlocks];
  const int chunk_max = kPreparedBlocks / s.blocks / 12 * 12;
  for (int chunk = m_begin; chunk < m_end; chunk += chunk_max) {
    const int chunk_end = least(m_end, chunk + chunk_max);
    for (int m = chunk, count; m < chunk_end; m += count) {
      count = step(chunk_end - m);
      prepare(w, s, x, m, count, prepared + (m - chunk) * s.blocks);
    }
    for (int t = t_begin; t < t_end; ++t) {
      for (int m = chunk, count; m < chunk_end; m += count) {
        count = step(chunk_end - m);
        alignas(64) int32_t acc[kMaxTokens * kTile];
        (w.bits == 4 ? dot_for<4> : dot_for<8>)(count)(tile_codes(w, s, t), tile_scales(w, s, t), s, w.group / kBlock,
                                                       prepared + (m - chunk) * s.blocks, acc);
        for (int i = 0; i < count; ++i) finish_tile(w, s, x, out, t, m + i, acc + i * kTile, nullptr);
      }
    }
  }
}

}  // namespace headrace
