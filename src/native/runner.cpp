#include "runner.h"

#include <algorithm>
#include <cstring>

namespace headrace {

namespace {

constexpr int kMaxShared = 64;  // query heads of one attend call
constexpr int kPageTiles = 4;
constexpr int kPageTokens = kPageTiles * kTile;

int divide_up(int a, int b) { return (a + b - 1) / b; }

// A 64-byte aligned address inside a buffer that is 64 bytes longer than needed.
template <typename T>
T* aligned(std::vector<uint8_t>& bytes) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(bytes.data());
  return reinterpret_cast<T*>((at + 63) / 64 * 64);
}

}  // namespace

struct Runner::Thread {
  Thread(const ModelShape& shape, int max_positions)
      : wide(size_t(std::max(shape.hidden, std::max(shape.ffn_width, shape.head_dim)))),
        padded(size_t(shape.ffn_width) * 2),
        tiles(size_t(divide_up(max_positions, kTile)) + 1),
        scratch(attend_scratch_bytes(std::min(kMaxShared, shape.num_heads / shape.num_kv_heads), max_positions,
                                     shape.head_dim) + 64) {}

  int64_t clipped[kNumSites] = {0};
  std::vector<int64_t> wide;
  std::vector<int32_t> padded;
  std::vector<const uint8_t*> tiles;
  std::vector<uint8_t> scratch;
};

Runner::Runner(const Tier& tier, int num_threads, const ModelShape& shape, const Tables& tables, int capacity,
               int logit_capacity)
    : tier_(tier),
      shape_(shape),
      tables_(tables),
      capacity_(capacity),
      widths_{shape.hidden, shape.qkv_size(), shape.q_size(), 2 * shape.ffn_rows, shape.vocab},
      pool_(num_threads) {
  for (int i = 0; i < kNumBuffers; ++i) {
    buffers_[i].resize(size_t(widths_[i]) * size_t(i == kLogits ? logit_capacity : capacity));
  }
  const int widest = std::max(shape.hidden, std::max(shape.q_size(), shape.ffn_width));
  const size_t blocks = size_t(widest / kBlock) * capacity;
  codes_.resize(size_t(widest) * capacity + 64);  // kernels may read a vector past the end
  scales_.resize(blocks + 64);
  sums_.resize(blocks + 64);
  rounded_.resize(blocks + 64);
  exponents_.resize(size_t(capacity));
  turns_.resize(size_t(shape.head_dim) * capacity);
  for (int i = 0; i < num_threads; ++i) threads_.push_back(std::make_unique<Thread>(shape, tables.max_positions));
}

Runner::~Runner() = default;

void Runner::add(const Operation& op) {
  ops_.push_back(op);
  next_unit_ = std::make_unique<std::atomic<int>[]>(ops_.size());
}

int64_t Runner::clipped(int site) const {
  int64_t sum = 0;
  for (const auto& thread : threads_) sum += thread->clipped[site];
  return sum;
}

Activations Runner::activations(int k) {
  return {codes_.data(), scales_.data(), sums_.data(), rounded_.data(), exponents_.data(), k};
}

void Runner::run(int begin, int end, const Batch& batch) {
  if (begin == 0) active_rows_ = batch.rows;
  for (int i = begin; i < end; ++i) next_unit_[i].store(0, std::memory_order_relaxed);
  pool_.run([&](int index) { walk(begin, end, batch, index); });
}

void Runner::walk(int begin, int end, const Batch& batch, int index) {
  Thread& t = *threads_[index];
  for (int row = index; row < batch.rows; row += pool_.size()) {
    tier_.rotary(tables_.rope, shape_.head_dim, batch.positions[row], turns_.data() + ptrdiff_t(row) * shape_.head_dim);
  }
  pool_.barrier().wait();
  for (int i = begin; i < end; ++i) {
    step(ops_[i], i, batch, t, index, active_rows_);
    pool_.barrier().wait();
    if (ops_[i].kind == Kind::kSelect) {  // every thread has read the old row count by now
      if (index == 0) select(batch);
      pool_.barrier().wait();
    }
  }
}

