// R3 in plain C++, the way ops.py states it: the kernel that the others are compared with.
#include "project.h"
#include "project_common.h"

namespace headrace {
namespace {

// The sums of one block for the rows of a tile. 4 bits: |sum| <= 32 * 8 * 127 = 32512;
// 8 bits: 32 * 128 * 127 = 520192, rounded to 16 bits by (sum + 8) >> 4: again at most 32512.
void block_sums_4(const uint8_t* codes, const int8_t* x, int32_t* sums) {
  for (int r = 0; r < kTile; ++r) sums[r] = 0;
  for (int j = 0; j < 4; ++j, codes += 4 * kTile, x += 4)
    for (int r = 0; r < kTile; ++r)
      for (int i = 0; i < 4; ++i) {
        const int code = codes[4 * r + i];
        sums[r] += ((code & 15) - 8) * x[i] + ((code >> 4) - 8) * x[16 + i];
      }
}

void block_sums_8(const uint8_t* codes, const int8_t* x, int32_t* sums) {
  for (int r = 0; r < kTile; ++r) sums[r] = 0;
  for (int j = 0; j < 8; ++j, codes += 4 * kTile, x += 4)
    for (int r = 0; r < kTile; ++r)
      for (int i = 0; i < 4; ++i) sums[r] += (codes[4 * r + i] - 128) * x[i];
  for (int r = 0; r < kTile; ++r) sums[r] = (sums[r] + 8) >> 4;
}

// |sum * combined| <= 32512 * 16513 < 2^29; blocks <= 2^(r + 2) of them, each shifted by r, stay in int32.
void dot_tile(const PackedWeight& w, const Shape& s, const Activations& x, int m, int tile, int32_t* acc) {
  const uint8_t* codes = tile_codes(w, s, tile);
  const int16_t* scales = tile_scales(w, s, tile);
  for (int r = 0; r < kTile; ++r) acc[r] = 0;
  for (int b = 0; b < s.blocks; ++b, codes += code_bytes(w)) {
    const size_t at = size_t(m) * s.blocks + b;
    int32_t sums[kTile];
    (w.bits == 4 ? block_sums_4 : block_sums_8)(codes, x.codes + at * kBlock, sums);
    const int16_t* scale = scales + b * kBlock / w.group * kTile;
    for (int r = 0; r < kTile; ++r)
      acc[r] += (sums[r] * ((scale[r] * x.scales[at] + (1 << 14)) >> 15)) >> s.dot_shift;
  }
}

// Sum of `rounded` over one group of vector m: within +-8192 a block, two blocks at most.
int group_sum(const PackedWeight& w, const Shape& s, const Activations& x, int m, int group) {
  const int per_group = w.group / kBlock, begin = group * per_group;
  int sum = 0;
  for (int b = begin; b < least(begin + per_group, s.blocks); ++b) sum += x.rounded[size_t(m) * s.blocks + b];
  return sum;
}

// |min * group sum| <= 32767 * 16384, four of them < 2^31; 2^(r_m) supergroups shifted by r_m stay in int32.
void min_tile(const PackedWeight& w, const Shape& s, const Activations& x, int m, int tile, int32_t* acc) {
  const int16_t* mins = tile_mins(w, s, tile);
  for (int r = 0; r < kTile; ++r) acc[r] = 0;
  if (mins == nullptr) return;
  for (int g = 0; g < s.groups; g += kSupergroup, mins += kTile * kSupergroup) {
    int32_t terms[kTile] = {};
    for (int i = 0; i < least(kSupergroup, s.groups - g); ++i) {
      const int sum = group_sum(w, s, x, m, g + i);
      for (int r = 0; r < kTile; ++r) terms[r] += mins[r * kSupergroup + i] * sum;
    }
    for (int r = 0; r < kTile; ++r) acc[r] += terms[r] >> s.min_shift;
  }
}

}  // namespace

void project_portable(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                      const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                      int64_t* clipped) {
  const Shape s = shape_of(w);
  const Output out{bias, residual, y, y_stride, fraction_bits, clipped, m_begin};
  for (int tile = t_begin; tile < t_end; ++tile)
    for (int m = m_begin; m < m_end; ++m) {
      int32_t acc[kTile], min_acc[kTile];
      dot_tile(w, s, x, m, tile, acc);
      min_tile(w, s, x, m, tile, min_acc);
      finish_tile(w, s, x, out, tile, m, acc, min_acc);
    }
}

}  // namespace headrace
