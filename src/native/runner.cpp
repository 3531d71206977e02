#include "runner.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace headrace {

namespace {

constexpr int kProjectRows = 96;              // rows that a projection's unit takes, a multiple of 12 and of 16
constexpr size_t kProjectBytes = 512 * 1024;  // weights of a unit, so that they stay in a core's cache

int divide_up(int a, int b) { return (a + b - 1) / b; }

// Everything in memory that is zero, so that nothing depends on what was in it.
Workspace prepared(uint8_t* memory, std::vector<uint8_t>& own, const WorkspaceSize& size) {
  if (memory == nullptr) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(own.data());
    memory = reinterpret_cast<uint8_t*>((at + kAlignment - 1) / kAlignment * kAlignment);
  } else {
    std::memset(memory, 0, workspace_bytes(size));
  }
  Arena arena(memory);
  return Workspace(arena, size);
}

bool makes_vectors(Kind kind) { return kind == Kind::kNorm || kind == Kind::kQuantize || kind == Kind::kSiluMul; }

}  // namespace

Runner::Runner(const Tier& tier, const WorkspaceSize& size, const Tables& tables, uint8_t* memory)
    : tier_(tier),
      shape_(size.shape),
      tables_(tables),
      own_(memory == nullptr ? workspace_bytes(size) + kAlignment : 0),
      space_(prepared(memory, own_, size)),
      adapters_(tier, size.num_threads, size.capacity),
      pool_(size.num_threads, *this) {
  if (space_.mixture != nullptr) {
    const MixtureShape mixture{shape_.hidden,      shape_.num_experts,  shape_.top_k,
                               shape_.expert_rows, shape_.expert_width, shape_.fraction_bits};
    mixture_ = std::make_unique<Mixture>(tier, mixture, tables.exp2, tables.sigmoid, size.num_threads, *space_.mixture);
  }
}

Runner::~Runner() = default;

void Runner::add(const Operation& given) {
  Operation op = given;
  const int index = num_ops();
  if (makes_vectors(op.kind)) last_producer_ = index;
  if (op.kind == Kind::kProject && last_producer_ >= 0) {
    Operation& producer = ops_[last_producer_];
    // Threads that each make the vector from X could find another's part of the product there.
    const bool overwrites = producer.kind == Kind::kNorm && op.target == kX;
    producer.alone = last_producer_ == index - 1 && !overwrites;
    if (producer.alone) op.producer = last_producer_;
    else for (Operation& other : ops_) other.producer = other.producer == last_producer_ ? -1 : other.producer;
  }
  ops_.push_back(op);
}

int64_t Runner::clipped(int site) const {
  int64_t sum = clipped_before_[site];
  for (int row = 0; row < pass_rows_; ++row) sum += clipped(row, site);
  return sum;
}

int64_t Runner::clipped(int row, int site) const {
  int64_t sum = 0;
  for (const auto& thread : space_.threads) sum += thread->clipped[size_t(row) * kNumSites + site];
  return sum;
}

int64_t* Runner::clips(Thread& t, int row, Site site) {
  return t.clipped.data() + size_t(space_.origins[size_t(row)]) * kNumSites + site;
}

void Runner::begin_pass(int rows) {
  for (int site = 0; site < kNumSites; ++site) clipped_before_[site] = clipped(site);
  for (auto& thread : space_.threads) std::fill_n(thread->clipped.begin(), size_t(pass_rows_) * kNumSites, 0);
  std::iota(space_.origins.begin(), space_.origins.begin() + rows, 0);
  rows_ = pass_rows_ = rows;
  broken_ = false;
  if (mixture_) mixture_->begin();
}

void Runner::put(const int32_t* x, int rows) {
  begin_pass(rows);
  std::memmove(row_of(kX, 0), x, size_t(rows) * shape_.hidden * sizeof(int32_t));  // may be what `residual` gave
}

Activations Runner::activations(int k) {
  return {space_.codes.data(), space_.scales.data(), space_.sums.data(), space_.rounded.data(), space_.exponents.data(), k};
}

