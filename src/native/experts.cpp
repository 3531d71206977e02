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

// Every expert of a layer has one part, and one more each time that its rows do not fit.
size_t most_parts(const MixtureShape& s, size_t pairs, size_t max_pairs) {
  return std::min(size_t(s.num_experts), pairs) + pairs / max_pairs;
}

// Blocks of rows of the open group are one a part and one each kUnitRows; each is cut into as many blocks of tiles as
// make four units a thread, or as many as a core's cache asks for, and one for what is rounded up.
size_t most_units(const MixtureShape& s, int num_threads, size_t pairs, size_t max_pairs) {
  const size_t blocks = std::min(max_pairs, most_parts(s, pairs, max_pairs) + max_pairs / kUnitRows);
  const size_t gate_up = size_t(divide_up(2 * s.expert_rows, kTile)) * kTile * s.hidden;  // bytes, 8 bits an element
  const size_t down = size_t(divide_up(s.hidden, kTile)) * kTile * s.expert_width;
  const size_t cut = (std::max(gate_up, down) + kUnitBytes - 1) / kUnitBytes;
  return 4 * size_t(num_threads) + blocks * (1 + cut);
}

uint8_t state_of(const uint8_t* state) { return __atomic_load_n(state, __ATOMIC_ACQUIRE); }

}  // namespace

MixtureSpace::Vectors::Vectors(Arena& arena, int k, int rows)
    : k(k),
      codes(arena.take<int8_t>(size_t(k) * rows + 64)),  // kernels may read a vector past the end
      scales(arena.take<int16_t>(size_t(k / kBlock) * rows + 64)),
      sums(arena.take<int16_t>(scales.size())),
      rounded(arena.take<int16_t>(scales.size())),
      exponents(arena.take<int32_t>(size_t(rows))) {}

MixtureSpace::MixtureSpace(Arena& arena, const MixtureShape& s, int num_threads, int capacity, int max_pairs)
    : max_pairs(std::min(size_t(capacity) * s.top_k, size_t(max_pairs))),
      chosen(arena.take<int32_t>(size_t(capacity) * s.top_k)),
      shares(arena.take<int32_t>(chosen.size())),
      gates(arena.take<int32_t>(size_t(capacity))),
      guessed(arena.take<int32_t>(size_t(kForecastRows) * s.top_k)),
      start(arena.take<int32_t>(size_t(s.num_experts) + 1)),
      place(arena.take<int32_t>(chosen.size())),
      row_of(arena.take<int32_t>(chosen.size())),
      held(arena.take<Held>(size_t(s.num_experts))),
      gathered(arena, s.hidden, capacity == 1 ? 1 : int(this->max_pairs)),
      inner(arena, s.expert_width, int(this->max_pairs)),
      wide(arena.take<int32_t>(this->max_pairs * 2 * size_t(s.expert_rows))),
      outputs(arena.take<int32_t>(this->max_pairs * size_t(s.hidden))),
      sums(arena.take<int64_t>(this->max_pairs < chosen.size() ? size_t(capacity) * s.hidden : 0)),
      parts(arena.take<Part>(most_parts(s, chosen.size(), this->max_pairs))),
      late(arena.take<Part>(most_parts(s, chosen.size(), this->max_pairs))),
      units(arena.take<Unit>(most_units(s, num_threads, chosen.size(), this->max_pairs))),
      chunks(arena.take<Chunk>(this->max_pairs)) {}  // each of a row at least

Mixture::Mixture(const Tier& tier, const MixtureShape& shape, const Exp2& exp2, const int32_t* sigmoid, int num_threads,
                 MixtureSpace& space)
    : tier_(tier), shape_(shape), exp2_(exp2), sigmoid_(sigmoid), num_threads_(num_threads), space_(space) {}

