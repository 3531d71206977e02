// The order of attention (R8); see attention.inl. The hooks, which come before this file:
//   score_tile(tile, t, queries)                             all queries against the 16 keys of tile t
//   weigh(scores, visible, best)                             scores become weights; returns their total
//   combine_tile(tile, at, blocks, top, weights, out)        combined weights of one tile; false if all are 0
//   kMixRows, and add_values<Rows>(tiles, at, head_dim, mix, pair, blocks, acc)
//                                                            acc[row][d] += sum of c * v for a pair of blocks
//   divide(acc, head_dim, division, out, &clipped)

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// Pages lie far apart, where no hardware prefetcher looks.
inline void prefetch(const uint8_t* tile, int head_dim) {
  for (size_t i = 0; i < kv_tile_bytes(head_dim); i += 64) __builtin_prefetch(tile + i, 0, 2);
}

constexpr int kPrefetchTiles = 6;

// Rows queries from `row` on, from their scores to their outputs.
template <int Rows>
inline void finish_rows(const AttentionShape& shape, const uint8_t* const* tiles, const Queries& q, int row,
                        const int32_t* tops, Mix mix, int32_t* const* out, int64_t* clipped) {
  const TileFields at(shape.head_dim);
  int visible[Rows], top[Rows], most = 0;
  int64_t total[Rows];
  for (int i = 0; i < Rows; ++i) {
    visible[i] = q.record(row + i)[1];
    most = visible[i] > most ? visible[i] : most;
    top[i] = largest_visible(tiles, at, visible[i], tops);
    total[i] = weigh(q.scores_of(row + i), visible[i], largest_of_tile(q.best + (row + i) * kTile));
  }
  mix.rows = Rows;
  for (int t = 0; t * kTile < most; ++t) {
    bool any = false;
    for (int i = 0; i < Rows; ++i) {
      if (t * kTile < visible[i]) {
        any |= combine_tile(tiles[t], at, q.blocks, top[i], q.scores_of(row + i) + t * kTile, mix.of(mix.count, i));
      } else {
        std::memset(mix.of(mix.count, i), 0, size_t(mix.pairs) * 64);
      }
    }
    mix.list[mix.count] = t;
    mix.count += any;
  }
  alignas(64) int64_t acc[Rows][kMaxHeadDim];
  for (int i = 0; i < Rows; ++i) std::memset(acc[i], 0, size_t(shape.head_dim) * sizeof(int64_t));
  for (int pair = 0; pair < mix.pairs; ++pair)
    add_values<Rows>(tiles, at, shape.head_dim, mix, pair, q.blocks - 2 * pair < 2 ? 1 : 2, acc);
  for (int i = 0; i < Rows; ++i)
    divide(acc[i], shape.head_dim, Division(total[i], top[i], shape.fraction_bits), out[row + i], clipped + row + i);
}

void attend(const AttentionShape& shape, const uint8_t* const* tiles, const int32_t* const* q, const int32_t* visible,
            int rows, int32_t* const* out, void* memory, int64_t* clipped) {
  Scratch scratch{static_cast<uint8_t*>(memory)};
  const Queries queries = make_queries(shape, q, visible, rows, &scratch);
  for (int t = 0; t * kTile < queries.most; ++t) {
    if ((t + kPrefetchTiles) * kTile < queries.most) prefetch(tiles[t + kPrefetchTiles], shape.head_dim);
    score_tile(tiles[t], t, queries);
  }
  const TileFields at(shape.head_dim);
  const int pairs = (queries.blocks + 1) / 2;
  const Mix mix{scratch.take<uint8_t>(size_t(queries.num_tiles) * kMixRows * pairs * 64),
                scratch.take<int32_t>(queries.num_tiles + 1), 0, 1, pairs};
  int32_t* tops = scratch.take<int32_t>(queries.num_tiles);
  largest_exponents(tiles, at, (queries.most + kTile - 1) / kTile, tops);
  int row = 0;
  for (; row + kMixRows <= rows; row += kMixRows)
    finish_rows<kMixRows>(shape, tiles, queries, row, tops, mix, out, clipped);
  for (; row < rows; ++row) finish_rows<1>(shape, tiles, queries, row, tops, mix, out, clipped);
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
