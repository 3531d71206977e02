// R3 for AVX-512 (F, BW, VL, DQ) with VNNI: 16 rows are one register of int32.
#include <immintrin.h>

#include "project.h"
#include "project_avx512.h"

namespace headrace {
namespace {

constexpr int kMaxTokens = 12;  // 12 block sums and 12 accumulators, with the weights, fill 32 registers

// Block sums in int32: |sum| <= 32 * 255 * 127 + 128 * 4064 whatever the order.
template <Codes Kind, int M>
inline void block_sums(const uint8_t* codes, const Block* x, __m512i* sums) {
  UNROLL for (int m = 0; m < M; ++m) sums[m] = _mm512_set1_epi32(x[m].start);
  UNROLL for (int j = 0; j < (Kind == Codes::kPacked4 ? 4 : 8); ++j) {
    const __m512i code = _mm512_loadu_si512(codes + 64 * j), mask = _mm512_set1_epi8(15);
    const __m512i low = Kind == Codes::kPacked4 ? _mm512_and_si512(code, mask) : code;
    UNROLL for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], low, broadcast(x[m].codes + 4 * j));
    if (Kind != Codes::kPacked4) continue;
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(code, 4), mask);
    UNROLL for (int m = 0; m < M; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], high, broadcast(x[m].codes + 16 + 4 * j));
  }
  if (Kind == Codes::kEight)
    UNROLL for (int m = 0; m < M; ++m) sums[m] = _mm512_srai_epi32(sums[m], 4);
}

// The sums now fit int16 (32512), so one vpmaddwd multiplies by the combined scale: below 2^29, and the
// shifted terms of all blocks stay in int32 (see project_portable.cpp).
template <Codes Kind, int M>
void dot(const uint8_t* codes, const int16_t* scales, const Shape& s, int blocks_per_group, const Block* x,
         int32_t* out) {
  constexpr int kBytes = Kind == Codes::kPacked4 ? 256 : 512;
  const __m512i shift = _mm512_set1_epi32(s.dot_shift);
  __m512i acc[M];
  for (int m = 0; m < M; ++m) acc[m] = _mm512_setzero_si512();
  for (int b = 0; b < s.blocks; ++b, codes += kBytes, x += M) {
    __m512i sums[M];
    if (M <= 4) prefetch_codes<kBytes>(codes);
    block_sums<Kind, M>(codes, x, sums);
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

// One tile of rows against M vectors from m on.
template <Codes Kind, int M>
void tile_by(const Call& c, const Rows& rows, int tile, int m, const uint8_t* codes, const Block* blocks,
             const GroupSums* sums) {
  alignas(64) int32_t acc[M * kTile], min_acc[M * kTile];
  dot<Kind, M>(codes, tile_scales(c.w, c.shape, tile), c.shape, c.w.group / kBlock, blocks, acc);
  const bool mins = c.w.mins != nullptr;
  if (mins) min_dot<M>(tile_mins(c.w, c.shape, tile), c.shape, sums, min_acc);
  for (int i = 0; i < M; ++i)
    finish_vector(c, rows, tile, m + i, acc + i * kTile, mins ? min_acc + i * kTile : nullptr);
}

using TileBy = void (*)(const Call&, const Rows&, int, int, const uint8_t*, const Block*, const GroupSums*);

template <Codes Kind>
TileBy tile_by_count(int count) {
  switch (count) {
    case 1: return tile_by<Kind, 1>;
    case 2: return tile_by<Kind, 2>;
    case 3: return tile_by<Kind, 3>;
    case 4: return tile_by<Kind, 4>;
    case 6: return tile_by<Kind, 6>;
    case 8: return tile_by<Kind, 8>;
    default: return tile_by<Kind, kMaxTokens>;
  }
}

TileBy tile_by_codes(Codes kind, int count) {
  switch (kind) {
    case Codes::kPacked4: return tile_by_count<Codes::kPacked4>(count);
    case Codes::kOpen4: return tile_by_count<Codes::kOpen4>(count);
    default: return tile_by_count<Codes::kEight>(count);
  }
}

struct Avx512 {
  static constexpr int kMaxTokens = headrace::kMaxTokens;

  static int open_from(int bits) { return bits == 4 ? 24 : INT32_MAX; }
  static int step(int rest) { return rest >= 12 ? 12 : rest >= 8 ? 8 : rest >= 6 ? 6 : least(rest, 4); }
  // For 8 bits with the half that rounds a sum to 16 bits.
  static int32_t start(int bits, int sum) { return bits == 4 ? -8 * sum : 8 - 128 * sum; }
  // Zero-extended: the upper half makes vpmaddwd ignore the upper half of a sum.
  static int32_t scale(int, int a) { return a; }

  static void run_tile(const Call& c, const Rows& rows, int tile, int m, int count, Codes kind, const uint8_t* codes,
                       const Block* blocks, const GroupSums* sums) {
    tile_by_codes(kind, count)(c, rows, tile, m, codes, blocks, sums);
  }
};

}  // namespace

void project_avx512(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                    const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                    int64_t* clipped) {
  const Call call{w, x, shape_of(w), {bias, residual, y, y_stride, fraction_bits, clipped, m_begin}};
  project_chunks<Avx512>(call, m_begin, m_end, t_begin, t_end);
}

}  // namespace headrace
