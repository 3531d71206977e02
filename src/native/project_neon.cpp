// R3 for Arm with the dot product extension (Armv8.2-A): 4 rows are one register of int32.
#include <arm_neon.h>

#include "project.h"
#include "project_chunk.h"

#define UNROLL _Pragma("GCC unroll 16")

namespace headrace {
namespace {

constexpr int kMaxTokens = 4;  // 16 block sums, the vectors' codes and the weights fill 32 registers
constexpr int kQuads = 4;      // registers of a tile's 16 rows

// sums[m][q] += codes of 4 elements of rows 4q.. with those of x at 4 * j.
template <int J, int M>
inline void add_products(const int8x16_t* code, const int8x16_t (*x)[2], int32x4_t (*sums)[kQuads]) {
  UNROLL for (int m = 0; m < M; ++m)
    UNROLL for (int q = 0; q < kQuads; ++q)
      sums[m][q] = vdotq_laneq_s32(sums[m][q], code[q], x[m][J / 4], J % 4);
}

// 64 code bytes: 4 elements of the tile's rows, or, packed, twice 4 elements, J and J + 4.
template <Codes Kind, int J, int M>
inline void add_row_of_codes(const uint8_t* codes, const int8x16_t (*x)[2], int32x4_t (*sums)[kQuads]) {
  int8x16_t code[kQuads];
  UNROLL for (int q = 0; q < kQuads; ++q) {
    const uint8x16_t bytes = vld1q_u8(codes + 16 * q);
    const uint8x16_t centred = Kind == Codes::kEight ? veorq_u8(bytes, vdupq_n_u8(0x80)) : bytes;
    code[q] = vreinterpretq_s8_u8(Kind == Codes::kPacked4 ? vandq_u8(bytes, vdupq_n_u8(15)) : centred);
  }
  add_products<J, M>(code, x, sums);
  if (Kind != Codes::kPacked4) return;
  UNROLL for (int q = 0; q < kQuads; ++q) code[q] = vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(codes + 16 * q), 4));
  add_products<(J + 4) % 8, M>(code, x, sums);
}

// Block sums in int32, |sum| <= 32 * 128 * 127 + 8 * 4064 whatever the order: 4-bit codes start at minus
// their centre's part, 8-bit codes are centred as they are read.
template <Codes Kind, int M>
inline void block_sums(const uint8_t* codes, const Block* x, int32x4_t (*sums)[kQuads]) {
  int8x16_t lanes[M][2];
  UNROLL for (int m = 0; m < M; ++m) {
    lanes[m][0] = vld1q_s8(x[m].codes), lanes[m][1] = vld1q_s8(x[m].codes + 16);
    UNROLL for (int q = 0; q < kQuads; ++q) sums[m][q] = vdupq_n_s32(x[m].start);
  }
  add_row_of_codes<Kind, 0, M>(codes, lanes, sums);
  add_row_of_codes<Kind, 1, M>(codes + 64, lanes, sums);
  add_row_of_codes<Kind, 2, M>(codes + 128, lanes, sums);
  add_row_of_codes<Kind, 3, M>(codes + 192, lanes, sums);
  if (Kind == Codes::kPacked4) return;
  add_row_of_codes<Kind, 4, M>(codes + 256, lanes, sums);
  add_row_of_codes<Kind, 5, M>(codes + 320, lanes, sums);
  add_row_of_codes<Kind, 6, M>(codes + 384, lanes, sums);
  add_row_of_codes<Kind, 7, M>(codes + 448, lanes, sums);
}

// 16 bits of a block sum (|sum| <= 32512); for 8-bit codes (sum + 8) >> 4.
template <Codes Kind>
inline int16x4_t narrow(int32x4_t sum) {
  return Kind == Codes::kEight ? vrshrn_n_s32(sum, 4) : vmovn_s32(sum);
}

// sqrdmulh is (2 s a + 2^15) >> 16, which is the combined scale. A product is below 2^29; the shifted terms
// of all blocks stay in int32 (see project_portable.cpp).
template <Codes Kind, int M>
void dot(const uint8_t* codes, const int16_t* scales, const Shape& s, int blocks_per_group, const Block* x,
         int32_t* out) {
  constexpr int kBytes = Kind == Codes::kPacked4 ? 256 : 512;
  const int32x4_t shift = vdupq_n_s32(-s.dot_shift);
  int32x4_t acc[M][kQuads];
  for (int m = 0; m < M; ++m)
    for (int q = 0; q < kQuads; ++q) acc[m][q] = vdupq_n_s32(0);
  for (int b = 0; b < s.blocks; ++b, codes += kBytes, x += M) {
    int32x4_t sums[M][kQuads];
    if (M <= 2) prefetch_codes<kBytes>(codes);
    block_sums<Kind, M>(codes, x, sums);
    const int16x8_t scale[2] = {vld1q_s16(scales), vld1q_s16(scales + 8)};
    if (blocks_per_group == 1 || (b & 1)) scales += kTile;
    UNROLL for (int m = 0; m < M; ++m)
      UNROLL for (int h = 0; h < 2; ++h) {
        const int16x8_t combined = vqrdmulhq_s16(scale[h], vdupq_n_s16(int16_t(x[m].scale)));
        const int32x4_t low = vmull_s16(narrow<Kind>(sums[m][2 * h]), vget_low_s16(combined));
        const int32x4_t high = vmull_s16(narrow<Kind>(sums[m][2 * h + 1]), vget_high_s16(combined));
        acc[m][2 * h] = vaddq_s32(acc[m][2 * h], vshlq_s32(low, shift));
        acc[m][2 * h + 1] = vaddq_s32(acc[m][2 * h + 1], vshlq_s32(high, shift));
      }
  }
  for (int m = 0; m < M; ++m)
    for (int q = 0; q < kQuads; ++q) vst1q_s32(out + kTile * m + 4 * q, acc[m][q]);
}

