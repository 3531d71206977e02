// The outer loops that the projection kernels share: vectors are copied, a chunk at a time, into the order
// in which a kernel reads them, then every row tile is run against the chunk.
//
// `Isa` names the instruction set: kMaxTokens, open_from(bits) (so many vectors repay opening the codes),
// step(rest) (how many of `rest` vectors go together), start(bits, sum) and scale(bits, a) (the two words of a
// Block) and run_tile.
#pragma once

#include "project_common.h"

namespace headrace {
namespace {

// One block of one vector. Blocks of the vectors that go together follow one another, so that a kernel
// walks a single stream whatever k is.
struct Block {
  int8_t codes[kBlock];
  int32_t start;  // initial sum, which takes away the codes' centre
  int32_t scale;
};

// The code sums of one supergroup's groups, in the order of the minima.
struct GroupSums {
  int16_t sum[kSupergroup];
};

constexpr int kChunkTokens = 504;        // vectors prepared at a time, at most
constexpr int kChunkBlocks = 6144;       // their blocks: k <= 196608
constexpr int kChunkSupergroups = 1914;  // tokens * ceil(blocks / 4) <= (kChunkBlocks + 3 * kChunkTokens) / 4

constexpr int kOpenBlocks = 512;         // of a tile of opened 4-bit codes: k <= 16384; of 8-bit codes half as many

struct Chunk {
  uint8_t open[kOpenBlocks * kBlock * kTile];
  Block blocks[kChunkBlocks];
  GroupSums sums[kChunkSupergroups];
};

// How a kernel finds its codes. Opened, every nibble has a byte, and a block's low nibbles come before its high
// ones: 4 bits then lie as 8 bits do.
enum class Codes { kPacked4, kOpen4, kEight, kOpen8 };

// Everything that stays the same during one call.
struct Call {
  const PackedWeight& w;
  const Activations& x;
  const Shape shape;
  const Output out;
};

template <class Isa>
void prepare_blocks(const Call& c, int m, int count, Block* out) {
  for (int i = 0; i < count; ++i)
    for (int b = 0; b < c.shape.blocks; ++b) {
      const size_t at = size_t(m + i) * c.shape.blocks + b;
      Block& block = out[b * count + i];
      __builtin_memcpy(block.codes, c.x.codes + at * kBlock, kBlock);
      block.start = Isa::start(c.w.bits, c.x.sums[at]);
      block.scale = Isa::scale(c.w.bits, c.x.scales[at]);
    }
}

// A group has one or two blocks: |sum| <= 2 * 8192.
inline void prepare_sums(const Call& c, int m, int count, GroupSums* out) {
  const int per_group = c.w.group / kBlock;
  __builtin_memset(out, 0, sizeof(GroupSums) * count * c.shape.supergroups);
  for (int i = 0; i < count; ++i)
    for (int b = 0; b < c.shape.blocks; ++b) {
      const int group = per_group == 1 ? b : b / 2;
      out[group / kSupergroup * count + i].sum[group % kSupergroup] += c.x.rounded[size_t(m + i) * c.shape.blocks + b];
    }
}

template <class Isa>
void prepare_chunk(const Call& c, int begin, int end, Chunk* chunk) {
  for (int m = begin, count; m < end; m += count) {
    count = Isa::step(end - m);
    prepare_blocks<Isa>(c, m, count, chunk->blocks + (m - begin) * c.shape.blocks);
    if (c.w.mins != nullptr) prepare_sums(c, m, count, chunk->sums + (m - begin) * c.shape.supergroups);
  }
}

// With few vectors the codes stream from memory; fetching them this far ahead is worth 15 to 40 % there and costs
// nothing in cache. Addresses past the end are harmless.
template <int kBytes>
inline void prefetch_codes(const uint8_t* codes) {
  constexpr int kAhead = 6144;
  for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(uintptr_t(codes) + kAhead + i));
}

// Fetches the lines that a tile's results go to. Few caches hold all of y, and stores that wait for their
// lines would hold up the ones behind them.
inline void prefetch_results(const Call& c, int tile, int m, int count) {
  for (int i = 0; i < count; ++i) __builtin_prefetch(c.out.y + (m + i) * c.out.stride + tile * kTile, 1);
}

inline void open_codes(const uint8_t* packed, int blocks, int block_bytes, uint8_t* out) {
  for (int b = 0; b < blocks; ++b, packed += block_bytes, out += 2 * block_bytes)
    for (int i = 0; i < block_bytes; ++i) {
      out[i] = packed[i] & 15;
      out[block_bytes + i] = packed[i] >> 4;
    }
}

template <class Isa>
void run_chunk(const Call& c, int begin, int end, int tile, Chunk& chunk) {
  const Rows rows = load_rows(c.w, c.shape, c.out.fraction_bits, tile);
  const uint8_t* codes = tile_codes(c.w, c.shape, tile);
  Codes kind = c.w.bits == 4 ? Codes::kPacked4 : Codes::kEight;
  const size_t block_bytes = code_bytes(c.w);
  if (end - begin >= Isa::open_from(c.w.bits) && 2 * block_bytes * c.shape.blocks <= sizeof(chunk.open)) {
    open_codes(codes, c.shape.blocks, int(block_bytes), chunk.open);
    codes = chunk.open, kind = c.w.bits == 4 ? Codes::kOpen4 : Codes::kOpen8;
  }
  for (int m = begin, count; m < end; m += count) {
    count = Isa::step(end - m);
    prefetch_results(c, tile, m, count);
    Isa::run_tile(c, rows, tile, m, count, kind, codes, chunk.blocks + (m - begin) * c.shape.blocks,
                  chunk.sums + (m - begin) * c.shape.supergroups);
  }
}

template <class Isa>
int chunk_tokens(int blocks) {
  const int tokens = least(kChunkTokens, kChunkBlocks / blocks);
  return tokens < Isa::kMaxTokens ? tokens : tokens / Isa::kMaxTokens * Isa::kMaxTokens;
}

template <class Isa>
void project_chunks(const Call& c, int m_begin, int m_end, int t_begin, int t_end) {
  const int tokens = chunk_tokens<Isa>(c.shape.blocks);
  alignas(64) Chunk chunk;
  for (int begin = m_begin; begin < m_end; begin += tokens) {
    const int end = least(m_end, begin + tokens);
    prepare_chunk<Isa>(c, begin, end, &chunk);
    for (int tile = t_begin; tile < t_end; ++tile) run_chunk<Isa>(c, begin, end, tile, chunk);
  }
}

}  // namespace
}  // namespace headrace