void Runner::step(const Operation& op, int op_index, const Batch& batch, Thread& t, int index, int rows) {
  const int n = pool_.size(), f = shape_.fraction_bits;
  switch (op.kind) {
    case Kind::kEmbed:
      for (int row = index; row < rows; row += n) embed(op, batch, t, row);
      return;
    case Kind::kNorm:
      if (index == 0) width_ = shape_.hidden;
      for (int row = index; row < rows; row += n) {
        tier_.norm_quantize(row_of(kX, row), op.gain, f, activations(shape_.hidden), row,
                            reinterpret_cast<int32_t*>(t.wide.data()));
      }
      return;
    case Kind::kProject:
      return project(op, op_index, t, index, rows);
    case Kind::kHeadNorm:
      for (int row = index; row < rows; row += n) head_norm(op, t, row);
      return;
    case Kind::kLand:
      for (int row = index; row < rows; row += n) land(op, batch, t, row);
      return;
    case Kind::kAttend:
      return attend(op, batch, t, op_index, rows);
    case Kind::kQuantize:
      if (index == 0) width_ = shape_.q_size();
      for (int row = index; row < rows; row += n) {
        tier_.quantize_i32(row_of(kMixed, row), -f, activations(shape_.q_size()), row);
      }
      return;
    case Kind::kSiluMul:
      if (index == 0) width_ = shape_.ffn_width;
      for (int row = index; row < rows; row += n) silu_mul(t, row);
      return;
    case Kind::kSelect:
      return;  // done between barriers by walk
  }
}

void Runner::embed(const Operation& op, const Batch& batch, Thread& t, int row) {
  tier_.embed(op.weight, batch.tokens[row], shape_.fraction_bits, row_of(kX, row), &t.clipped[kSiteEmbed]);
}

void Runner::project(const Operation& op, int op_index, Thread& t, int index, int rows) {
  const int tiles = divide_up(op.weight.n, kTile), n = pool_.size();
  int64_t* clipped = &t.clipped[op.residual ? kSiteResidual : kSiteProject];
  const auto share = [&](int first, int last) {
    tier_.project(op.weight, activations(width_), 0, rows, first, last, op.bias, op.residual, buffers_[op.target].data(),
                  widths_[op.target], shape_.fraction_bits, clipped);
  };
  if (rows == 1 || n == 1) {  // one contiguous range a thread, so that each reads one stream
    share(int(int64_t(tiles) * index / n), int(int64_t(tiles) * (index + 1) / n));
    return;
  }
  const int unit = std::max(1, tiles / (8 * n));
  for (int at; (at = next_unit_[op_index].fetch_add(unit, std::memory_order_relaxed)) < tiles;) {
    share(at, std::min(tiles, at + unit));
  }
}

void Runner::head_norm(const Operation& op, Thread& t, int row) {
  for (int h = op.first; h < op.first + op.count; ++h) {
    tier_.norm_rescale(row_of(kQkv, row) + ptrdiff_t(h) * shape_.head_dim, shape_.head_dim, op.gain, shape_.fraction_bits,
                       &t.clipped[kSiteHeadNorm]);
  }
}

uint8_t* Runner::tile(const Batch& batch, int row, int layer, int head, int position) const {
  const size_t tile_bytes = kv_tile_bytes(shape_.head_dim);
  const size_t page_bytes = size_t(shape_.num_layers) * shape_.num_kv_heads * kPageTiles * tile_bytes;
  const int32_t page = batch.page_tables[batch.sequences[row]][position / kPageTokens];
  const size_t slot = size_t(layer * shape_.num_kv_heads + head) * kPageTiles + position % kPageTokens / kTile;
  return batch.cache + page * page_bytes + slot * tile_bytes;
}

