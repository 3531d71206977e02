// Runs a program: the flat list of operations that src/headrace/kernels/program.py describes.
//
// All memory is taken when the runner is made, from one block. A run is a job of the pool: an operation is a stage, its units
// are ranges of rows, blocks of a projection or heads. With a single row the vector that a projection reads is
// made by each thread that takes part in it, which costs less than a stage of its own.
#pragma once

#include <memory>
#include <vector>

#include "adapt.h"
#include "experts.h"
#include "ops.h"
#include "parallel_for.h"
#include "pool.h"
#include "workspace.h"

namespace headrace {

constexpr int kPageTiles = 4;  // tiles of a KV page, for every layer and kv head
constexpr int kPageTokens = kPageTiles * kTile;

enum class Kind {
  kEmbed, kNorm, kProject, kHeadNorm, kLand, kAttend, kQuantize, kSiluMul, kSelect, kRoute,
  kAdaptDown, kAdaptUp, kGather, kExpertGateUp, kExpertSilu, kExpertDown, kMix, kAddShared
};
constexpr int kExpertStages = 5;  // kGather to kMix

struct Operation {
  Kind kind;
  PackedWeight weight{};
  NormGain gain{};
  const int32_t* bias = nullptr;
  BufferId target = kX;
  bool residual = false;
  int first = 0, count = 0, width = 1;  // HeadNorm: its first head, norms, and heads of each
  int silu_rows = 0;                    // SiluMul: rows of gate, and where up starts
  int layer = 0;
  RouterRows router{};
  bool normalise = false, gate = false;  // Route
  int ahead_layer = -1;                  // Route: the layer that it can guess for, with its gain and router
  NormGain ahead_gain{};
  RouterRows ahead_router{};
  ExpertLayout layout{};
  int producer = -1;   // Project: the operation before it, when that makes this projection's vectors alone
  bool alone = false;  // Norm, Quantize, SiluMul: the other end of that
};

struct Tables {
  RopeTables rope;
  const int32_t* sigmoid;
  Exp2 exp2;
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
  const int32_t* adapters = nullptr;  // of each sequence, -1 for none; null where none has one
};

class Runner : private Job {
 public:
  // memory: workspace_bytes(size) of it at a 64-byte boundary, which outlives the runner; null: the runner's own.
  Runner(const Tier& tier, const WorkspaceSize& size, const Tables& tables, uint8_t* memory);
  ~Runner() override;

  void add(const Operation& op);
  // Adds the stages of the experts of a layer.
  void add_experts(int layer, const ExpertLayout& layout);
  // Returns the operation before which it stopped: `end`, or the one after a Route that chose an expert without a slot.
  // hook: computes blocks of projections of a runner of one thread, as in set_parallel_for; null: nobody does. Where it
  // fails, the pass has ended with its counts as they were before this run, and -1 is returned.
  int run(int begin, int end, const Batch& batch, ParallelFor* hook);
  // Some of the experts of the layer whose stages begin at `begin`; the sum of all is added with the last part.
  void run_part(int begin, const int32_t* experts, const int32_t* slots, int count, bool last);
  // Gives the last operation, a Route, the router of a later layer to guess with.
  void set_ahead(int layer, const NormGain& gain, const RouterRows& router);
  void set_lookahead(bool on) { lookahead_ = on; }
  void set_watched(bool on) { watched_ = on; }  // runs stop after every Route
  // Into how many blocks a hook's projections are cut at most: the one into LOGITS and, with `matvec`, those of one row.
  void set_parallel_for(int max_tasks, bool matvec) { max_tasks_ = max_tasks, matvec_ = matvec; }
  Mixture* mixture() { return mixture_.get(); }
  // Adds the stages of the adapters of the projection before.
  void add_adapt(BufferId target);
  Adapters& adapters() { return adapters_; }
  const Adapters& adapters() const { return adapters_; }
  // The weight whose results the stages of adapters at `op` add to; null for another operation.
  const PackedWeight* adapted(int op) const;

