// The operations of headrace's arithmetic as plain functions over caller-owned memory.
//
// Each operation equals src/headrace/arith/ops.py bit for bit (its rules but R11 and R13, which are draw.h's and experts.h's); nothing here
// allocates, throws, touches floating point or knows what CPU this is. An instruction set is a `Tier`:
// a table of these functions; tiers.cpp alone decides which tier runs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr int kBlock = 32;       // elements that share an activation scale
constexpr int kTile = 16;        // weight rows (or keys) stored together
constexpr int kSupergroup = 4;   // weight groups whose minimum terms are summed before one shift
constexpr int kExpertHeadroom = 4;  // fraction bits that an expert's output has less than the residual stream

// Weight [n, k] in kernel order (docs/artifact.md):
//   codes  4 bits: [T][B][4][16][4] bytes, low nibble k = 32b + 4j + i, high nibble k + 16
//          8 bits: [T][B][8][16][4] bytes
//   scales [T][G][16], mins [T][ceil(G/4)][16][4] or null, row [3][16 T]: mantissa, exponent, min shift
struct PackedWeight {
  const uint8_t* codes;
  const int16_t* scales;
  const int16_t* mins;
  const int32_t* row;
  int32_t n, k;
  int32_t bits, group;
};

// Quantised vectors, row-major: vector m has codes[m * k ...], scales/sums/rounded[m * k / 32 ...].
// sums is each block's code sum; rounded is (scale * sum) shifted by 13 with rounding (R3's t).
struct Activations {
  int8_t* codes;
  int16_t* scales;
  int16_t* sums;
  int16_t* rounded;
  int32_t* exponent;
  int32_t k;
};

struct NormGain {
  const int32_t* gain;      // [k]
  int32_t gain_exponent;
  int32_t eps_mantissa;     // 31 bits
  int32_t eps_exponent;
};

// A router's rows: value = codes * 2^exponent.
struct RouterRows {
  const int16_t* codes;      // [rows][k]
  const int32_t* exponents;  // [rows]
  int32_t rows, k;
};

struct RopeTables {
  const int32_t* low;   // [256][head_dim / 2][2]
  const int32_t* high;  // [rows][head_dim / 2][2]
};

// Keys and values of one (layer, kv head) in tiles of 16 positions. One tile record, 64-byte aligned:
//   K codes int8 [head_dim / 4][16][4]; V codes int8 [4][head_dim][4] (4 positions together);
//   K scales i16 [head_dim / 32][16]; V scales i16 [head_dim / 32][16]; K exponent i16 [16]; V exponent i16 [16]
constexpr size_t kv_tile_bytes(int head_dim) {
  return size_t(kTile) * head_dim * 2 + size_t(head_dim / kBlock) * kTile * 2 * 2 + kTile * 2 * 2;
}

struct AttentionShape {
  int32_t head_dim;
  int32_t scale_mantissa;   // log2(e) / sqrt(head_dim): 30-bit mantissa
  int32_t scale_exponent;
  int32_t fraction_bits;
};

// One instruction set. `clipped` counters are added to, never reset; where a call has several vectors or queries, each
// has a counter of its own.
struct Tier {
  const char* name;

  // R3: y[m][16 t ...] for vectors [m_begin, m_end) and row tiles [t_begin, t_end); rows >= n are not
  // written. out = saturate(acc + bias + (residual ? y : 0)). clipped i64[m_end - m_begin].
  void (*project)(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                  const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                  int64_t* clipped);

  // R2: vector m of `out` from int32 or int64 values x[0..k).
  void (*quantize_i32)(const int32_t* x, int exponent, const Activations& out, int m);
  void (*quantize_i64)(const int64_t* x, int exponent, const Activations& out, int m);

  // R4 followed by R2; scratch i32[k].
  void (*norm_quantize)(const int32_t* x, const NormGain& g, int fraction_bits, const Activations& out, int m,
                        int32_t* scratch);
  // R4 followed by R5, in place over one head.
  void (*norm_rescale)(int32_t* x, int k, const NormGain& g, int fraction_bits, int64_t* clipped);

  // R6 over one head in place; cos_sin i32[head_dim / 2][2] from `rotary`.
  void (*rotary)(const RopeTables& tables, int head_dim, int position, int32_t* cos_sin);
  void (*rope)(int32_t* x, int head_dim, const int32_t* cos_sin, int64_t* clipped);

  // R7: write one key and one value (int32 fixed point [head_dim] each) at `slot` (0..15) of a tile record.
  void (*land)(uint8_t* tile, int slot, const int32_t* key, const int32_t* value, int head_dim, int fraction_bits);

  // R8: `rows` query heads that share one kv head: query i is q[i] (i32[head_dim]) and sees
  // visible[i] >= 1 keys, key j in tiles[j / 16] slot j % 16; out[i] i32[head_dim]; clipped i64[rows].
  // scratch, 64-byte aligned, holds attend_scratch_bytes(rows, max visible, head_dim).
  void (*attend)(const AttentionShape& shape, const uint8_t* const* tiles, const int32_t* const* q, const int32_t* visible,
                 int rows, int32_t* const* out, void* scratch, int64_t* clipped);

  // R9 followed by R2: silu(gate) * up over k elements; scratch i64[k].
  void (*silu_mul_quantize)(const int32_t* gate, const int32_t* up, const int32_t* table, int fraction_bits,
                            const Activations& out, int m, int64_t* scratch);

  // R4 followed by R12: logits i32[router.rows]; scratch i32[2 k].
  void (*route)(const int32_t* x, const NormGain& g, int fraction_bits, const RouterRows& router, int32_t* logits,
                int32_t* scratch, int64_t* clipped);
  // R14: x i32[k] += the sum of outputs[j] * shares[j], Q30, over count <= 64.
  void (*mix)(int32_t* x, const int32_t* const* outputs, const int32_t* shares, int count, int k, int64_t* clipped);
  // R14 in pieces, of which any grouping gives the bits of `mix`: sums i64[k] (+)= the rounded products of count <= 64
  // outputs, where the `first` call of a row sets the sums; then x i32[k] += sums.
  void (*add_terms)(int64_t* sums, const int32_t* const* outputs, const int32_t* shares, int count, int k, bool first);
  void (*add_sums)(int32_t* x, const int64_t* sums, int k, int64_t* clipped);
  // R15: x i32[k] += output * sigmoid(gate).
  void (*add_shared)(int32_t* x, const int32_t* output, int32_t gate, const int32_t* table, int fraction_bits, int k,
                     int64_t* clipped);

  // R10.
  void (*embed)(const PackedWeight& w, int row, int fraction_bits, int32_t* out, int64_t* clipped);
};

// Each query needs a record of its codes and scales, a line of 16 words and its scores, in an odd number of tiles;
// the call needs the combined weights of two queries and two words a tile. Every piece is aligned to 64 bytes.
constexpr size_t attend_scratch_bytes(int rows, int max_visible, int head_dim) {
  const size_t blocks = head_dim / kBlock, tiles = size_t(max_visible + 2 * kTile - 1) / kTile;
  const size_t query = (2 + 2 * blocks + 15) / 16 * 64 + head_dim + 64 + (tiles + 1) * kTile * 4;
  return query * rows + tiles * ((blocks + 1) / 2 * 128 + 8) + 8 * 64;
}

}  // namespace headrace