// The four products of one supergroup, summed: below 2^31.
inline int32x4_t min_terms(int16x4_t a, int16x4_t b, int16x4_t c, int16x4_t d, int16x4_t sums) {
  const int32x4_t two = vmlal_lane_s16(vmull_lane_s16(a, sums, 0), b, sums, 1);
  return vmlal_lane_s16(vmlal_lane_s16(two, c, sums, 2), d, sums, 3);
}

template <int M>
void min_dot(const int16_t* mins, const Shape& s, const GroupSums* x, int32_t* out) {
  const int32x4_t shift = vdupq_n_s32(-s.min_shift);
  int32x4_t acc[M][kQuads];
  for (int m = 0; m < M; ++m)
    for (int q = 0; q < kQuads; ++q) acc[m][q] = vdupq_n_s32(0);
  for (int g = 0; g < s.supergroups; ++g, mins += 64, x += M)
    UNROLL for (int q = 0; q < kQuads; ++q) {
      const int16x4x4_t four = vld4_s16(mins + 16 * q);
      UNROLL for (int m = 0; m < M; ++m) {
        const int32x4_t term = min_terms(four.val[0], four.val[1], four.val[2], four.val[3], vld1_s16(x[m].sum));
        acc[m][q] = vaddq_s32(acc[m][q], vshlq_s32(term, shift));
      }
    }
  for (int m = 0; m < M; ++m)
    for (int q = 0; q < kQuads; ++q) vst1q_s32(out + kTile * m + 4 * q, acc[m][q]);
}

// Rows r and r + 1: |acc * mantissa| < 2^53, |min_acc * min_mantissa| < 2^60, and srshl rounds as R1 does.
inline int64x2_t finish_two(const Rows& rows, const Output& out, int tile, int m, int exponent, const int32_t* acc,
                            const int32_t* min_acc, int r) {
  int64x2_t value = vmull_s32(vld1_s32(acc + r), vld1_s32(rows.mantissa + r));
  if (min_acc) value = vmlal_s32(value, vld1_s32(min_acc + r), vld1_s32(rows.min_mantissa + r));
  const int32x2_t shift = vsub_s32(vdup_n_s32(exponent), vld1_s32(rows.places + r));
  value = vrshlq_s64(value, vmovl_s32(shift));
  if (out.bias) value = vaddw_s32(value, vld1_s32(out.bias + tile * kTile + r));
  if (out.residual) value = vaddw_s32(value, vld1_s32(out.y + m * out.stride + tile * kTile + r));
  return value;
}

// The end of R3 for one vector and a whole tile, when nothing needs to be clipped; otherwise false, and
// nothing is written.
inline bool finish_fast(const Rows& rows, const Output& out, int tile, int m, int exponent, const int32_t* acc,
                        const int32_t* min_acc) {
  if (!rows.fits(exponent) || rows.count != kTile) return false;
  int32x2_t result[kTile / 2];
  uint64x2_t same = vdupq_n_u64(~uint64_t(0));
  int32x2_t least_value = vdup_n_s32(0);
  for (int i = 0; i < kTile / 2; ++i) {
    const int64x2_t value = finish_two(rows, out, tile, m, exponent, acc, min_acc, 2 * i);
    result[i] = vmovn_s64(value);
    same = vandq_u64(same, vceqq_s64(vmovl_s32(result[i]), value));
    least_value = vmin_s32(least_value, result[i]);
  }
  if ((vgetq_lane_u64(same, 0) & vgetq_lane_u64(same, 1)) != ~uint64_t(0)) return false;
  if (vminv_s32(least_value) == INT32_MIN) return false;
  int32_t* y = out.y + m * out.stride + tile * kTile;
  for (int i = 0; i < kTile / 2; ++i) vst1_s32(y + 2 * i, result[i]);
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
    const int32_t *a = acc + i * kTile, *b = mins ? min_acc + i * kTile : nullptr;
    if (!finish_fast(rows, c.out, tile, m + i, c.x.exponent[m + i], a, b))
      finish_tile(c.w, c.shape, c.x, c.out, tile, m + i, a, b);
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
    default: return tile_by_count<Codes::kEight>(count);
  }
}

struct Neon {
  static constexpr int kMaxTokens = headrace::kMaxTokens;

  static int open_from(int bits) { return bits == 4 ? 8 : INT32_MAX; }
  static int step(int rest) { return least(rest, kMaxTokens); }
  static int32_t start(int bits, int sum) { return bits == 4 ? -8 * sum : 0; }
  static int32_t scale(int, int a) { return a; }

  static void run_tile(const Call& c, const Rows& rows, int tile, int m, int count, Codes kind, const uint8_t* codes,
                       const Block* blocks, const GroupSums* sums) {
    tile_by_codes(kind, count)(c, rows, tile, m, codes, blocks, sums);
  }
};

}  // namespace

void project_neon(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                  const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                  int64_t* clipped) {
  const Call call{w, x, shape_of(w), {bias, residual, y, y_stride, fraction_bits, clipped, m_begin}};
  project_chunks<Neon>(call, m_begin, m_end, t_begin, t_end);
}

}  // namespace headrace