void Runner::add_experts(int layer, const ExpertLayout& layout) {
  for (int stage = 0; stage < kExpertStages; ++stage) {
    Operation op{Kind(int(Kind::kGather) + stage)};
    op.layer = layer;
    op.layout = layout;
    add(op);
  }
}

void Runner::add_adapt(BufferId target) {
  Operation op{Kind::kAdaptDown};
  op.weight = ops_.back().weight;
  op.producer = ops_.back().producer;
  op.target = target;
  add(op);
  op.kind = Kind::kAdaptUp;
  add(op);
}

const PackedWeight* Runner::adapted(int op) const {
  return op >= 0 && op < num_ops() && ops_[op].kind == Kind::kAdaptDown ? &ops_[op].weight : nullptr;
}

void Runner::set_ahead(int layer, const NormGain& gain, const RouterRows& router) {
  ops_.back().ahead_layer = layer;
  ops_.back().ahead_gain = gain;
  ops_.back().ahead_router = router;
}

int Runner::run(int begin, int end, const Batch& batch, ParallelFor* hook) {
  batch_ = batch;
  hook_ = max_tasks_ > 1 && pool_.size() == 1 ? hook : nullptr;
  hook_failed_ = false;
  ++run_;
  stopped_ = end;
  part_ = false;
  if (begin == 0) begin_pass(batch.rows);
  const size_t counts = size_t(pass_rows_) * kNumSites;
  if (hook_ != nullptr) std::copy_n(space_.threads[0]->clipped.begin(), counts, space_.clipped_before.begin());
  make_row_blocks();
  adapters_.begin(batch);
  pool_.run(begin, end);
  if (!hook_failed_) return stopped_;
  std::copy_n(space_.clipped_before.begin(), counts, space_.threads[0]->clipped.begin());
  broken_ = true;
  return -1;
}

void Runner::run_part(int begin, const int32_t* experts, const int32_t* slots, int count, bool last) {
  part_ = true;
  mixture_->take(ops_[begin].layer, experts, slots, count, last);
  pool_.run(begin, begin + kExpertStages);
}

int Runner::after(int stage) {
  const Operation& op = ops_[stage];
  if (hook_failed_) return num_ops();
  if (op.kind == Kind::kMix && mixture_->more_groups()) {
    next_group_ = true;
    return stage + 1 - kExpertStages;
  }
  if (op.kind != Kind::kRoute) return stage + 1;
  if (mixture_->group(op.layer, rows_, guesses(op) ? op.ahead_layer : -1) && !watched_) return stage + 1;
  stopped_ = stage + 1;
  return num_ops();
}

int Runner::rows_a_unit() const { return std::clamp(rows_ / (4 * pool_.size()), 1, 16); }

int Runner::units(int stage) {
  const Operation& op = ops_[stage];
  if (rows_ == 0) return 0;
  switch (op.kind) {
    case Kind::kSelect: return 1;
    case Kind::kAttend: return attend_units();
    case Kind::kAdaptDown: return adapters_.active() ? adapters_.down_units(stage) : 0;
    case Kind::kAdaptUp: return adapters_.active() ? adapters_.up_units(stage - 1) : 0;
    case Kind::kProject: {
      if (hooked(op)) return 1;
      const Split by = split(op);
      return by.row_blocks * by.tile_blocks;
    }
    case Kind::kGather:
    case Kind::kExpertGateUp:
    case Kind::kExpertSilu:
    case Kind::kExpertDown:
    case Kind::kMix: return expert_units(op);
    default: return op.alone && rows_ == 1 ? 0 : divide_up(rows_, rows_a_unit());
  }
}