  // Makes i32[rows, hidden] the X of a new pass: runs may follow that begin where nothing but X is needed.
  void put(const int32_t* x, int rows);
  int pass_rows() const { return pass_rows_; }  // 0 before the first pass
  bool broken() const { return broken_; }       // the pass has ended where a hook failed: it is to begin again

  const int32_t* residual() const { return space_.buffers[kX].data(); }
  const int32_t* logits() const { return space_.buffers[kLogits].data(); }
  int num_ops() const { return int(ops_.size()); }
  int64_t clipped(int site) const;           // since the runner was made
  int64_t clipped(int row, int site) const;  // of a row of the pass, whatever Select has left of it

 private:
  using Thread = ThreadSpace;
  struct Blocks;  // of a projection, for a hook
  struct Split {  // of a projection: blocks of rows and of tiles
    int rows, tiles, row_blocks, tile_blocks;
  };

  void begin_pass(int rows);
  int64_t* clips(Thread& t, int row, Site site);
  int units(int stage) override;
  int after(int stage) override;
  void run(int stage, int unit, int thread) override;

  int rows_a_unit() const;
  void for_rows(int unit, Thread& t, void (Runner::*step)(const Operation&, Thread&, int), const Operation& op);
  void produce_row(const Operation& op, Thread& t, int row);
  void produce(const Operation& op, Thread& t, int row, const Activations& out, int index);
  void embed(const Operation& op, Thread& t, int row);
  void head_norm(const Operation& op, Thread& t, int row);
  void land(const Operation& op, Thread& t, int row);
  void silu_mul(const Operation& op, Thread& t, int row, const Activations& out, int index);
  void route(const Operation& op, Thread& t, int row);
  void mix(const Operation& op, Thread& t, int row);
  void add_shared(const Operation& op, Thread& t, int row);
  void project_experts(const Operation& op, int unit, Thread& t);
  bool guesses(const Operation& op) const { return lookahead_ && op.ahead_layer >= 0 && rows_ <= kForecastRows; }
  int expert_units(const Operation& op);
  void select();

  void adapt(const Operation& op, int stage, int unit, int thread);

  Split split(const Operation& op) const;
  Activations vectors(const Operation& op, int stage, Thread& t);
  void project(const Operation& op, int stage, int unit, Thread& t);
  void project_rows(const Operation& op, const Activations& x, int first_row, int end_row, int first_tile, int end_tile,
                    int64_t* clipped);
  bool hooked(const Operation& op) const;
  void project_by_hook(const Operation& op, int stage, Thread& t);

  void make_row_blocks();
  int whole_groups() const;
  int attend_units() const;
  void attend(const Operation& op, int unit, Thread& t);
  void attend_heads(const Operation& op, Thread& t, const RowBlock& block, int kv, int first_head, int num_heads);
  uint8_t* tile(int row, int layer, int head, int position) const;

  Activations activations(int k);
  int32_t* row_of(BufferId buffer, int row) { return space_.buffers[buffer].data() + ptrdiff_t(row) * shape_.width(buffer); }
  int heads_a_group() const { return shape_.num_heads / shape_.num_kv_heads; }

  const Tier& tier_;
  const ModelShape shape_;
  const Tables tables_;
  std::vector<Operation> ops_;
  int last_producer_ = -1;
  std::vector<uint8_t> own_;  // memory, where none was given
  Workspace space_;

  Adapters adapters_;
  std::unique_ptr<Mixture> mixture_;
  bool lookahead_ = false, watched_ = false;

  // Of the current run.
  Batch batch_{};
  int pass_rows_ = 0;
  int rows_ = 0;  // fewer after a Select
  int64_t clipped_before_[kNumSites] = {0};  // by the passes before
  int64_t run_ = 0;
  int stopped_ = 0;
  bool next_group_ = false;  // the stages of experts are gone through once more
  bool part_ = false;  // the experts to compute were given, not taken from the table
  ParallelFor* hook_ = nullptr;
  int max_tasks_ = 0;
  bool matvec_ = false, hook_failed_ = false;
  bool broken_ = false;  // the pass ended where a hook failed

  Pool pool_;  // last: its threads use the rest
};

}  // namespace headrace