void Runner::land(const Operation& op, const Batch& batch, Thread& t, int row) {
  const int d = shape_.head_dim, position = batch.positions[row];
  const int32_t* turn = turns_.data() + ptrdiff_t(row) * d;
  int32_t* heads = row_of(kQkv, row);
  for (int h = 0; h < shape_.num_heads + shape_.num_kv_heads; ++h) {
    tier_.rope(heads + ptrdiff_t(h) * d, d, turn, &t.clipped[h < shape_.num_heads ? kSiteRopeQ : kSiteRopeK]);
  }
  const int32_t* keys = heads + shape_.q_size();
  const int32_t* values = keys + ptrdiff_t(shape_.num_kv_heads) * d;
  for (int h = 0; h < shape_.num_kv_heads; ++h) {
    tier_.land(tile(batch, row, op.layer, h, position), position % kTile, keys + ptrdiff_t(h) * d,
               values + ptrdiff_t(h) * d, d, shape_.fraction_bits);
  }
}

// One row has its heads shared out; many rows are shared out by row and kv head.
void Runner::attend(const Operation& op, const Batch& batch, Thread& t, int op_index, int rows) {
  const int shared = shape_.num_heads / shape_.num_kv_heads;
  const int heads = rows == 1 ? 1 : shared, per_row = shape_.num_heads / heads, units = rows * per_row;
  for (int unit; (unit = next_unit_[op_index].fetch_add(1, std::memory_order_relaxed)) < units;) {
    const int row = rows - 1 - unit / per_row;  // the longest first
    attend_heads(op, batch, t, row, unit % per_row * heads, heads);
  }
}

void Runner::attend_heads(const Operation& op, const Batch& batch, Thread& t, int row, int first_head, int num_heads) {
  const int d = shape_.head_dim, kv = first_head / (shape_.num_heads / shape_.num_kv_heads);
  const int visible = batch.positions[row] + 1;
  for (int at = 0; at < visible; at += kTile) t.tiles[at / kTile] = tile(batch, row, op.layer, kv, at);
  const AttentionShape attention{d, tables_.attention_mantissa, tables_.attention_exponent, shape_.fraction_bits};
  for (int done = 0; done < num_heads; done += kMaxShared) {
    const int count = std::min(kMaxShared, num_heads - done);
    const int32_t* q[kMaxShared];
    int32_t* out[kMaxShared];
    int32_t seen[kMaxShared];
    for (int i = 0; i < count; ++i) {
      const ptrdiff_t offset = ptrdiff_t(first_head + done + i) * d;
      q[i] = row_of(kQkv, row) + offset;
      out[i] = row_of(kMixed, row) + offset;
      seen[i] = visible;
    }
    tier_.attend(attention, t.tiles.data(), q, seen, count, out, aligned<int32_t>(t.scratch), &t.clipped[kSiteAttention]);
  }
}

void Runner::silu_mul(Thread& t, int row) {
  const int32_t* gate = row_of(kGateUp, row);
  const int32_t* up = gate + shape_.ffn_rows;
  if (shape_.ffn_rows != shape_.ffn_width) {  // pad both halves to whole blocks
    int32_t* wide = t.padded.data();
    std::memcpy(wide, gate, size_t(shape_.ffn_rows) * 4);
    std::memcpy(wide + shape_.ffn_width, up, size_t(shape_.ffn_rows) * 4);
    gate = wide;
    up = wide + shape_.ffn_width;
  }
  tier_.silu_mul_quantize(gate, up, tables_.sigmoid, shape_.fraction_bits, activations(shape_.ffn_width), row,
                          t.wide.data());
}

// logit_rows rise, so a row is never overwritten before it is copied.
void Runner::select(const Batch& batch) {
  for (int i = 0; i < batch.num_logit_rows; ++i) {
    std::memmove(row_of(kX, i), row_of(kX, batch.logit_rows[i]), size_t(shape_.hidden) * 4);
  }
  active_rows_ = batch.num_logit_rows;
}

}  // namespace headrace
