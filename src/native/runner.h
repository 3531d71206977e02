// Runs a program: the flat list of operations that src/headrace/kernels/program.py describes.
//
// All memory is allocated when the runner is made. A run walks [begin, end) on every thread of the pool;
// threads share out rows, tiles or heads and meet after each operation.
#pragma once

#include <memory>
#include <vector>

#include "ops.h"
#include "pool.h"

namespace headrace {

enum class Kind { kEmbed, kNorm, kProject, kHeadNorm, kLand, kAttend, kQuantize, kSiluMul, kSelect };
enum BufferId { kX, kQkv, kMixed, kGateUp, kLogits, kNumBuffers };
enum Site { kSiteEmbed, kSiteProject, kSiteResidual, kSiteHeadNorm, kSiteRopeQ, kSiteRopeK, kSiteAttention, kNumSites };

struct Operation {
  Kind kind;
  PackedWeight weight{};
  NormGain gain{};
  const int32_t* bias = nullptr;
  BufferId target = kX;
  bool residual = false;
  int first = 0, count = 0;  // heads of a HeadNorm
  int layer = 0;
};

struct ModelShape {
  int hidden, num_layers, num_heads, num_kv_heads, head_dim, ffn_rows, ffn_width, vocab, fraction_bits;
  int q_size() const { return num_heads * head_dim; }
  int qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

struct Tables {
  RopeTables rope;
  const int32_t* sigmoid;
  int max_positions;
  int32_t attention_mantissa, attention_exponent;
};

struct Batch {
  int rows;
  const int32_t* tokens;
  const int32_t* positions;
  const int32_t* sequences;
  const int32_t* const* page_tables;
  int num_logit_rows;
  const int32_t* logit_rows;
  uint8_t* cache;
};

class Runner {
 public:
  Runner(const Tier& tier, int num_threads, const ModelShape& shape, const Tables& tables, int capacity,
         int logit_capacity);

  ~Runner();

  void add(const Operation& op);
  void run(int begin, int end, const Batch& batch);

  const int32_t* logits() const { return buffers_[kLogits].data(); }
  int num_ops() const { return int(ops_.size()); }
  int64_t clipped(int site) const;

 private:
  struct Thread;

  void walk(int begin, int end, const Batch& batch, int index);
  void step(const Operation& op, int op_index, const Batch& batch, Thread& t, int index, int rows);
  void embed(const Operation& op, const Batch& batch, Thread& t, int row);
  void project(const Operation& op, int op_index, Thread& t, int index, int rows);
  void head_norm(const Operation& op, Thread& t, int row);
  void land(const Operation& op, const Batch& batch, Thread& t, int row);
  void attend(const Operation& op, const Batch& batch, Thread& t, int index, int rows);
  void attend_heads(const Operation& op, const Batch& batch, Thread& t, int row, int first_head, int num_heads);
  void silu_mul(Thread& t, int row);
  void select(const Batch& batch);
  uint8_t* tile(const Batch& batch, int row, int layer, int head, int position) const;
  Activations activations(int k);
  int32_t* row_of(BufferId buffer, int row) { return buffers_[buffer].data() + ptrdiff_t(row) * widths_[buffer]; }

  const Tier& tier_;
  const ModelShape shape_;
  const Tables tables_;
  const int capacity_;
  std::vector<Operation> ops_;
  std::vector<int32_t> buffers_[kNumBuffers];
  int widths_[kNumBuffers];
  std::vector<int8_t> codes_;
  std::vector<int16_t> scales_, sums_, rounded_;
  std::vector<int32_t> exponents_, turns_;
  int width_ = 0;        // of the activations that the last producer wrote
  int active_rows_ = 0;  // rows from here on: fewer after a Select
  std::unique_ptr<std::atomic<int>[]> next_unit_;
  std::vector<std::unique_ptr<Thread>> threads_;
  Pool pool_;
};

}  // namespace headrace
