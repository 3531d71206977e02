// R3 for AMX-INT8 beside AVX-512: a tile product makes the block sums of 16 vectors and 16 rows at once,
// AVX-512 scales and adds them. Calls with fewer vectors, and what 16 does not divide, go to project_avx512.
//
// The process must have been granted the tile data state before any of this runs.
#include "project.h"
#include "project_avx512.h"

namespace headrace {
namespace {

constexpr int kVectors = 16;
constexpr int kPreparedBlocks = 768;  // of groups of 16 vectors that are prepared at a time
constexpr int kPreparedGroups = 16;   // groups, at most
constexpr int kPreparedSums = 204;    // groups * ceil(blocks / 4) <= (768 + 3 * 16) / 4

// One block of 16 vectors.
struct GroupBlock {
  int8_t codes[kVectors][kBlock];
  int32_t scales[kVectors];  // zero-extended: makes vpmaddwd ignore the upper half of a sum
};

struct Work {
  int8_t weights[kOpenBlocks][8][4 * kTile];  // centred codes of one row tile
  GroupBlock blocks[kPreparedBlocks];
  GroupSums sums[kPreparedSums][kVectors];
  int32_t halves[kVectors][kTile];  // 8s
};

// Tile registers: 0 and 1 sums, 2 and 3 codes of vectors, 4 and 5 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 32, 32, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 8, 8};
};

template <int Tile>
inline void load_tile(const void* p, ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
inline void store_tile(void* p, ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(Tile) : "memory");
}

// Sums of one block: |sum| <= 32 * 128 * 127 whatever the order. For 8 bits with the half that rounds them.
template <int Bits, int T>
inline void multiply(const Work& work, const GroupBlock* x, int b) {
  if (Bits == 4) asm volatile("tilezero %%tmm%c0" ::"i"(T));
  if (Bits == 8) load_tile<T>(work.halves, 4 * kTile);
  load_tile<2 + T>(x[b].codes, kBlock);
  load_tile<4 + T>(work.weights[b], 4 * kTile);
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(2 + T), "i"(4 + T));
}

// acc += one block of all vectors. As in project_avx512.cpp; for 8 bits the shift by 4 selects bits 4..19 of
// every sum, which is all of it.
template <int Bits>
inline void add_block(const int32_t (*sums)[kTile], const int16_t* scales, const int32_t* x, __m512i shift, __m512i* acc) {
  const __m512i select = _mm512_set1_epi64(0x24242C2404040C04);
  const __m512i scale = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)scales));
  UNROLL for (int m = 0; m < kVectors; ++m) {
    __m512i sum = _mm512_load_si512(sums[m]);
    if (Bits == 8) sum = _mm512_multishift_epi64_epi8(select, sum);
    const __m512i combined = _mm512_mulhrs_epi16(scale, _mm512_set1_epi32(x[m]));
    acc[m] = _mm512_add_epi32(acc[m], _mm512_srav_epi32(_mm512_madd_epi16(sum, combined), shift));
  }
}

// One step of the loop over blocks, in tile register T: the products of block b + 2 start, those of b + 1 are
// stored, and b, stored a step ago, is added up meanwhile.
template <int Bits, int T>
inline void step(const Work& work, const GroupBlock* x, int b, int blocks, const int16_t* scales, __m512i shift,
                 int32_t (*sums)[kVectors][kTile], __m512i* acc) {
  if (b + 2 < blocks) multiply<Bits, T>(work, x, b + 2);
  if (b + 1 < blocks) store_tile<1 - T>(sums[1 - T], 4 * kTile);
  add_block<Bits>(sums[T], scales, x[b].scales, shift, acc);
}

// Accumulators of 16 rows for 16 vectors. Their bound: see project_portable.cpp.
template <int Bits>
void dot(const Work& work, const GroupBlock* x, const int16_t* scales, const Shape& s, int blocks_per_group,
         int32_t (*out)[kTile]) {
  alignas(64) int32_t sums[2][kVectors][kTile];
  const __m512i shift = _mm512_set1_epi32(s.dot_shift);
  __m512i acc[kVectors];
  UNROLL for (int m = 0; m < kVectors; ++m) acc[m] = _mm512_setzero_si512();
  const int each = blocks_per_group == 1 ? kTile : 0;
  multiply<Bits, 0>(work, x, 0);
  store_tile<0>(sums[0], 4 * kTile);
  if (s.blocks > 1) multiply<Bits, 1>(work, x, 1);
  for (int b = 0; b < s.blocks; b += 2, scales += kTile + each) {
    step<Bits, 0>(work, x, b, s.blocks, scales, shift, sums, acc);
    if (b + 1 < s.blocks) step<Bits, 1>(work, x, b + 1, s.blocks, scales + each, shift, sums, acc);
  }
  UNROLL for (int m = 0; m < kVectors; ++m) _mm512_store_si512(out[m], acc[m]);
}