void Runner::run(int stage, int unit, int thread) {
  const Operation& op = ops_[stage];
  Thread& t = *space_.threads[thread];
  switch (op.kind) {
    case Kind::kEmbed: return for_rows(unit, t, &Runner::embed, op);
    case Kind::kHeadNorm: return for_rows(unit, t, &Runner::head_norm, op);
    case Kind::kLand: return for_rows(unit, t, &Runner::land, op);
    case Kind::kProject: return project(op, stage, unit, t);
    case Kind::kAttend: return attend(op, unit, t);
    case Kind::kAdaptDown:
    case Kind::kAdaptUp: return adapt(op, stage, unit, thread);
    case Kind::kSelect: return select();
    case Kind::kRoute: return for_rows(unit, t, &Runner::route, op);
    case Kind::kGather: return mixture_->gather(unit, activations(shape_.hidden));
    case Kind::kExpertGateUp: return project_experts(op, unit, t);
    case Kind::kExpertSilu:
      return mixture_->silu(unit, t.wide.data(), t.padded.data());
    case Kind::kExpertDown: return project_experts(op, unit, t);
    case Kind::kMix: return for_rows(unit, t, &Runner::mix, op);
    case Kind::kAddShared: return for_rows(unit, t, &Runner::add_shared, op);
    default: return for_rows(unit, t, &Runner::produce_row, op);
  }
}

// ---- rows ----------------------------------------------------------------------------------------------

void Runner::for_rows(int unit, Thread& t, void (Runner::*step)(const Operation&, Thread&, int), const Operation& op) {
  const int count = rows_a_unit(), end = std::min(rows_, (unit + 1) * count);
  for (int row = unit * count; row < end; ++row) (this->*step)(op, t, row);
}

void Runner::produce_row(const Operation& op, Thread& t, int row) {
  const int silu_width = divide_up(op.silu_rows, kBlock) * kBlock;
  const int k = op.kind == Kind::kNorm ? shape_.hidden : op.kind == Kind::kQuantize ? shape_.q_size() : silu_width;
  produce(op, t, row, activations(k), row);
}

// Vector `index` of `out` from row `row` of what the operation reads.
void Runner::produce(const Operation& op, Thread& t, int row, const Activations& out, int index) {
  const int f = shape_.fraction_bits;
  if (op.kind == Kind::kNorm) {
    tier_.norm_quantize(row_of(kX, row), op.gain, f, out, index, reinterpret_cast<int32_t*>(t.wide.data()));
  } else if (op.kind == Kind::kQuantize) {
    tier_.quantize_i32(row_of(kMixed, row), -f, out, index);
  } else {
    silu_mul(op, t, row, out, index);
  }
}

void Runner::embed(const Operation& op, Thread& t, int row) {
  tier_.embed(op.weight, batch_.tokens[row], shape_.fraction_bits, row_of(kX, row), clips(t, row, kSiteEmbed));
}

void Runner::head_norm(const Operation& op, Thread& t, int row) {
  const int size = op.width * shape_.head_dim;
  int32_t* first = row_of(kQkv, row) + ptrdiff_t(op.first) * shape_.head_dim;
  for (int i = 0; i < op.count; ++i) {
    tier_.norm_rescale(first + ptrdiff_t(i) * size, size, op.gain, shape_.fraction_bits, clips(t, row, kSiteHeadNorm));
  }
}

void Runner::land(const Operation& op, Thread& t, int row) {
  const int d = shape_.head_dim, position = batch_.positions[row];
  tier_.rotary(tables_.rope, d, position, t.turn.data());
  int32_t* heads = row_of(kQkv, row);
  for (int h = 0; h < shape_.num_heads + shape_.num_kv_heads; ++h) {
    tier_.rope(heads + ptrdiff_t(h) * d, d, t.turn.data(), clips(t, row, h < shape_.num_heads ? kSiteRopeQ : kSiteRopeK));
  }
  const int32_t* keys = heads + shape_.q_size();
  const int32_t* values = keys + ptrdiff_t(shape_.num_kv_heads) * d;
  for (int h = 0; h < shape_.num_kv_heads; ++h) {
    tier_.land(tile(row, op.layer, h, position), position % kTile, keys + ptrdiff_t(h) * d, values + ptrdiff_t(h) * d, d,
               shape_.fraction_bits);
  }
}

