#include "workspace.h"

#include <algorithm>

namespace headrace {
namespace {

constexpr size_t kPast = 64;  // elements that kernels may read past the end of vectors

// Of the vectors that a projection may read.
int widest(const ModelShape& s) { return std::max(s.hidden, std::max(s.q_size(), s.ffn_width)); }

// Scratch of one attention call: one token's heads and all keys, or more queries within the budget of scores.
size_t attention_bytes(const ModelShape& shape, int max_positions) {
  const int heads = std::min(kMaxQueries, shape.num_heads / shape.num_kv_heads);
  return attend_scratch_bytes(heads, max_positions, shape.head_dim) +
         attend_scratch_bytes(kMaxQueries, 2 * kTile, shape.head_dim) + kScoreBudget * sizeof(int32_t);
}

}  // namespace

ThreadSpace::ThreadSpace(Arena& arena, const WorkspaceSize& size) {
  const ModelShape& s = size.shape;
  const int vector = widest(s);
  clipped = arena.take<int64_t>(size_t(size.capacity) * kNumSites);
  wide = arena.take<int64_t>(size_t(std::max(std::max(vector, s.expert_width), s.head_dim)));
  padded = arena.take<int32_t>(size_t(std::max(s.ffn_width, s.expert_width)) * 2);
  logits = arena.take<int32_t>(size_t(s.num_experts) + 1);
  turn = arena.take<int32_t>(size_t(s.head_dim));
  tiles = arena.take<const uint8_t*>(size_t(size.max_positions + kTile - 1) / kTile + 1);
  scratch = arena.take<uint8_t>(attention_bytes(s, size.max_positions));
  codes = arena.take<int8_t>(size_t(vector) + kPast);
  for (Array<int16_t>* words : {&scales, &sums, &rounded}) *words = arena.take<int16_t>(size_t(vector / kBlock) + kPast);
}

Workspace::Workspace(Arena& arena, const WorkspaceSize& size)
    : row_blocks(arena.take<RowBlock>(size_t(size.capacity))) {
  const ModelShape& s = size.shape;
  const size_t capacity = size_t(size.capacity), vector = size_t(widest(s));
  for (int i = 0; i < kNumBuffers; ++i) {
    if (i == kShared && s.top_k == 0) continue;
    buffers[i] = arena.take<int32_t>(size_t(s.width(i)) * (i == kLogits ? size_t(size.logit_capacity) : capacity));
  }
  codes = arena.take<int8_t>(vector * capacity + kPast);
  for (Array<int16_t>* words : {&scales, &sums, &rounded})
    *words = arena.take<int16_t>(vector / kBlock * capacity + kPast);
  exponents = arena.take<int32_t>(capacity);
  origins = arena.take<int32_t>(capacity);
  clipped_before = arena.take<int64_t>(capacity * kNumSites);
  if (s.top_k > 0) {
    const MixtureShape shape{s.hidden, s.num_experts, s.top_k, s.expert_rows, s.expert_width, s.fraction_bits};
    mixture = std::make_unique<MixtureSpace>(arena, shape, size.num_threads, size.capacity, size.max_pairs);
  }
  for (int i = 0; i < size.num_threads; ++i) threads.push_back(std::make_unique<ThreadSpace>(arena, size));
}

size_t workspace_bytes(const WorkspaceSize& size) {
  Arena arena(nullptr);
  Workspace measured(arena, size);
  return arena.used();
}

}  // namespace headrace