void open_centred(const Call& c, int tile, Work* work) {
  const uint8_t* codes = tile_codes(c.w, c.shape, tile);
  constexpr int size = kBlock * kTile, half = size / 2;
  for (int b = 0; b < c.shape.blocks; ++b) {
    int8_t* out = work->weights[b][0];
    if (c.w.bits == 4) {
      for (int i = 0; i < half; ++i) out[i] = int8_t((codes[i] & 15) - 8), out[half + i] = int8_t((codes[i] >> 4) - 8);
    } else {
      for (int i = 0; i < size; ++i) out[i] = int8_t(codes[i] ^ 0x80);
    }
    codes += code_bytes(c.w);
  }
}

void prepare_group(const Call& c, int m, GroupBlock* out) {
  for (int i = 0; i < kVectors; ++i)
    for (int b = 0; b < c.shape.blocks; ++b) {
      const size_t at = size_t(m + i) * c.shape.blocks + b;
      __builtin_memcpy(out[b].codes[i], c.x.codes + at * kBlock, kBlock);
      out[b].scales[i] = c.x.scales[at];
    }
}

// Row tile `tile` against the prepared vectors [begin, end).
void run_tile(const Call& c, int begin, int end, int tile, Work* work) {
  const Rows rows = load_rows(c.w, c.shape, c.out.fraction_bits, tile);
  const int16_t *scales = tile_scales(c.w, c.shape, tile), *mins = tile_mins(c.w, c.shape, tile);
  open_centred(c, tile, work);
  for (int m = begin; m < end; m += kVectors) {
    const int group = (m - begin) / kVectors;
    alignas(64) int32_t acc[kVectors][kTile], min_acc[kVectors][kTile];
    const GroupBlock* x = work->blocks + group * c.shape.blocks;
    prefetch_results(c, tile, m, kVectors);
    (c.w.bits == 4 ? dot<4> : dot<8>)(*work, x, scales, c.shape, c.w.group / kBlock, acc);
    if (mins) min_dot<kVectors>(mins, c.shape, work->sums[group * c.shape.supergroups], min_acc[0]);
    for (int i = 0; i < kVectors; ++i) finish_vector(c, rows, tile, m + i, acc[i], mins ? min_acc[i] : nullptr);
  }
}

void project_groups(const Call& c, int m_begin, int m_end, int t_begin, int t_end) {
  alignas(64) Work work;
  for (auto& row : work.halves)
    for (int32_t& half : row) half = 8;
  const int vectors = kVectors * least(kPreparedGroups, kPreparedBlocks / c.shape.blocks);
  for (int begin = m_begin; begin < m_end; begin += vectors) {
    const int end = least(m_end, begin + vectors);
    for (int m = begin; m < end; m += kVectors) {
      const int group = (m - begin) / kVectors;
      prepare_group(c, m, work.blocks + group * c.shape.blocks);
      if (c.w.mins != nullptr) prepare_sums(c, m, kVectors, work.sums[group * c.shape.supergroups]);
    }
    for (int tile = t_begin; tile < t_end; ++tile) run_tile(c, begin, end, tile, &work);
  }
}

}  // namespace

void project_amx(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                 const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                 int64_t* clipped) {
  const Call call{w, x, shape_of(w), {bias, residual, y, y_stride, fraction_bits, clipped, m_begin}};
  int m = m_begin;
  if (m_end - m >= kVectors && call.shape.blocks <= kOpenBlocks) {
    m += (m_end - m) / kVectors * kVectors;
    const TileConfig config;
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
    project_groups(call, m_begin, m, t_begin, t_end);
    asm volatile("tilerelease" ::: "memory");
  }
  if (m < m_end)
    project_avx512(w, x, m, m_end, t_begin, t_end, bias, residual, y, y_stride, fraction_bits, clipped + (m - m_begin));
}

}  // namespace headrace
