#include "experts.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace headrace {
namespace {

constexpr size_t kUnitBytes = 512 * 1024;      // weights of a unit with many rows, so that they stay in a core's cache
constexpr int kChunkRows = 16;                 // rows of a unit of SiLU
constexpr int64_t kLog2e = 1512775;            // log2(e) * 2^20
constexpr int kSpins = 2000;
constexpr auto kNap = std::chrono::microseconds(20);

int divide_up(int a, int b) { return (a + b - 1) / b; }

uint8_t state_of(const uint8_t* state) { return __atomic_load_n(state, __ATOMIC_ACQUIRE); }

}  // namespace

Mixture::Vectors::Vectors(int k, int rows)
    : k(k),
      codes(size_t(k) * rows + 64),  // kernels may read a vector past the end
      scales(size_t(k / kBlock) * rows + 64),
      sums(scales.size()),
      rounded(scales.size()),
      exponents(size_t(rows)) {}

Mixture::Mixture(const Tier& tier, const MixtureShape& shape, const Exp2& exp2, const int32_t* sigmoid, int num_threads,
                 int capacity, int max_pairs)
    : tier_(tier),
      shape_(shape),
      exp2_(exp2),
      sigmoid_(sigmoid),
      num_threads_(num_threads),
      max_pairs_(std::min(size_t(capacity) * shape.top_k, size_t(max_pairs))),
      chosen_(size_t(capacity) * shape.top_k),
      shares_(chosen_.size()),
      gates_(size_t(capacity)),
      guessed_(size_t(kForecastRows) * shape.top_k),
      start_(size_t(shape.num_experts) + 1),
      place_(chosen_.size()),
      row_of_(chosen_.size()),
      held_(size_t(shape.num_experts)),
      gathered_(shape.hidden, capacity == 1 ? 1 : int(max_pairs_)),
      inner_(shape.expert_width, int(max_pairs_)),
      wide_(max_pairs_ * 2 * size_t(shape.expert_rows)),
      outputs_(max_pairs_ * size_t(shape.hidden)),
      sums_(max_pairs_ < chosen_.size() ? size_t(capacity) * shape.hidden : 0) {}

size_t Mixture::nbytes() const {
  const size_t pairs = chosen_.size() + shares_.size() + place_.size() + row_of_.size();
  return 4 * (pairs + gates_.size() + wide_.size() + outputs_.size()) + gathered_.nbytes() + inner_.nbytes() +
         8 * sums_.size();
}

