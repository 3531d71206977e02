// The memory of a runner: every buffer whose size depends on the model, on the rows of a pass or on the context.
#pragma once

#include <memory>
#include <vector>

#include "arena.h"
#include "experts.h"
#include "ops.h"

namespace headrace {

enum BufferId { kX, kQkv, kMixed, kGateUp, kLogits, kShared, kNumBuffers };
enum Site { kSiteEmbed, kSiteProject, kSiteResidual, kSiteHeadNorm, kSiteRopeQ, kSiteRopeK, kSiteAttention,
            kSiteRouter, kSiteExperts, kSiteShared, kSiteAdapter, kNumSites };

constexpr int kMaxQueries = 24;          // query heads of one attention call
constexpr int kScoreBudget = 64 * 1024;  // their scores, so that these stay in a core's cache

struct ModelShape {
  int hidden, num_layers, num_heads, num_kv_heads, head_dim, ffn_rows, ffn_width, vocab, fraction_bits;
  int num_experts, top_k, expert_rows, expert_width;  // 0 where no layer has experts
  int q_size() const { return num_heads * head_dim; }
  int qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  int width(int buffer) const {
    const int widths[kNumBuffers] = {hidden, qkv_size(), q_size(), 2 * ffn_rows, vocab, hidden};
    return widths[buffer];
  }
};

// max_pairs: (row, expert) pairs of a layer that are held at once; any number gives the same bits.
struct WorkspaceSize {
  ModelShape shape;
  int num_threads, max_positions, capacity, logit_capacity, max_pairs;
};

// What one thread computes in.
struct ThreadSpace {
  ThreadSpace(Arena& arena, const WorkspaceSize& size);
  Activations own(int k) { return {codes.data(), scales.data(), sums.data(), rounded.data(), &exponent, k}; }

  Array<int64_t> clipped;  // [rows of the pass][sites]
  Array<int64_t> wide;
  Array<int32_t> padded, logits, turn;
  Array<const uint8_t*> tiles;
  Array<uint8_t> scratch;
  // The vector of a single row, and the run and operation that it was made for.
  Array<int8_t> codes;
  Array<int16_t> scales, sums, rounded;
  int32_t exponent = 0;
  int64_t made_run = -1;
  int made_stage = -1;
};

// Rows of one sequence that attend together.
struct RowBlock {
  int first, count;
};

struct Workspace {
  // From an arena with memory, or from one that measures: then nothing of it may be used but the arena's count.
  Workspace(Arena& arena, const WorkspaceSize& size);

  Array<int32_t> buffers[kNumBuffers];
  Array<int8_t> codes;
  Array<int16_t> scales, sums, rounded;
  Array<int32_t> exponents;
  Array<int32_t> origins;         // [capacity]: the row of the batch that a row is
  Array<int64_t> clipped_before;  // [capacity][sites]: of the first thread, when a run with a hook began
  List<RowBlock> row_blocks;
  std::unique_ptr<MixtureSpace> mixture;
  std::vector<std::unique_ptr<ThreadSpace>> threads;
};

size_t workspace_bytes(const WorkspaceSize& size);

}  // namespace headrace
