#include "adapt.h"

#include <algorithm>

#include "runner.h"

namespace headrace {

namespace {

constexpr int kMaxPairs = 3;  // of an operation: query, key and value

int divide_up(int a, int b) { return (a + b - 1) / b; }

int tiles_of(const PackedWeight& weight) { return divide_up(weight.n, kTile); }

}  // namespace

struct Adapters::Adapter {
  std::vector<std::vector<Pair>> pairs;  // by operation
  int width = 0, rank = 0;
};

// The quantised inner vectors of a block's rows.
struct Adapters::Scratch {
  // Kernels may read a vector past the end.
  explicit Scratch(int rank)
      : codes(size_t(rank) * kRows + 64), scales(size_t(rank / kBlock) * kRows + 64), sums(scales.size()),
        rounded(scales.size()), exponents(kRows) {}
  Activations vectors(int k) { return {codes.data(), scales.data(), sums.data(), rounded.data(), exponents.data(), k}; }

  std::vector<int8_t> codes;
  std::vector<int16_t> scales, sums, rounded;
  std::vector<int32_t> exponents;
};

Adapters::Adapters(const Tier& tier, int num_threads, int capacity)
    : tier_(tier), num_threads_(num_threads), capacity_(capacity) {}

Adapters::~Adapters() = default;

int Adapters::load(const std::vector<LowRank>& pairs, int num_ops) {
  auto adapter = std::make_unique<Adapter>();
  adapter->pairs.resize(size_t(num_ops));
  for (const LowRank& each : pairs) {
    std::vector<Pair>& same = adapter->pairs[each.op];
    const int at = same.empty() ? 0 : same.back().at + same.back().weights.a.n;
    same.push_back({each, at});
    adapter->width = std::max(adapter->width, at + each.a.n);
    adapter->rank = std::max(adapter->rank, each.a.n);
  }
  width_ = std::max(width_, adapter->width);
  inner_.resize(std::max(inner_.size(), size_t(width_) * capacity_));
  exponents_.resize(size_t(capacity_));
  zeros_.resize(size_t(capacity_));
  blocks_.reserve(size_t(capacity_));
  units_.reserve(size_t(capacity_) * kMaxPairs + size_t(num_threads_) * 4);
  scratch_.resize(size_t(num_threads_));
  for (auto& scratch : scratch_)
    if (!scratch || scratch->codes.size() < size_t(adapter->rank) * kRows + 64) scratch = std::make_unique<Scratch>(adapter->rank);
  for (size_t i = 0; i < adapters_.size(); ++i) {
    if (adapters_[i]) continue;
    adapters_[i] = std::move(adapter);
    return int(i);
  }
  adapters_.push_back(std::move(adapter));
  return int(adapters_.size()) - 1;
}

void Adapters::unload(int number) {
  blocks_.clear();
  units_.clear();
  adapters_[number].reset();
  int width = 0, rank = 0;
  for (const auto& adapter : adapters_) {
    if (adapter) width = std::max(width, adapter->width), rank = std::max(rank, adapter->rank);
  }
  width_ = width;
  inner_.resize(size_t(width) * capacity_);
  inner_.shrink_to_fit();
  for (auto& scratch : scratch_) scratch = std::make_unique<Scratch>(rank);
}

bool Adapters::loaded(int number) const {
  return number >= 0 && size_t(number) < adapters_.size() && adapters_[number] != nullptr;
}

void Adapters::begin(const Batch& batch) {
  blocks_.clear();
  if (batch.adapters == nullptr) return;
  for (int row = 0; row < batch.rows; ++row) {
    const int adapter = batch.adapters[batch.sequences[row]];
    if (adapter < 0) continue;
    if (!blocks_.empty()) {
      Block& last = blocks_.back();
      if (last.adapter == adapter && last.first + last.count == row && last.count < kRows) {
        ++last.count;
        continue;
      }
    }
    blocks_.push_back({adapter, row, 1});
  }
}

const std::vector<Adapters::Pair>& Adapters::pairs_of(const Block& block, int op) const {
  return adapters_[block.adapter]->pairs[op];
}

// Each pair of each block in as many pieces as keep every thread busy.
int Adapters::make_units(int op, bool up) {
  units_.clear();
  int pairs = 0;
  for (const Block& block : blocks_) pairs += int(pairs_of(block, op).size());
  if (pairs == 0) return 0;
  const int pieces = num_threads_ == 1 ? 1 : divide_up(4 * num_threads_, pairs);
  for (const Block& block : blocks_) {
    bool leads = true;
    for (const Pair& pair : pairs_of(block, op)) {
      const int tiles = tiles_of(up ? pair.weights.b : pair.weights.a);
      const int each = divide_up(tiles, std::min(pieces, tiles));
      for (int tile = 0; tile < tiles; tile += each) {
        units_.push_back({&pair, block.first, block.count, tile, std::min(tiles, tile + each), leads});
        leads = false;
      }
    }
  }
  return int(units_.size());
}

int Adapters::down_units(int op) { return make_units(op, false); }

int Adapters::up_units(int op) { return make_units(op, true); }

void Adapters::down(int unit, const Activations& x, int64_t* clipped) {
  const Unit& u = units_[unit];
  const int last = u.first_row + u.rows;
  if (u.leads) std::copy(x.exponent + u.first_row, x.exponent + last, exponents_.data() + u.first_row);
  Activations own_units = x;  // values in units of each vector's own exponent
  own_units.exponent = zeros_.data();
  tier_.project(u.pair->weights.a, own_units, u.first_row, last, u.first_tile, u.last_tile, nullptr, false,
                inner_.data() + u.pair->at, width_, 0, clipped);
}

void Adapters::up(int unit, int thread, const Target& target, int64_t* clipped) {
  const Unit& u = units_[unit];
  const LowRank& pair = u.pair->weights;
  const Activations inner = scratch_[thread]->vectors(pair.b.k);
  for (int i = 0; i < u.rows; ++i) {
    const int row = u.first_row + i;
    tier_.quantize_i32(inner_.data() + ptrdiff_t(row) * width_ + u.pair->at, exponents_[row], inner, i);
  }
  tier_.project(pair.b, inner, 0, u.rows, u.first_tile, u.last_tile, nullptr, true,
                target.rows + u.first_row * target.stride + pair.offset, target.stride, target.fraction_bits, clipped);
}

}  // namespace headrace
