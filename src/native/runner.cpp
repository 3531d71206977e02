#include "runner.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace headrace {

namespace {

constexpr int kMaxQueries = 24;               // query heads of one attention call
constexpr int kScoreBudget = 64 * 1024;       // their scores, so that these stay in a core's cache
constexpr int kProjectRows = 96;              // rows that a projection's unit takes, a multiple of 12 and of 16
constexpr size_t kProjectBytes = 512 * 1024;  // weights of a unit, so that they stay in a core's cache

int divide_up(int a, int b) { return (a + b - 1) / b; }

// A 64-byte aligned address inside a buffer that is 64 bytes longer than needed.
uint8_t* aligned(std::vector<uint8_t>& bytes) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(bytes.data());
  return reinterpret_cast<uint8_t*>((at + 63) / 64 * 64);
}

bool makes_vectors(Kind kind) { return kind == Kind::kNorm || kind == Kind::kQuantize || kind == Kind::kSiluMul; }

// Scratch of one attention call: one token's heads and all keys, or more queries within the budget of scores.
size_t attention_bytes(const ModelShape& shape, int max_positions) {
  const int heads = std::min(kMaxQueries, shape.num_heads / shape.num_kv_heads);
  return attend_scratch_bytes(heads, max_positions, shape.head_dim) +
         attend_scratch_bytes(kMaxQueries, 2 * kTile, shape.head_dim) + kScoreBudget * sizeof(int32_t);
}

}  // namespace

struct Runner::Thread {
  Thread(const ModelShape& shape, int widest, int max_positions, int capacity)
      : clipped(size_t(capacity) * kNumSites),
        wide(size_t(std::max(std::max(widest, shape.expert_width), shape.head_dim))),
        padded(size_t(std::max(shape.ffn_width, shape.expert_width)) * 2),
        logits(size_t(shape.num_experts) + 1),
        turn(size_t(shape.head_dim)),
        tiles(size_t(divide_up(max_positions, kTile)) + 1),
        scratch(attention_bytes(shape, max_positions) + 64),
        codes(size_t(widest) + 64),
        scales(size_t(widest / kBlock) + 64),
        sums(scales.size()),
        rounded(scales.size()) {}

  Activations own(int k) { return {codes.data(), scales.data(), sums.data(), rounded.data(), &exponent, k}; }

  std::vector<int64_t> clipped;  // [rows of the pass][sites]
  std::vector<int64_t> wide;
  std::vector<int32_t> padded, logits, turn;
  std::vector<const uint8_t*> tiles;
  std::vector<uint8_t> scratch;
  // The vector of a single row, and the run and operation that it was made for.
  std::vector<int8_t> codes;
  std::vector<int16_t> scales, sums, rounded;
  int32_t exponent = 0;
  int64_t made_run = -1;
  int made_stage = -1;
};

Runner::Runner(const Tier& tier, int num_threads, const ModelShape& shape, const Tables& tables, int capacity,
               int logit_capacity, int max_pairs)
    : tier_(tier),
      shape_(shape),
      tables_(tables),
      widths_{shape.hidden, shape.qkv_size(), shape.q_size(), 2 * shape.ffn_rows, shape.vocab, shape.hidden},
      adapters_(tier, num_threads, capacity),
      pool_(num_threads, *this) {
  for (int i = 0; i < kNumBuffers; ++i) {
    if (i == kShared && shape.top_k == 0) continue;
    buffers_[i].resize(size_t(widths_[i]) * size_t(i == kLogits ? logit_capacity : capacity));
  }
  const int widest = std::max(shape.hidden, std::max(shape.q_size(), shape.ffn_width));
  const size_t blocks = size_t(widest / kBlock) * capacity;
  codes_.resize(size_t(widest) * capacity + 64);  // kernels may read a vector past the end
  scales_.resize(blocks + 64);
  sums_.resize(blocks + 64);
  rounded_.resize(blocks + 64);
  exponents_.resize(size_t(capacity));
  origins_.resize(size_t(capacity));
  row_blocks_.reserve(size_t(capacity));
  if (shape.top_k > 0) {
    const MixtureShape mixture{shape.hidden,      shape.num_experts,  shape.top_k,
                               shape.expert_rows, shape.expert_width, shape.fraction_bits};
    mixture_ = std::make_unique<Mixture>(tier, mixture, tables.exp2, tables.sigmoid, num_threads, capacity, max_pairs);
  }
  for (int i = 0; i < num_threads; ++i) threads_.push_back(std::make_unique<Thread>(shape, widest, tables.max_positions, capacity));
}

Runner::~Runner() = default;

