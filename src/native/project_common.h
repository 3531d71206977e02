// What every projection kernel shares: the shifts of R3, and its last step for one output.
//
// Everything here has internal linkage on purpose: the files that include it are compiled for different
// instruction sets, and a shared inline function could be linked from the wrong one.
#pragma once

#include "ops.h"

namespace headrace {
namespace {

// What R3 derives from a weight's shape alone.
struct Shape {
  int tiles, blocks, groups, supergroups;
  int dot_shift;    // r
  int min_shift;    // r_m
  int sum_rounding; // h: 0 for 4-bit codes, 4 for 8-bit codes
  int align;        // left shift that brings a dot accumulator to the unit of a minimum accumulator
};

// Where the results of one call go.
struct Output {
  const int32_t* bias;  // [n] or null
  bool residual;
  int32_t* y;
  ptrdiff_t stride;
  int fraction_bits;
  int64_t* clipped;  // of vector `first` and those after it
  int first;
};

constexpr int kSumShift = 13;
constexpr int32_t kInt32Max = 2147483647;

inline int divide_up(int a, int b) { return (a + b - 1) / b; }
inline int least(int a, int b) { return a < b ? a : b; }

inline int bit_length(int x) {
  int bits = 0;
  for (; x > 0; x >>= 1) ++bits;
  return bits;
}

inline Shape shape_of(const PackedWeight& w) {
  Shape s;
  s.tiles = divide_up(w.n, kTile);
  s.blocks = w.k / kBlock;
  s.groups = divide_up(w.k, w.group);
  s.supergroups = divide_up(s.groups, kSupergroup);
  s.dot_shift = bit_length(s.blocks - 1) < 2 ? 0 : bit_length(s.blocks - 1) - 2;
  s.min_shift = bit_length(s.supergroups - 1);
  s.sum_rounding = w.bits == 4 ? 0 : 4;
  s.align = 2 + s.sum_rounding + s.dot_shift - s.min_shift;  // 2..7: supergroups >= blocks / 8
  return s;
}

inline size_t code_bytes(const PackedWeight& w) { return size_t(kBlock) * kTile * w.bits / 8; }

inline const uint8_t* tile_codes(const PackedWeight& w, const Shape& s, int tile) {
  return w.codes + size_t(tile) * s.blocks * code_bytes(w);
}

inline const int16_t* tile_scales(const PackedWeight& w, const Shape& s, int tile) {
  return w.scales + size_t(tile) * s.groups * kTile;
}

inline const int16_t* tile_mins(const PackedWeight& w, const Shape& s, int tile) {
  return w.mins == nullptr ? nullptr : w.mins + size_t(tile) * s.supergroups * kTile * kSupergroup;
}

// R1. |x| < 2^62, so that adding half of at most 2^61 stays inside int64.
inline int64_t shift_round(int64_t x, int64_t shift) {
  if (shift > 62) return 0;
  if (shift > 0) return (x + (int64_t(1) << (shift - 1))) >> shift;
  const int left = shift < -62 ? 62 : int(-shift);
  const int64_t limit = (int64_t(1) << 62) >> left;
  const int64_t clamped = x > limit ? limit : x < -limit ? -limit : x;
  return clamped * (int64_t(1) << left);
}

inline int32_t saturate(int64_t x, int64_t* clipped) {
  const int64_t low = x < -kInt32Max ? -kInt32Max : x;
  const int64_t y = low > kInt32Max ? kInt32Max : low;
  *clipped += y != x;
  return int32_t(y);
}

// The end of R3 for row `row` and vector `m`: `acc` and `min_acc` are its int32 accumulators.
// |acc << align| < 2^38 and |min_acc << 14| < 2^45; times a mantissa below 2^15 their sum is below 2^61.
inline void finish(const PackedWeight& w, const Shape& s, const Activations& x, const Output& out, int row, int m,
                   int32_t acc, int32_t min_acc) {
  const int32_t* rows = w.row + row;
  const ptrdiff_t padded = ptrdiff_t(s.tiles) * kTile;
  const int64_t mantissa = rows[0], exponent = rows[padded], min_shift = rows[2 * padded];
  const int64_t sum = acc * (int64_t(1) << s.align) + min_acc * (int64_t(1) << min_shift);
  const int64_t places = exponent + x.exponent[m] + kSumShift + s.min_shift + out.fraction_bits;
  int32_t* y = out.y + m * out.stride + row;
  int64_t value = shift_round(sum * mantissa, -places);
  if (out.bias != nullptr) value += out.bias[row];
  if (out.residual) value += *y;
  *y = saturate(value, out.clipped + (m - out.first));
}

// `finish` for the rows of one tile that exist.
inline void finish_tile(const PackedWeight& w, const Shape& s, const Activations& x, const Output& out, int tile,
                        int m, const int32_t* acc, const int32_t* min_acc) {
  const int rows = least(kTile, w.n - tile * kTile);
  for (int r = 0; r < rows; ++r)
    finish(w, s, x, out, tile * kTile + r, m, acc[r], min_acc == nullptr ? 0 : min_acc[r]);
}

// The rows of one tile as the vectorised ends of R3 want them.
struct Rows {
  alignas(64) int32_t mantissa[kTile];      // << align: below 2^22
  alignas(64) int32_t min_mantissa[kTile];  // << min_shift: below 2^29
  alignas(64) int32_t places[kTile];        // right shift for a vector of exponent 0, modulo 2^32
  int64_t fewest, most;                     // range of the shifts, exactly; rows of mantissa 0 do not matter
  int count;                                // rows of the tile that exist

  // Whether every row's shift for a vector of this exponent is a right shift of 1 to 62 places; modulo 2^32 it
  // is then exact, too.
  bool fits(int exponent) const { return fewest - exponent >= 1 && most - exponent <= 62; }
};

inline Rows load_rows(const PackedWeight& w, const Shape& s, int fraction_bits, int tile) {
  Rows rows;
  const int32_t* mantissa = w.row + tile * kTile;
  const int32_t* exponent = mantissa + ptrdiff_t(s.tiles) * kTile;
  const int32_t* min_shift = exponent + ptrdiff_t(s.tiles) * kTile;
  const int32_t unit = kSumShift + s.min_shift + fraction_bits;
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int r = 0; r < kTile; ++r) {
    rows.mantissa[r] = mantissa[r] << s.align;
    rows.min_mantissa[r] = mantissa[r] << min_shift[r];
    rows.places[r] = int32_t(0u - uint32_t(exponent[r]) - uint32_t(unit));
    const int32_t least_of = mantissa[r] == 0 ? INT32_MAX : exponent[r];
    const int32_t most_of = mantissa[r] == 0 ? INT32_MIN : exponent[r];
    low = low < least_of ? low : least_of;
    high = high > most_of ? high : most_of;
  }
  rows.fewest = -(int64_t(high) + unit), rows.most = -(int64_t(low) + unit);
  if (low > high) rows.fewest = rows.most = INT64_MIN / 2;  // no row matters: `fits` nothing
  rows.count = least(kTile, w.n - tile * kTile);
  return rows;
}

}  // namespace
}  // namespace headrace