// Ties go to the lower index, since a later expert must be strictly likelier to pass an earlier one.
void Mixture::likeliest(const int32_t* logits, int32_t* chosen) const {
  const int n = shape_.num_experts, k = shape_.top_k;
  int count = 0;
  for (int e = 0; e < n; ++e) {
    if (count == k && logits[e] <= logits[chosen[k - 1]]) continue;
    int at = count < k ? count++ : k - 1;
    for (; at > 0 && logits[e] > logits[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = e;
  }
}

void Mixture::guess(int row, const int32_t* logits) { likeliest(logits, guessed_.data() + size_t(row) * shape_.top_k); }

// R13.
void Mixture::choose(int layer, int row, const int32_t* logits, bool normalise, bool gate) {
  const int n = shape_.num_experts, k = shape_.top_k;
  int32_t* chosen = chosen_.data() + size_t(row) * k;
  likeliest(logits, chosen);
  if (layer == guessed_layer_ && row < guessed_rows_) {
    const int32_t* guessed = guessed_.data() + size_t(row) * k;
    right_[row] = int(std::count_if(chosen, chosen + k, [&](int e) { return std::find(guessed, guessed + k, e) != guessed + k; }));
  }
  const int64_t peak = logits[chosen[0]];
  const auto weight = [&](int e) { return exp2_((peak - logits[e]) * kLog2e >> (4 + shape_.fraction_bits)); };
  int64_t total = 0;
  if (normalise) {
    for (int j = 0; j < k; ++j) total += weight(chosen[j]);
  } else {
    for (int e = 0; e < n; ++e) total += weight(e);
  }
  for (int j = 0; j < k; ++j) shares_[size_t(row) * k + j] = int32_t((weight(chosen[j]) << 30) / total);
  if (gate) gates_[size_t(row)] = logits[n];
}

bool Mixture::group(int layer, int rows, int ahead) {
  const int k = shape_.top_k, pairs = rows * k;
  rows_ = rows;
  std::fill(start_.begin(), start_.end(), 0);
  for (int i = 0; i < pairs; ++i) ++start_[size_t(chosen_[i]) + 1];
  for (int e = 0; e < shape_.num_experts; ++e) start_[size_t(e) + 1] += start_[e];
  for (int i = 0; i < pairs; ++i) place_[i] = start_[chosen_[i]]++;
  for (int e = shape_.num_experts; e > 0; --e) start_[e] = start_[e - 1];
  start_[0] = 0;
  for (int i = 0; i < pairs; ++i) row_of_[place_[i]] = i / k;
  for (int row = 0; layer == guessed_layer_ && row < std::min(rows, guessed_rows_); ++row) {
    foretold_ += k;
    foretold_right_ += right_[row];
  }
  guessed_layer_ = ahead;
  guessed_rows_ = ahead < 0 ? 0 : rows;
  whole_ = size_t(pairs) <= max_pairs_;
  groups_ = 0;  // the first will set the sums, whatever a pass that ended early has left in them
  return all_have_slots(layer, chosen_.data(), pairs) && all_have_slots(ahead, guessed_.data(), guessed_rows_ * k);
}

bool Mixture::all_have_slots(int layer, const int32_t* experts, int count) const {
  const int32_t* table = slots_.table + ptrdiff_t(layer) * shape_.num_experts;
  for (int i = 0; i < count; ++i)
    if (table[experts[i]] < 0) return false;
  return true;
}

void Mixture::take_all(int layer) {
  parts_.clear();
  const int32_t* table = slots_.table + ptrdiff_t(layer) * shape_.num_experts;
  for (int e = 0; e < shape_.num_experts; ++e) add_part(layer, e, table[e]);
  last_ = true;
  group_begin_ = group_end_ = 0;
}

void Mixture::take(int layer, const int32_t* experts, const int32_t* slots, int count, bool last) {
  parts_.clear();
  for (int i = 0; i < count; ++i) add_part(layer, experts[i], slots[i]);
  last_ = last;
  group_begin_ = group_end_ = 0;
}

void Mixture::add_part(int layer, int expert, int slot) {
  const int first = start_[expert], count = start_[expert + 1] - first;
  layer_ = layer;
  if (count == 0) return;
  if (slot < 0) {
    failed_ = layer << 16 | expert;
    return;
  }
  slots_.used[slot] += slots_.used[slot] < 255;
  ++uses_;
  const int most = whole_ ? count : int(max_pairs_);
  for (int at = 0; at < count; at += most) parts_.push_back({expert, slot, first + at, std::min(most, count - at)});
}

// Of what is left, experts that are there come first. An expert of more rows than fit is in as many groups.
void Mixture::open_group() {
  ++groups_;
  group_begin_ = group_end_;
  if (!whole_) std::fill(held_.begin(), held_.end(), Held{});
  std::stable_partition(parts_.begin() + ptrdiff_t(group_begin_), parts_.end(),
                        [this](const Part& p) { return state_of(slots_.state + p.slot) == kReady; });
  chunks_.clear();
  for (size_t pairs = 0; group_end_ < parts_.size(); ++group_end_) {
    Part& p = parts_[group_end_];
    if (!whole_ && pairs + size_t(p.count) > max_pairs_) break;
    p.at = whole_ ? p.first : int(pairs);
    pairs += size_t(p.count);
    if (!whole_) held_[size_t(p.expert)] = {p.first, p.first + p.count, p.at};
    for (int at = 0; at < p.count; at += kChunkRows) chunks_.push_back({p.at + at, std::min(kChunkRows, p.count - at)});
  }
}

// Blocks of rows against blocks of tiles: with few rows enough of them for every thread, with many rows as many tiles
// as fit a core's cache.
int Mixture::open_projection(const WeightSpans& w) {
  units_.clear();
  const Part *begin = parts_.data() + group_begin_, *end = parts_.data() + group_end_;
  const int tiles = divide_up(w.n, kTile);
  const size_t bytes = size_t(tiles) * kTile * w.k / 8 * w.bits;
  int blocks = 0;
  for (const Part* p = begin; p < end; ++p) blocks += divide_up(p->count, kUnitRows);
  int wanted = num_threads_ == 1 || blocks == 0 ? 1 : divide_up(4 * num_threads_, blocks);
  for (const Part* p = begin; p < end; ++p) {
    if (p->count > kUnitRows) wanted = std::max(wanted, int((bytes + kUnitBytes - 1) / kUnitBytes));
    const int each = divide_up(tiles, std::min(wanted, tiles));
    for (int tile = 0; tile < tiles; tile += each)
      for (int at = 0; at < p->count; at += kUnitRows)
        units_.push_back({p->slot, p->at + at, std::min(kUnitRows, p->count - at), tile, std::min(each, tiles - tile),
                          p->first + at});
  }
  return int(units_.size());
}

void Mixture::gather(int unit, const Activations& x) {
  const Part& p = parts_[group_begin_ + size_t(unit)];
  const size_t k = size_t(shape_.hidden), blocks = k / kBlock;
  for (int i = 0; i < p.count; ++i) {
    const size_t to = size_t(p.at + i), from = size_t(row_of_[p.first + i]);
    std::memcpy(gathered_.codes.data() + to * k, x.codes + from * k, k);
    std::memcpy(gathered_.scales.data() + to * blocks, x.scales + from * blocks, 2 * blocks);
    std::memcpy(gathered_.sums.data() + to * blocks, x.sums + from * blocks, 2 * blocks);
    std::memcpy(gathered_.rounded.data() + to * blocks, x.rounded + from * blocks, 2 * blocks);
    gathered_.exponents[to] = x.exponent[from];
  }
}

// True once the slot is READY; false, and remembered, when its read has failed.
bool Mixture::wait(const Unit& unit) {
  uint8_t* state = slots_.state + unit.slot;
  uint8_t now = state_of(state);
  if (now == kReading) {
    const auto begin = std::chrono::steady_clock::now();
    for (int spins = 0; (now = state_of(state)) == kReading; ++spins)
      if (spins > kSpins) std::this_thread::sleep_for(kNap);
    const auto waited = std::chrono::steady_clock::now() - begin;
    waited_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
  }
  if (now == kReady) return true;
  for (const Part& p : parts_)
    if (p.slot == unit.slot) failed_ = layer_ << 16 | p.expert;
  return false;
}

// A single row is every expert's row, so it needs no copy.
void Mixture::gate_up(int unit, const ExpertLayout& layout, const Activations& x, int64_t* clipped) {
  const Unit& u = units_[size_t(unit)];
  if (!wait(u)) return;
  const PackedWeight w = layout.gate_up.at(record(u.slot));
  const ptrdiff_t stride = 2 * ptrdiff_t(shape_.expert_rows);
  const Activations in = rows_ == 1 ? x : gathered_.view();
  const int first = rows_ == 1 ? 0 : u.first_row;
  int32_t* y = wide_.data() + (u.first_row - first) * stride;
  tier_.project(w, in, first, first + u.rows, u.first_tile, u.first_tile + u.tiles, nullptr, false, y, stride,
                shape_.fraction_bits, clipped);
}

void Mixture::silu(int unit, int64_t* scratch, int32_t* padded) {
  const Chunk& c = chunks_[size_t(unit)];
  const int rows = shape_.expert_rows, width = shape_.expert_width;
  for (int at = c.first; at < c.first + c.count; ++at) {
    const int32_t *gate = wide_.data() + size_t(at) * 2 * rows, *up = gate + rows;
    if (rows != width) {  // pad both halves to whole blocks
      std::fill(padded, padded + 2 * width, 0);
      std::copy(gate, gate + rows, padded);
      std::copy(up, up + rows, padded + width);
      gate = padded, up = padded + width;
    }
    tier_.silu_mul_quantize(gate, up, sigmoid_, shape_.fraction_bits, inner_.view(), at, scratch);
  }
}

void Mixture::down(int unit, const ExpertLayout& layout, int64_t* clipped) {
  const Unit& u = units_[size_t(unit)];
  if (!wait(u)) return;
  tier_.project(layout.down.at(record(u.slot)), inner_.view(), u.first_row, u.first_row + u.rows, u.first_tile,
                u.first_tile + u.tiles, nullptr, false, outputs_.data(), shape_.hidden,
                shape_.fraction_bits - kExpertHeadroom, clipped);
}

void Mixture::mix(int32_t* x, int row, int64_t* clipped) {
  const int k = shape_.top_k, hidden = shape_.hidden;
  const size_t pair = size_t(row) * k;
  const int32_t* outputs[64];
  if (whole_) {
    for (int j = 0; j < k; ++j) outputs[j] = outputs_.data() + size_t(place_[pair + j]) * hidden;
    return tier_.mix(x, outputs, shares_.data() + pair, k, hidden, clipped);
  }
  int32_t shares[64];
  int count = 0;
  for (size_t i = pair; i < pair + k; ++i) {
    const Held& held = held_[size_t(chosen_[i])];
    if (place_[i] < held.first || place_[i] >= held.end) continue;
    outputs[count] = outputs_.data() + size_t(held.at + place_[i] - held.first) * hidden;
    shares[count++] = shares_[i];
  }
  int64_t* sums = sums_.data() + size_t(row) * hidden;
  const bool first = groups_ == 1;
  if (first || count > 0) tier_.add_terms(sums, outputs, shares, count, hidden, first);
  if (last_ && !more_groups()) tier_.add_sums(x, sums, hidden, clipped);
}

}  // namespace headrace