void Runner::add(const Operation& given) {
  Operation op = given;
  const int index = num_ops();
  if (makes_vectors(op.kind)) last_producer_ = index;
  if (op.kind == Kind::kProject && last_producer_ >= 0) {
    Operation& producer = ops_[last_producer_];
    producer.alone = last_producer_ == index - 1;
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
  for (const auto& thread : threads_) sum += thread->clipped[size_t(row) * kNumSites + site];
  return sum;
}

int64_t* Runner::clips(Thread& t, int row, Site site) {
  return t.clipped.data() + size_t(origins_[size_t(row)]) * kNumSites + site;
}

void Runner::begin_pass(int rows) {
  for (int site = 0; site < kNumSites; ++site) clipped_before_[site] = clipped(site);
  for (auto& thread : threads_) std::fill_n(thread->clipped.begin(), size_t(pass_rows_) * kNumSites, 0);
  std::iota(origins_.begin(), origins_.begin() + rows, 0);
  rows_ = pass_rows_ = rows;
  if (mixture_) mixture_->begin();
}

void Runner::put(const int32_t* x, int rows) {
  begin_pass(rows);
  std::memmove(row_of(kX, 0), x, size_t(rows) * shape_.hidden * sizeof(int32_t));  // may be what `residual` gave
}

Activations Runner::activations(int k) {
  return {codes_.data(), scales_.data(), sums_.data(), rounded_.data(), exponents_.data(), k};
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
  const bool is = op >= 0 && op < num_ops() && ops_[op].kind == Kind::kAdaptDown;
  return is ? &ops_[op].weight : nullptr;
}

void Runner::set_ahead(int layer, const NormGain& gain, const RouterRows& router) {
  ops_.back().ahead_layer = layer;
  ops_.back().ahead_gain = gain;
  ops_.back().ahead_router = router;
}

int Runner::run(int begin, int end, const Batch& batch) {
  batch_ = batch;
  ++run_;
  stopped_ = end;
  part_ = false;
  if (begin == 0) begin_pass(batch.rows);
  make_row_blocks();
  adapters_.begin(batch);
  pool_.run(begin, end);
  return stopped_;
}

void Runner::run_part(int begin, const int32_t* experts, const int32_t* slots, int count, bool last) {
  part_ = true;
  mixture_->take(ops_[begin].layer, experts, slots, count, last);
  pool_.run(begin, begin + kExpertStages);
}

int Runner::after(int stage) {
  const Operation& op = ops_[stage];
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
  Thread& t = *threads_[thread];
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
    origins_[size_t(i)] = origins_[size_t(batch_.logit_rows[i])];
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
  Thread& t = *threads_[thread];
  int64_t clipped[Adapters::kRows] = {0};
  if (op.kind == Kind::kAdaptDown) {
    adapters_.down(unit, vectors(op, stage - 1, t), clipped);
  } else {
    const Target target{buffers_[op.target].data(), widths_[op.target], shape_.fraction_bits};
    adapters_.up(unit, thread, target, clipped);
  }
  const Adapters::Rows rows = adapters_.rows_of(unit);
  for (int i = 0; i < rows.count; ++i) *clips(t, rows.first + i, kSiteAdapter) += clipped[i];
}

void Runner::project(const Operation& op, int stage, int unit, Thread& t) {
  const Split by = split(op);
  const int first_row = unit % by.row_blocks * by.rows, first_tile = unit / by.row_blocks * by.tiles;
  const int end_row = std::min(rows_, first_row + by.rows);
  int64_t clipped[kProjectRows];
  std::fill_n(clipped, end_row - first_row, 0);
  tier_.project(op.weight, vectors(op, stage, t), first_row, end_row, first_tile,
                std::min(divide_up(op.weight.n, kTile), first_tile + by.tiles), op.bias, op.residual,
                buffers_[op.target].data(), widths_[op.target], shape_.fraction_bits, clipped);
  const Site site = op.residual ? kSiteResidual : kSiteProject;
  for (int row = first_row; row < end_row; ++row) *clips(t, row, site) += clipped[row - first_row];
}

// ---- attention -----------------------------------------------------------------------------------------

uint8_t* Runner::tile(int row, int layer, int head, int position) const {
  const size_t tile_bytes = kv_tile_bytes(shape_.head_dim);
  const size_t page_bytes = size_t(shape_.num_layers) * shape_.num_kv_heads * kPageTiles * tile_bytes;
  const int32_t page = batch_.page_tables[batch_.sequences[row]][position / kPageTokens];
  const size_t slot = size_t(layer * shape_.num_kv_heads + head) * kPageTiles + position % kPageTokens / kTile;
  return batch_.cache + page * page_bytes + slot * tile_bytes;
}

// Rows of one sequence that attend together, as many as the limits on queries and scores allow.
void Runner::make_row_blocks() {
  row_blocks_.clear();
  const int most = std::max(1, kMaxQueries / heads_a_group());
  for (int row = 0; row < batch_.rows; ++row) {
    if (!row_blocks_.empty()) {
      RowBlock& last = row_blocks_.back();
      const int64_t scores = int64_t(last.count + 1) * heads_a_group() * (batch_.positions[row] + kTile);
      if (batch_.sequences[row] == batch_.sequences[last.first] && last.count < most && scores <= kScoreBudget) {
        ++last.count;
        continue;
      }
    }
    row_blocks_.push_back({row, 1});
  }
}

// The groups (a block of rows and a kv head) that are taken whole; the heads of the rest are units of their own,
// so that few groups still keep every thread busy.
int Runner::whole_groups() const {
  const int groups = int(row_blocks_.size()) * shape_.num_kv_heads, n = pool_.size();
  return groups >= 8 * n ? groups : groups / n * n;
}

int Runner::attend_units() const {
  const int groups = int(row_blocks_.size()) * shape_.num_kv_heads, whole = whole_groups();
  return whole + (groups - whole) * heads_a_group();
}

void Runner::attend(const Operation& op, int unit, Thread& t) {
  const int whole = whole_groups(), shared = heads_a_group();
  const int group = unit < whole ? unit : whole + (unit - whole) / shared;
  const RowBlock& block = row_blocks_[row_blocks_.size() - 1 - group / shape_.num_kv_heads];  // the longest first
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
      tier_.attend(attention, t.tiles.data(), q, visible, count, out, aligned(t.scratch), clipped);
      for (int i = 0; i < count; ++i) *clips(t, rows[i], kSiteAttention) += clipped[i];
      count = 0;
    }
  }
}

}  // namespace headrace