void Runner::silu_mul(const Operation& op, Thread& t, int row, const Activations& out, int index) {
  const int32_t* gate = row_of(kGateUp, row);
  const int32_t* up = gate + op.silu_rows;
  if (op.silu_rows != out.k) {  // pad both halves to whole blocks
    int32_t* wide = t.padded.data();
    std::fill(wide, wide + 2 * out.k, 0);
    std::copy(gate, gate + op.silu_rows, wide);
    std::copy(up, up + op.silu_rows, wide + out.k);
    gate = wide;
    up = wide + out.k;
  }
  tier_.silu_mul_quantize(gate, up, tables_.sigmoid, shape_.fraction_bits, out, index, t.wide.data());
}

// ---- experts -------------------------------------------------------------------------------------------

void Runner::route(const Operation& op, Thread& t, int row) {
  tier_.route(row_of(kX, row), op.gain, shape_.fraction_bits, op.router, t.logits.data(),
              reinterpret_cast<int32_t*>(t.wide.data()), clips(t, row, kSiteRouter));
  mixture_->choose(op.layer, row, t.logits.data(), op.normalise, op.gate);
  if (!guesses(op)) return;
  int64_t ignored = 0;
  tier_.route(row_of(kX, row), op.ahead_gain, shape_.fraction_bits, op.ahead_router, t.logits.data(),
              reinterpret_cast<int32_t*>(t.wide.data()), &ignored);
  mixture_->guess(row, t.logits.data());
}

int Runner::expert_units(const Operation& op) {
  switch (op.kind) {
    case Kind::kGather:
      if (!part_ && !next_group_) mixture_->take_all(op.layer);
      next_group_ = false;
      mixture_->open_group();
      return mixture_->gather_units();
    case Kind::kExpertGateUp: return mixture_->open_projection(op.layout.gate_up);
    case Kind::kExpertSilu: return mixture_->silu_units();
    case Kind::kExpertDown: return mixture_->open_projection(op.layout.down);
    default: return mixture_->mixes() ? divide_up(rows_, rows_a_unit()) : 0;
  }
}

void Runner::project_experts(const Operation& op, int unit, Thread& t) {
  int64_t clipped[kUnitRows];
  const int rows = mixture_->unit_rows(unit);
  std::fill_n(clipped, rows, 0);
  if (op.kind == Kind::kExpertGateUp) {
    mixture_->gate_up(unit, op.layout, activations(shape_.hidden), clipped);
  } else {
    mixture_->down(unit, op.layout, clipped);
  }
  for (int i = 0; i < rows; ++i) *clips(t, mixture_->row_of(unit, i), kSiteProject) += clipped[i];
}

void Runner::mix(const Operation&, Thread& t, int row) {
  mixture_->mix(row_of(kX, row), row, clips(t, row, kSiteExperts));
}

void Runner::add_shared(const Operation&, Thread& t, int row) {
  tier_.add_shared(row_of(kX, row), row_of(kShared, row), mixture_->gate(row), tables_.sigmoid, shape_.fraction_bits,
                   shape_.hidden, clips(t, row, kSiteShared));
}

// logit_rows rise, so a row is never overwritten before it is copied.
void Runner::select() {
  for (int i = 0; i < batch_.num_logit_rows; ++i) {
    std::memmove(row_of(kX, i), row_of(kX, batch_.logit_rows[i]), size_t(shape_.hidden) * 4);
    space_.origins[size_t(i)] = space_.origins[size_t(batch_.logit_rows[i])];
  }
  rows_ = batch_.num_logit_rows;
}

// ---- projections ---------------------------------------------------------------------------------------

// Many rows: blocks of rows against blocks of tiles that fit a core's cache. Few rows: blocks of tiles, four a
// thread, each one stream of weights.
Runner::Split Runner::split(const Operation& op) const {
  const int tiles = divide_up(op.weight.n, kTile), n = pool_.size();
  const size_t bytes = size_t(tiles) * kTile * op.weight.k / 8 * op.weight.bits;
  const int row_blocks = divide_up(rows_, kProjectRows);
  int wanted = n == 1 ? 1 : divide_up(4 * n, row_blocks);
  if (row_blocks > 1) wanted = std::max(wanted, int((bytes + kProjectBytes - 1) / kProjectBytes));
  const int a_block = divide_up(tiles, std::min(wanted, tiles));
  return {kProjectRows, a_block, row_blocks, divide_up(tiles, a_block)};
}