size_t Mixture::nbytes() const {
  const size_t pairs = space_.chosen.size() + space_.shares.size() + space_.place.size() + space_.row_of.size();
  return 4 * (pairs + space_.gates.size() + space_.wide.size() + space_.outputs.size()) + space_.gathered.nbytes() + space_.inner.nbytes() +
         8 * space_.sums.size();
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

void Mixture::guess(int row, const int32_t* logits) { likeliest(logits, space_.guessed.data() + size_t(row) * shape_.top_k); }

// R13.
void Mixture::choose(int layer, int row, const int32_t* logits, bool normalise, bool gate) {
  const int n = shape_.num_experts, k = shape_.top_k;
  int32_t* chosen = space_.chosen.data() + size_t(row) * k;
  likeliest(logits, chosen);
  if (layer == guessed_layer_ && row < guessed_rows_) {
    const int32_t* guessed = space_.guessed.data() + size_t(row) * k;
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
  for (int j = 0; j < k; ++j) space_.shares[size_t(row) * k + j] = int32_t((weight(chosen[j]) << 30) / total);
  if (gate) space_.gates[size_t(row)] = logits[n];
}

bool Mixture::group(int layer, int rows, int ahead) {
  const int k = shape_.top_k, pairs = rows * k;
  rows_ = rows;
  std::fill(space_.start.begin(), space_.start.end(), 0);
  for (int i = 0; i < pairs; ++i) ++space_.start[size_t(space_.chosen[i]) + 1];
  for (int e = 0; e < shape_.num_experts; ++e) space_.start[size_t(e) + 1] += space_.start[e];
  for (int i = 0; i < pairs; ++i) space_.place[i] = space_.start[space_.chosen[i]]++;
  for (int e = shape_.num_experts; e > 0; --e) space_.start[e] = space_.start[e - 1];
  space_.start[0] = 0;
  for (int i = 0; i < pairs; ++i) space_.row_of[space_.place[i]] = i / k;
  for (int row = 0; layer == guessed_layer_ && row < std::min(rows, guessed_rows_); ++row) {
    foretold_ += k;
    foretold_right_ += right_[row];
  }
  guessed_layer_ = ahead;
  guessed_rows_ = ahead < 0 ? 0 : rows;
  whole_ = size_t(pairs) <= space_.max_pairs;
  groups_ = 0;  // the first will set the sums, whatever a pass that ended early has left in them
  return all_have_slots(layer, space_.chosen.data(), pairs) && all_have_slots(ahead, space_.guessed.data(), guessed_rows_ * k);
}

bool Mixture::all_have_slots(int layer, const int32_t* experts, int count) const {
  const int32_t* table = slots_.table + ptrdiff_t(layer) * shape_.num_experts;
  for (int i = 0; i < count; ++i)
    if (table[experts[i]] < 0) return false;
  return true;
}

void Mixture::take_all(int layer) {
  space_.parts.clear();
  const int32_t* table = slots_.table + ptrdiff_t(layer) * shape_.num_experts;
  for (int e = 0; e < shape_.num_experts; ++e) add_part(layer, e, table[e]);
  last_ = true;
  group_begin_ = group_end_ = 0;
}

void Mixture::take(int layer, const int32_t* experts, const int32_t* slots, int count, bool last) {
  space_.parts.clear();
  for (int i = 0; i < count; ++i) add_part(layer, experts[i], slots[i]);
  last_ = last;
  group_begin_ = group_end_ = 0;
}

void Mixture::add_part(int layer, int expert, int slot) {
  const int first = space_.start[expert], count = space_.start[expert + 1] - first;
  layer_ = layer;
  if (count == 0) return;
  if (slot < 0) {
    failed_ = layer << 16 | expert;
    return;
  }
  slots_.used[slot] += slots_.used[slot] < 255;
  ++uses_;
  const int most = whole_ ? count : int(space_.max_pairs);
  for (int at = 0; at < count; at += most) space_.parts.push_back({expert, slot, first + at, std::min(most, count - at)});
}

// Of what is left, experts that are there come first. An expert of more rows than fit is in as many groups.
void Mixture::open_group() {
  ++groups_;
  group_begin_ = group_end_;
  if (!whole_) std::fill(space_.held.begin(), space_.held.end(), Held{});
  Part *left = space_.parts.begin() + group_begin_, *late = space_.late.begin();
  for (const Part* p = left; p < space_.parts.end(); ++p) {
    if (state_of(slots_.state + p->slot) == kReady) *left++ = *p;
    else *late++ = *p;
  }
  std::copy(space_.late.begin(), late, left);
  space_.chunks.clear();
  for (size_t pairs = 0; group_end_ < space_.parts.size(); ++group_end_) {
    Part& p = space_.parts[group_end_];
    if (!whole_ && pairs + size_t(p.count) > space_.max_pairs) break;
    p.at = whole_ ? p.first : int(pairs);
    pairs += size_t(p.count);
    if (!whole_) space_.held[size_t(p.expert)] = {p.first, p.first + p.count, p.at};
    for (int at = 0; at < p.count; at += kChunkRows) space_.chunks.push_back({p.at + at, std::min(kChunkRows, p.count - at)});
  }
}

// Blocks of rows against blocks of tiles: with few rows enough of them for every thread, with many rows as many tiles
// as fit a core's cache.
int Mixture::open_projection(const WeightSpans& w) {
  space_.units.clear();
  const Part *begin = space_.parts.data() + group_begin_, *end = space_.parts.data() + group_end_;
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
        space_.units.push_back({p->slot, p->at + at, std::min(kUnitRows, p->count - at), tile, std::min(each, tiles - tile),
                          p->first + at});
  }
  return int(space_.units.size());
}

void Mixture::gather(int unit, const Activations& x) {
  const Part& p = space_.parts[group_begin_ + size_t(unit)];
  const size_t k = size_t(shape_.hidden), blocks = k / kBlock;
  for (int i = 0; i < p.count; ++i) {
    const size_t to = size_t(p.at + i), from = size_t(space_.row_of[p.first + i]);
    std::memcpy(space_.gathered.codes.data() + to * k, x.codes + from * k, k);
    std::memcpy(space_.gathered.scales.data() + to * blocks, x.scales + from * blocks, 2 * blocks);
    std::memcpy(space_.gathered.sums.data() + to * blocks, x.sums + from * blocks, 2 * blocks);
    std::memcpy(space_.gathered.rounded.data() + to * blocks, x.rounded + from * blocks, 2 * blocks);
    space_.gathered.exponents[to] = x.exponent[from];
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
  for (const Part& p : space_.parts)
    if (p.slot == unit.slot) failed_ = layer_ << 16 | p.expert;
  return false;
}

// A single row is every expert's row, so it needs no copy.
void Mixture::gate_up(int unit, const ExpertLayout& layout, const Activations& x, int64_t* clipped) {
  const Unit& u = space_.units[size_t(unit)];
  if (!wait(u)) return;
  const PackedWeight w = layout.gate_up.at(record(u.slot));
  const ptrdiff_t stride = 2 * ptrdiff_t(shape_.expert_rows);
  const Activations in = rows_ == 1 ? x : space_.gathered.view();
  const int first = rows_ == 1 ? 0 : u.first_row;
  int32_t* y = space_.wide.data() + (u.first_row - first) * stride;
  tier_.project(w, in, first, first + u.rows, u.first_tile, u.first_tile + u.tiles, nullptr, false, y, stride,
                shape_.fraction_bits, clipped);
}

void Mixture::silu(int unit, int64_t* scratch, int32_t* padded) {
  const Chunk& c = space_.chunks[size_t(unit)];
  const int rows = shape_.expert_rows, width = shape_.expert_width;
  for (int at = c.first; at < c.first + c.count; ++at) {
    const int32_t *gate = space_.wide.data() + size_t(at) * 2 * rows, *up = gate + rows;
    if (rows != width) {  // pad both halves to whole blocks
      std::fill(padded, padded + 2 * width, 0);
      std::copy(gate, gate + rows, padded);
      std::copy(up, up + rows, padded + width);
      gate = padded, up = padded + width;
    }
    tier_.silu_mul_quantize(gate, up, sigmoid_, shape_.fraction_bits, space_.inner.view(), at, scratch);
  }
}

void Mixture::down(int unit, const ExpertLayout& layout, int64_t* clipped) {
  const Unit& u = space_.units[size_t(unit)];
  if (!wait(u)) return;
  tier_.project(layout.down.at(record(u.slot)), space_.inner.view(), u.first_row, u.first_row + u.rows, u.first_tile,
                u.first_tile + u.tiles, nullptr, false, space_.outputs.data(), shape_.hidden,
                shape_.fraction_bits - kExpertHeadroom, clipped);
}

void Mixture::mix(int32_t* x, int row, int64_t* clipped) {
  const int k = shape_.top_k, hidden = shape_.hidden;
  const size_t pair = size_t(row) * k;
  const int32_t* outputs[64];
  if (whole_) {
    for (int j = 0; j < k; ++j) outputs[j] = space_.outputs.data() + size_t(space_.place[pair + j]) * hidden;
    return tier_.mix(x, outputs, space_.shares.data() + pair, k, hidden, clipped);
  }
  int32_t shares[64];
  int count = 0;
  for (size_t i = pair; i < pair + k; ++i) {
    const Held& held = space_.held[size_t(space_.chosen[i])];
    if (space_.place[i] < held.first || space_.place[i] >= held.end) continue;
    outputs[count] = space_.outputs.data() + size_t(held.at + space_.place[i] - held.first) * hidden;
    shares[count++] = space_.shares[i];
  }
  int64_t* sums = space_.sums.data() + size_t(row) * hidden;
  const bool first = groups_ == 1;
  if (first || count > 0) tier_.add_terms(sums, outputs, shares, count, hidden, first);
  if (last_ && !more_groups()) tier_.add_sums(x, sums, hidden, clipped);
}

}  // namespace headrace
