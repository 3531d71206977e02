// The stage of attention: which rows attend together, and where their keys and values lie.
#include <algorithm>

#include "runner.h"

namespace headrace {

uint8_t* Runner::tile(int row, int layer, int head, int position) const {
  const size_t tile_bytes = kv_tile_bytes(shape_.head_dim);
  const size_t page_bytes = size_t(shape_.num_layers) * shape_.num_kv_heads * kPageTiles * tile_bytes;
  const int32_t page = batch_.page_tables[batch_.sequences[row]][position / kPageTokens];
  const size_t slot = size_t(layer * shape_.num_kv_heads + head) * kPageTiles + position % kPageTokens / kTile;
  return batch_.cache + page * page_bytes + slot * tile_bytes;
}

// Rows of one sequence that attend together, as many as the limits on queries and scores allow.
void Runner::make_row_blocks() {
  space_.row_blocks.clear();
  const int most = std::max(1, kMaxQueries / heads_a_group());
  for (int row = 0; row < batch_.rows; ++row) {
    if (!space_.row_blocks.empty()) {
      RowBlock& last = space_.row_blocks.back();
      const int64_t scores = int64_t(last.count + 1) * heads_a_group() * (batch_.positions[row] + kTile);
      if (batch_.sequences[row] == batch_.sequences[last.first] && last.count < most && scores <= kScoreBudget) {
        ++last.count;
        continue;
      }
    }
    space_.row_blocks.push_back({row, 1});
  }
}

// The groups (a block of rows and a kv head) that are taken whole; the heads of the rest are units of their own,
// so that few groups still keep every thread busy.
int Runner::whole_groups() const {
  const int groups = int(space_.row_blocks.size()) * shape_.num_kv_heads, n = pool_.size();
  return groups >= 8 * n ? groups : groups / n * n;
}

int Runner::attend_units() const {
  const int groups = int(space_.row_blocks.size()) * shape_.num_kv_heads, whole = whole_groups();
  return whole + (groups - whole) * heads_a_group();
}

void Runner::attend(const Operation& op, int unit, Thread& t) {
  const int whole = whole_groups(), shared = heads_a_group();
  const int group = unit < whole ? unit : whole + (unit - whole) / shared;
  const RowBlock& block = space_.row_blocks[space_.row_blocks.size() - 1 - group / shape_.num_kv_heads];  // the longest first
  const int kv = group % shape_.num_kv_heads, head = kv * shared;
  if (unit < whole) return attend_heads(op, t, block, kv, head, shared);
  attend_heads(op, t, block, kv, head + (unit - whole) % shared, 1);
}

void Runner::attend_heads(const Operation& op, Thread& t, const RowBlock& block, int kv, int first_head, int num_heads) {
  const int d = shape_.head_dim, last = block.first + block.count - 1;
  for (int at = 0; at <= batch_.positions[last]; at += kTile) t.tiles[at / kTile] = tile(last, op.layer, kv, at);
  const AttentionShape attention{d, tables_.attention_mantissa, tables_.attention_exponent, shape_.fraction_bits};
  const int32_t* q[kMaxQueries];
  int32_t* out[kMaxQueries];
  int32_t visible[kMaxQueries];
  int rows[kMaxQueries], count = 0;
  for (int row = block.first; row <= last; ++row) {
    for (int head = first_head; head < first_head + num_heads; ++head) {
      q[count] = row_of(kQkv, row) + ptrdiff_t(head) * d;
      out[count] = row_of(kMixed, row) + ptrdiff_t(head) * d;
      rows[count] = row;
      visible[count++] = batch_.positions[row] + 1;
      if (count < kMaxQueries && !(row == last && head == first_head + num_heads - 1)) continue;
      int64_t clipped[kMaxQueries] = {0};
      tier_.attend(attention, t.tiles.data(), q, visible, count, out, t.scratch.data(), clipped);
      for (int i = 0; i < count; ++i) *clips(t, rows[i], kSiteAttention) += clipped[i];
      count = 0;
    }
  }
}

}  // namespace headrace