// What a projection reads. Of a single row each thread makes it for itself.
Activations Runner::vectors(const Operation& op, int stage, Thread& t) {
  if (rows_ != 1 || op.producer < 0) return activations(op.weight.k);
  const Activations x = t.own(op.weight.k);
  if (t.made_run != run_ || t.made_stage != stage) produce(ops_[op.producer], t, 0, x, 0);
  t.made_run = run_;
  t.made_stage = stage;
  return x;
}

// One unit of what adapters add. They read what the projection at the stage before read: the thread may have it still.
void Runner::adapt(const Operation& op, int stage, int unit, int thread) {
  Thread& t = *space_.threads[thread];
  int64_t clipped[Adapters::kRows] = {0};
  if (op.kind == Kind::kAdaptDown) {
    adapters_.down(unit, vectors(op, stage - 1, t), clipped);
  } else {
    const Target target{space_.buffers[op.target].data(), shape_.width(op.target), shape_.fraction_bits};
    adapters_.up(unit, thread, target, clipped);
  }
  const Adapters::Rows rows = adapters_.rows_of(unit);
  for (int i = 0; i < rows.count; ++i) *clips(t, rows.first + i, kSiteAdapter) += clipped[i];
}

// clipped: of each row.
void Runner::project_rows(const Operation& op, const Activations& x, int first_row, int end_row, int first_tile,
                          int end_tile, int64_t* clipped) {
  std::fill_n(clipped, end_row - first_row, 0);
  tier_.project(op.weight, x, first_row, end_row, first_tile, std::min(divide_up(op.weight.n, kTile), end_tile), op.bias,
                op.residual, space_.buffers[op.target].data(), shape_.width(op.target), shape_.fraction_bits, clipped);
}

void Runner::project(const Operation& op, int stage, int unit, Thread& t) {
  if (hooked(op)) return project_by_hook(op, stage, t);
  const Split by = split(op);
  const int first_row = unit % by.row_blocks * by.rows, first_tile = unit / by.row_blocks * by.tiles;
  const int end_row = std::min(rows_, first_row + by.rows);
  int64_t clipped[kProjectRows];
  project_rows(op, vectors(op, stage, t), first_row, end_row, first_tile, first_tile + by.tiles, clipped);
  const Site site = op.residual ? kSiteResidual : kSiteProject;
  for (int row = first_row; row < end_row; ++row) *clips(t, row, site) += clipped[row - first_row];
}

// ---- a host's parallel-for -----------------------------------------------------------------------------

// Blocks of rows of a weight, each against all vectors; counts are added up one block at a time.
struct Runner::Blocks : Task {
  Blocks(Runner& runner, const Operation& op, const Activations& x, const RowSplit& by, Thread& t)
      : runner(runner), op(op), x(x), by(by), t(t) {}

  void run(int index) override {
    const int tiles = by.rows / kTile, first_tile = index * tiles;
    for (int row = 0; row < runner.rows_; row += kProjectRows) {
      const int end = std::min(runner.rows_, row + kProjectRows);
      int64_t clipped[kProjectRows];
      runner.project_rows(op, x, row, end, first_tile, first_tile + tiles, clipped);
      const Site site = op.residual ? kSiteResidual : kSiteProject;
      std::lock_guard<std::mutex> lock(counting);
      for (int i = row; i < end; ++i) *runner.clips(t, i, site) += clipped[i - row];
    }
  }

  Runner& runner;
  const Operation& op;
  const Activations x;
  const RowSplit by;
  Thread& t;
  std::mutex counting;
};

bool Runner::hooked(const Operation& op) const {
  return hook_ != nullptr && (op.target == kLogits || (matvec_ && rows_ == 1)) &&
         split_rows(op.weight, max_tasks_).count > 1;
}

void Runner::project_by_hook(const Operation& op, int stage, Thread& t) {
  const RowSplit by = split_rows(op.weight, max_tasks_);
  Blocks blocks(*this, op, vectors(op, stage, t), by, t);
  hook_failed_ = !hook_->run(by.count, blocks);
}

}  // namespace headrace
