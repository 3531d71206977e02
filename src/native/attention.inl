// What the attention (R8) of every instruction set shares. Query heads that share a kv head go together, so that
// a tile of keys is read once for all of them: all scores first, then one query after the other becomes weights,
// combined weights and a sum of values. attend.inl is that order; the loops are hooks in attend_*.inl.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// Hands out consecutive 64-byte aligned pieces of the scratch memory.
struct Scratch {
  template <typename T>
  T* take(size_t count) {
    uint8_t* at = next;
    next += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
  uint8_t* next;
};

// The query heads of one call, a record of `stride` words each: base, visible, starts [blocks], scales [blocks]
// and, from word `codes` on, head_dim bytes of codes. A score's shift is base less the key's exponent. starts is
// the rounding half of a block sum, less what HEADRACE_KEY_CENTRE adds to every key's code.
struct Queries {
  int32_t* record(int row) const { return records + ptrdiff_t(row) * stride; }
  int32_t* scores_of(int row) const { return scores + ptrdiff_t(row) * score_tiles * kTile; }

  int rows, blocks, head_dim, stride, codes;
  int most, num_tiles;  // visible keys, and the tiles that hold them, rounded up to two
  int score_tiles;      // room for scores, an odd number of tiles: rows then spread over all sets of the cache
  int lowest_base, highest_base;
  int32_t mantissa;
  int32_t* records;
  int32_t* best;        // [rows][16]: the largest score of each lane so far
  int32_t* scores;      // [rows][score_tiles][16]
};

inline Queries make_queries(const AttentionShape& shape, const int32_t* const* q, const int32_t* visible, int rows,
                            Scratch* scratch) {
  Queries out{};
  out.rows = rows;
  out.head_dim = shape.head_dim;
  out.blocks = shape.head_dim / kBlock;
  out.codes = (2 + 2 * out.blocks + 15) / 16 * 16;
  out.stride = out.codes + shape.head_dim / 4;
  out.mantissa = shape.scale_mantissa;
  out.lowest_base = INT32_MAX, out.highest_base = INT32_MIN;
  out.records = scratch->take<int32_t>(size_t(rows) * out.stride);
  out.best = scratch->take<int32_t>(size_t(rows) * kTile);
  for (int row = 0; row < rows; ++row) {
    int32_t* record = out.record(row);
    int16_t scales[kMaxHeadBlocks], sums[kMaxHeadBlocks];
    int8_t* codes = reinterpret_cast<int8_t*>(record + out.codes);
    record[0] = score_base(shape, quantize_to(q[row], shape.head_dim, -shape.fraction_bits, codes, scales, sums));
    record[1] = visible[row];
    for (int b = 0; b < out.blocks; ++b) {
      record[2 + b] = 8 - HEADRACE_KEY_CENTRE * sums[b];
      record[2 + out.blocks + b] = scales[b];
    }
    out.most = visible[row] > out.most ? visible[row] : out.most;
    out.lowest_base = record[0] < out.lowest_base ? record[0] : out.lowest_base;
    out.highest_base = record[0] > out.highest_base ? record[0] : out.highest_base;
    for (int j = 0; j < kTile; ++j) out.best[row * kTile + j] = INT32_MIN;
  }
  out.num_tiles = (out.most + 2 * kTile - 1) / (2 * kTile) * 2;
  out.score_tiles = out.num_tiles + 1;
  out.scores = scratch->take<int32_t>(size_t(rows) * out.score_tiles * kTile);
  return out;
}

// The tiles in which the combined weights of a few queries are not all 0: 64 bytes for each tile, query and pair
// of blocks. What the bytes are is up to the hooks.
struct Mix {
  uint8_t* of(int index, int row) const { return bytes + (ptrdiff_t(index) * rows + row) * pairs * 64; }
  uint8_t* bytes;  // [count][rows][pairs][64]
  int32_t* list;   // [count]
  int count, rows, pairs;
};

template <typename T>
inline const int16_t* words(const T* tile, size_t offset) {
  return reinterpret_cast<const int16_t*>(tile + offset);
}

// tops[t] is the largest value exponent before tile t.
inline void largest_exponents(const uint8_t* const* tiles, const TileFields& at, int num_tiles, int32_t* tops) {
  int top = INT16_MIN;
  for (int t = 0; t < num_tiles; ++t) {
    tops[t] = top;
    const int16_t* e = words(tiles[t], at.value_exponent);
    for (int j = 0; j < kTile; ++j) top = e[j] > top ? e[j] : top;
  }
}

// The largest value exponent of the visible positions.
inline int largest_visible(const uint8_t* const* tiles, const TileFields& at, int visible, const int32_t* tops) {
  const int last = (visible - 1) / kTile;
  int top = tops[last];
  for (int j = 0; last * kTile + j < visible; ++j) {
    const int16_t e = words(tiles[last], at.value_exponent)[j];
    top = e > top ? e : top;
  }
  return top;
}

inline int32_t largest_of_tile(const int32_t* lanes) {
  int32_t top = INT32_MIN;
  for (int j = 0; j < kTile; ++j) top = lanes[j] > top ? lanes[j] : top;
  return top;
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
