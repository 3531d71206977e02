// The Python module headrace.kernels._native: arrays in, arrays out, the GIL released around the work.
//
// Arrays are borrowed: the caller (kernels/native.py) keeps them alive and has checked their shapes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "bind_adapt.h"
#include "bind_lanes.h"
#include "draw.h"
#include "runner.h"
#include "tiers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

template <typename T>
using In = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
using MaybeI16 = std::optional<In<int16_t>>;
using MaybeI32 = std::optional<In<int32_t>>;

const Tier& tier_named(const std::string& name) {
  const Tier* tier = find_tier(name.c_str());
  if (tier == nullptr) throw std::invalid_argument("no such kernel tier here: " + name);
  return *tier;
}

PackedWeight weight_of(In<uint8_t> codes, In<int16_t> scales, MaybeI16 mins, In<int32_t> row, int n, int k, int bits,
                       int group) {
  return {codes.data(), scales.data(), mins ? mins->data() : nullptr, row.data(), n, k, bits, group};
}

NormGain gain_of(In<int32_t> gain, int exponent, std::tuple<int, int> eps) {
  return {gain.data(), exponent, std::get<0>(eps), std::get<1>(eps)};
}

// A runner with the Python-side calls that fill it.
class PyRunner {
 public:
  PyRunner(const std::string& tier, int threads, std::vector<int> shape, In<int32_t> low, In<int32_t> high,
           In<int32_t> sigmoid, In<int32_t> exp2_high, In<int32_t> exp2_low, std::tuple<int, int> attention, int capacity,
           int logit_capacity, int max_pairs)
      : hidden_(shape.at(0)), vocab_(shape.at(7)), capacity_(capacity), logit_capacity_(logit_capacity) {
    const ModelShape s{shape.at(0), shape.at(1), shape.at(2), shape.at(3),  shape.at(4),  shape.at(5), shape.at(6),
                       shape.at(7), shape.at(8), shape.at(9), shape.at(10), shape.at(11), shape.at(12)};
    num_experts_ = s.num_experts, top_k_ = s.top_k, num_layers_ = s.num_layers;
    max_positions_ = int(high.shape(0)) * 256;
    page_bytes_ = size_t(s.num_layers) * s.num_kv_heads * kPageTiles * kv_tile_bytes(s.head_dim);
    const Tables tables{{low.data(), high.data()}, sigmoid.data(), {exp2_high.data(), exp2_low.data()}, max_positions_, std::get<0>(attention),
                        std::get<1>(attention)};
    require(max_pairs > 0, "there is no room for a pair");
    runner_ = std::make_unique<Runner>(tier_named(tier), threads, s, tables, capacity, logit_capacity, max_pairs);
  }

  void embed(In<uint8_t> codes, In<int16_t> scales, MaybeI16 mins, In<int32_t> row, int n, int k, int bits, int group) {
    Operation op{Kind::kEmbed};
    op.weight = weight_of(codes, scales, mins, row, n, k, bits, group);
    runner_->add(op);
  }

  void project(In<uint8_t> codes, In<int16_t> scales, MaybeI16 mins, In<int32_t> row, int n, int k, int bits, int group,
               int target, MaybeI32 bias, bool residual) {
    Operation op{Kind::kProject};
    op.weight = weight_of(codes, scales, mins, row, n, k, bits, group);
    op.target = BufferId(target);
    op.bias = bias ? bias->data() : nullptr;
    op.residual = residual;
    runner_->add(op);
  }

  void norm(In<int32_t> gain, int exponent, std::tuple<int, int> eps) {
    Operation op{Kind::kNorm};
    op.gain = gain_of(gain, exponent, eps);
    runner_->add(op);
  }

  void head_norm(In<int32_t> gain, int exponent, std::tuple<int, int> eps, int first, int count, int width) {
    Operation op{Kind::kHeadNorm};
    op.gain = gain_of(gain, exponent, eps);
    op.first = first;
    op.count = count;
    op.width = width;
    runner_->add(op);
  }

  void land(int layer) { add_layer(Kind::kLand, layer); }
  void attend(int layer) { add_layer(Kind::kAttend, layer); }
  void quantize() { runner_->add(Operation{Kind::kQuantize}); }
  void silu_mul(int rows) {
    Operation op{Kind::kSiluMul};
    op.silu_rows = rows;
    runner_->add(op);
  }
  void adapt(int target) { runner_->add_adapt(BufferId(target)); }
  int load_adapter(const std::vector<PyPair>& pairs) { return headrace::load_adapter(*runner_, pairs); }
  void unload_adapter(int number) { headrace::unload_adapter(*runner_, number); }
  void select() { runner_->add(Operation{Kind::kSelect}); }
  void add_shared() { runner_->add(Operation{Kind::kAddShared}); }

  void route(int layer, In<int32_t> gain, int exponent, std::tuple<int, int> eps, In<int16_t> codes,
             In<int32_t> exponents, bool normalise, bool gate) {
    Operation op{Kind::kRoute};
    op.layer = layer;
    op.gain = gain_of(gain, exponent, eps);
    op.router = router_of(codes, exponents);
    op.normalise = normalise;
    op.gate = gate;
    runner_->add(op);
  }

  void route_ahead(int layer, In<int32_t> gain, int exponent, std::tuple<int, int> eps, In<int16_t> codes,
                   In<int32_t> exponents) {
    runner_->set_ahead(layer, gain_of(gain, exponent, eps), router_of(codes, exponents));
  }

  // Spans: byte offsets of codes, scales, mins (-1: none) and row, then n, k, bits, group.
  void experts(int layer, std::vector<int64_t> gate_up, std::vector<int64_t> down, int64_t nbytes) {
    record_bytes_ = std::max(record_bytes_, nbytes);
    runner_->add_experts(layer, {spans_of(gate_up), spans_of(down)});
  }

  int num_ops() const { return runner_->num_ops(); }

  void bind_slots(Out<uint8_t> memory, In<int32_t> table, Out<uint8_t> state, Out<uint8_t> used) {
    require(top_k_ > 0, "the program has no experts");
    require(memory.ndim() == 2 && int64_t(memory.shape(1)) >= record_bytes_, "slots are smaller than a record");
    require(table.ndim() == 2 && int(table.shape(0)) == num_layers_ && int(table.shape(1)) == num_experts_,
            "the table is not [layers, experts]");
    require(state.size() == memory.shape(0) && used.size() == memory.shape(0), "state or used is not [slots]");
    require(reinterpret_cast<uintptr_t>(memory.data()) % 64 == 0, "slots are not at 64-byte boundaries");
    num_slots_ = int(memory.shape(0));
    table_ = table.data();
    runner_->mixture()->bind({memory.data(), memory.shape(1), table.data(), state.data(), used.data()});
  }

  nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>> routes() {
    Mixture* m = runner_->mixture();
    require(m != nullptr, "the program has no experts");
    return {m->chosen(), {size_t(m->rows()), size_t(top_k_)}, nb::find(this)};
  }

  void set_watched(bool on) { runner_->set_watched(on); }
  int64_t expert_uses() { return runner_->mixture() ? runner_->mixture()->uses() : 0; }
  std::tuple<int64_t, int64_t> foretold() {
    const Mixture* m = runner_->mixture();
    return m ? std::make_tuple(m->foretold(), m->foretold_right()) : std::make_tuple(int64_t(0), int64_t(0));
  }
  void set_lookahead(bool on) { runner_->set_lookahead(on); }

  nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>> forecast() {
    Mixture* m = runner_->mixture();
    require(m != nullptr, "the program has no experts");
    return {m->guessed(), {size_t(m->guessed_rows()), size_t(top_k_)}, nb::find(this)};
  }

  void run_experts(int begin, In<int32_t> experts, In<int32_t> slots, bool last) {
    require(runner_->mixture() != nullptr && runner_->mixture()->bound(), "there are no slots");
    require(0 <= begin && begin + kExpertStages <= runner_->num_ops(), "no such operation");
    require(experts.size() == slots.size(), "experts and slots differ in length");
    for (size_t i = 0; i < slots.size(); ++i) {
      require(0 <= experts.data()[i] && experts.data()[i] < num_experts_, "no such expert");
      require(0 <= slots.data()[i] && slots.data()[i] < num_slots_, "no such slot");
    }
    nb::gil_scoped_release release;
    runner_->run_part(begin, experts.data(), slots.data(), int(experts.size()), last);
  }

  // (layer, expert) of a read that failed since the last call, or None.
  std::optional<std::tuple<int, int>> failure() {
    const int failed = runner_->mixture() ? runner_->mixture()->take_failure() : -1;
    if (failed < 0) return std::nullopt;
    return std::tuple<int, int>{failed >> 16, failed & 0xFFFF};
  }

  // Bytes that the experts' rows take.
  size_t expert_bytes() const { return runner_->mixture() ? runner_->mixture()->nbytes() : 0; }

  // Nanoseconds, of all threads together, spent waiting for experts to be read.
  int64_t waited() const { return runner_->mixture() ? runner_->mixture()->waited_ns() : 0; }

  int run(int begin, int end, In<int32_t> tokens, In<int32_t> positions, In<int32_t> sequences,
           std::vector<In<int32_t>> page_tables, In<int32_t> logit_rows, Out<uint8_t> cache,
          MaybeI32 adapters) {
    check(begin, end, tokens, positions, sequences, page_tables, logit_rows, cache);
    std::vector<const int32_t*> pages;
    for (const auto& table : page_tables) pages.push_back(table.data());
    const Batch batch{int(tokens.size()), tokens.data(), positions.data(), sequences.data(), pages.data(),
                      int(logit_rows.size()), logit_rows.data(), cache.data(),
                      adapters ? adapters->data() : nullptr};
    if (adapters) check_adapters(*runner_, *adapters, pages.size());
    nb::gil_scoped_release release;
    return runner_->run(begin, end, batch);
  }

  nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>> logits() {
    return {runner_->logits(), {size_t(logit_capacity_), size_t(vocab_)}, nb::find(this)};
  }

  nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>> residual() {
    return {runner_->residual(), {size_t(capacity_), size_t(hidden_)}, nb::find(this)};
  }

  void put(In<int32_t> x) {
    require(x.ndim() == 2 && x.shape(1) == size_t(hidden_), "rows of X are not [rows, hidden]");
    require(x.shape(0) >= 1 && x.shape(0) <= size_t(capacity_), "more rows than the runner holds, or none");
    runner_->put(x.data(), int(x.shape(0)));
  }

  int pass_rows() const { return runner_->pass_rows(); }

  // Fills i64[rows of the pass, sites].
  void row_clipped(Out<int64_t> out) const {
    require(out.size() == size_t(runner_->pass_rows()) * kNumSites, "counts are not [rows, sites]");
    for (int row = 0; row < runner_->pass_rows(); ++row)
      for (int site = 0; site < kNumSites; ++site) out.data()[row * kNumSites + site] = runner_->clipped(row, site);
  }

  std::vector<int64_t> clipped() const {
    std::vector<int64_t> out;
    for (int site = 0; site < kNumSites; ++site) out.push_back(runner_->clipped(site));
    return out;
  }

 private:
  // Memory is reached through these numbers, so none is taken on trust.
  void check(int begin, int end, const In<int32_t>& tokens, const In<int32_t>& positions, const In<int32_t>& sequences,
             const std::vector<In<int32_t>>& page_tables, const In<int32_t>& logit_rows, const Out<uint8_t>& cache) const {
    const size_t rows = tokens.size();
    require(0 <= begin && begin <= end && end <= runner_->num_ops(), "no such range of operations");
    require(rows >= 1 && rows <= size_t(capacity_), "more rows than the runner holds, or none");
    require(begin == 0 || int(rows) == runner_->pass_rows(), "the batch has not as many rows as the pass");
    require(top_k_ == 0 || runner_->mixture()->bound(), "there are no slots");
    for (int i = 0; top_k_ > 0 && i < num_layers_ * num_experts_; ++i)
      require(table_[i] < num_slots_, "the table names a slot that is not there");
    require(positions.size() == rows && sequences.size() == rows, "tokens, positions and sequences differ in length");
    require(cache.ndim() == 2 && cache.shape(1) == page_bytes_, "the cache has pages of another size");
    for (size_t i = 0; i < rows; ++i) {
      const int token = tokens.data()[i], position = positions.data()[i], sequence = sequences.data()[i];
      require(0 <= token && token < vocab_, "a token is not in the vocabulary");
      require(0 <= position && position < max_positions_, "a position is beyond the rotary tables");
      require(0 <= sequence && size_t(sequence) < page_tables.size(), "a row's sequence has no page table");
      require(size_t(position / kPageTokens) < page_tables[sequence].size(), "a position has no page");
    }
    for (const auto& table : page_tables)
      for (size_t i = 0; i < table.size(); ++i)
        require(0 <= table.data()[i] && size_t(table.data()[i]) < cache.shape(0), "a page is not in the cache");
    require(logit_rows.size() <= size_t(logit_capacity_), "more logits than the runner holds");
    for (size_t i = 0; i < logit_rows.size(); ++i) {
      const int row = logit_rows.data()[i];
      require(row > (i == 0 ? -1 : logit_rows.data()[i - 1]) && size_t(row) < rows, "logit rows must rise and exist");
    }
  }

  static RouterRows router_of(In<int16_t> codes, In<int32_t> exponents) {
    require(codes.ndim() == 2 && exponents.size() == codes.shape(0), "a router has no exponent for each row");
    return {codes.data(), exponents.data(), int32_t(codes.shape(0)), int32_t(codes.shape(1))};
  }

  static WeightSpans spans_of(const std::vector<int64_t>& v) {
    return {v.at(0), v.at(1), v.at(2), v.at(3), int32_t(v.at(4)), int32_t(v.at(5)), int32_t(v.at(6)), int32_t(v.at(7))};
  }

  static void require(bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
  }

  void add_layer(Kind kind, int layer) {
    Operation op{kind};
    op.layer = layer;
    runner_->add(op);
  }

  std::unique_ptr<Runner> runner_;
  int hidden_, vocab_, capacity_, logit_capacity_, max_positions_ = 0;
  size_t page_bytes_ = 0;
  int num_experts_ = 0, top_k_ = 0, num_layers_ = 0, num_slots_ = 0;
  int64_t record_bytes_ = 0;
  const int32_t* table_ = nullptr;
};

std::vector<std::tuple<std::string, bool, std::string>> tiers() {
  std::vector<std::tuple<std::string, bool, std::string>> out;
  for (int i = 0; i < kNumTiers; ++i) {
    const TierStatus& s = tier_table()[i];
    out.emplace_back(s.name, s.tier != nullptr, s.reason);
  }
  return out;
}

// ---- single operations, for tests ------------------------------------------------------------------

struct ActivationArrays {
  Out<int8_t> codes;
  Out<int16_t> scales, sums, rounded;
  Out<int32_t> exponent;
  Activations view(int k) { return {codes.data(), scales.data(), sums.data(), rounded.data(), exponent.data(), k}; }
};

void op_quantize(const std::string& tier, In<int64_t> x, int exponent, Out<int8_t> codes, Out<int16_t> scales,
                 Out<int16_t> sums, Out<int16_t> rounded, Out<int32_t> out_exponent) {
  ActivationArrays out{codes, scales, sums, rounded, out_exponent};
  tier_named(tier).quantize_i64(x.data(), exponent, out.view(int(x.size())), 0);
}

void op_quantize_i32(const std::string& tier, In<int32_t> x, int exponent, Out<int8_t> codes, Out<int16_t> scales,
                     Out<int16_t> sums, Out<int16_t> rounded, Out<int32_t> out_exponent) {
  ActivationArrays out{codes, scales, sums, rounded, out_exponent};
  tier_named(tier).quantize_i32(x.data(), exponent, out.view(int(x.size())), 0);
}

std::vector<int64_t> op_project(const std::string& tier, In<uint8_t> wcodes, In<int16_t> wscales, MaybeI16 mins, In<int32_t> row, int n,
                   int k, int bits, int group, Out<int8_t> codes, Out<int16_t> scales, Out<int16_t> sums,
                   Out<int16_t> rounded, Out<int32_t> exponent, int first_tile, int last_tile, MaybeI32 bias,
                   bool residual, Out<int32_t> y, int fraction_bits) {
  ActivationArrays x{codes, scales, sums, rounded, exponent};
  std::vector<int64_t> clipped(exponent.size());
  tier_named(tier).project(weight_of(wcodes, wscales, mins, row, n, k, bits, group), x.view(k), 0, int(exponent.size()),
                           first_tile, last_tile, bias ? bias->data() : nullptr, residual, y.data(),
                           ptrdiff_t(y.shape(1)), fraction_bits, clipped.data());
  return clipped;
}

void op_norm(const std::string& tier, In<int32_t> x, In<int32_t> gain, int gain_exponent, std::tuple<int, int> eps,
             int fraction_bits, Out<int8_t> codes, Out<int16_t> scales, Out<int16_t> sums, Out<int16_t> rounded,
             Out<int32_t> exponent) {
  ActivationArrays out{codes, scales, sums, rounded, exponent};
  std::vector<int32_t> scratch(x.size());
  tier_named(tier).norm_quantize(x.data(), gain_of(gain, gain_exponent, eps), fraction_bits, out.view(int(x.size())), 0,
                                 scratch.data());
}

int64_t op_head_norm(const std::string& tier, Out<int32_t> x, In<int32_t> gain, int gain_exponent,
                     std::tuple<int, int> eps, int fraction_bits) {
  int64_t clipped = 0;
  tier_named(tier).norm_rescale(x.data(), int(x.size()), gain_of(gain, gain_exponent, eps), fraction_bits, &clipped);
  return clipped;
}

int64_t op_rope(const std::string& tier, Out<int32_t> x, In<int32_t> low, In<int32_t> high, int position) {
  int64_t clipped = 0;
  std::vector<int32_t> turn(x.size());
  const int head_dim = int(x.size());
  tier_named(tier).rotary({low.data(), high.data()}, head_dim, position, turn.data());
  tier_named(tier).rope(x.data(), head_dim, turn.data(), &clipped);
  return clipped;
}

void op_land(const std::string& tier, Out<uint8_t> tile, int slot, In<int32_t> key, In<int32_t> value, int fraction_bits) {
  tier_named(tier).land(tile.data(), slot, key.data(), value.data(), int(key.size()), fraction_bits);
}

// tiles u8[count, tile bytes] 64-byte aligned, q i32[rows, head_dim], visible i32[rows].
std::vector<int64_t> op_attend(const std::string& tier, In<uint8_t> tiles, In<int32_t> q, In<int32_t> visible,
                  std::tuple<int, int> scale, int fraction_bits, Out<int32_t> out) {
  const int rows = int(q.shape(0)), d = int(q.shape(1));
  std::vector<const uint8_t*> records;
  for (size_t i = 0; i < tiles.shape(0); ++i) records.push_back(tiles.data() + i * tiles.shape(1));
  std::vector<const int32_t*> queries;
  std::vector<int32_t*> outs;
  for (int i = 0; i < rows; ++i) {
    queries.push_back(q.data() + ptrdiff_t(i) * d);
    outs.push_back(out.data() + ptrdiff_t(i) * d);
  }
  std::vector<uint8_t> scratch(attend_scratch_bytes(rows, int(records.size()) * kTile, d) + 64);
  const uintptr_t at = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64;
  std::vector<int64_t> clipped(size_t(rows), 0);
  const AttentionShape shape{d, std::get<0>(scale), std::get<1>(scale), fraction_bits};
  tier_named(tier).attend(shape, records.data(), queries.data(), visible.data(), rows, outs.data(),
                          reinterpret_cast<void*>(at), clipped.data());
  return clipped;
}

void op_silu_mul(const std::string& tier, In<int32_t> gate, In<int32_t> up, In<int32_t> table, int fraction_bits,
                 Out<int8_t> codes, Out<int16_t> scales, Out<int16_t> sums, Out<int16_t> rounded, Out<int32_t> exponent) {
  ActivationArrays out{codes, scales, sums, rounded, exponent};
  std::vector<int64_t> scratch(gate.size());
  tier_named(tier).silu_mul_quantize(gate.data(), up.data(), table.data(), fraction_bits, out.view(int(gate.size())), 0,
                                     scratch.data());
}

// R14 in one call, or with groups of terms (one call each, empty ones included): outputs i32[count, k].
int64_t op_mix(const std::string& tier, Out<int32_t> x, In<int32_t> outputs, In<int32_t> shares) {
  std::vector<const int32_t*> rows;
  for (size_t i = 0; i < shares.size(); ++i) rows.push_back(outputs.data() + i * x.size());
  int64_t clipped = 0;
  tier_named(tier).mix(x.data(), rows.data(), shares.data(), int(rows.size()), int(x.size()), &clipped);
  return clipped;
}

int64_t op_mix_groups(const std::string& tier, Out<int32_t> x, In<int32_t> outputs, In<int32_t> shares,
                      std::vector<int> counts) {
  const Tier& t = tier_named(tier);
  std::vector<int64_t> sums(x.size(), 77);  // the first call sets them
  size_t at = 0;
  int64_t clipped = 0;
  bool first = true;
  for (int count : counts) {
    std::vector<const int32_t*> rows;
    for (int i = 0; i < count; ++i) rows.push_back(outputs.data() + (at + size_t(i)) * x.size());
    t.add_terms(sums.data(), rows.data(), shares.data() + at, count, int(x.size()), first);
    first = false;
    at += size_t(count);
  }
  t.add_sums(x.data(), sums.data(), int(x.size()), &clipped);
  return clipped;
}

int64_t op_embed(const std::string& tier, In<uint8_t> codes, In<int16_t> scales, MaybeI16 mins, In<int32_t> row, int n,
                 int k, int bits, int group, int token, int fraction_bits, Out<int32_t> out) {
  int64_t clipped = 0;
  tier_named(tier).embed(weight_of(codes, scales, mins, row, n, k, bits, group), token, fraction_bits, out.data(),
                         &clipped);
  return clipped;
}

// how: inverse temperature, top_k, top_p, min_p, reach, fraction bits (arith/sampling.py).
template <typename T>
int draw_token(In<T> logits, std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int> how, In<int32_t> high,
               In<int32_t> low, uint64_t word) {
  const auto [temperature, top_k, top_p, min_p, reach, fraction_bits] = how;
  if (temperature < 1 || temperature > int64_t(1) << 36 || top_k < 0 || top_k >= int64_t(1) << 31 || top_p < 0 ||
      top_p > 1 << 16 || min_p < 0 || min_p > 1 << 16 || reach < 1 || reach > int64_t(1) << 45 || fraction_bits < 8 ||
      fraction_bits > 24 || logits.size() < 1 || logits.size() > size_t(1) << 20)
    throw std::invalid_argument("a draw's parameters are out of bounds");
  const Draw parameters{temperature, top_k, top_p, min_p, reach, fraction_bits, {high.data(), low.data()}};
  nb::gil_scoped_release release;
  return draw(logits.data(), int(logits.size()), parameters, word);
}

void bind_runner(nb::module_& m) {
  nb::class_<PyRunner>(m, "Runner")
      .def(nb::init<const std::string&, int, std::vector<int>, In<int32_t>, In<int32_t>, In<int32_t>, In<int32_t>,
                    In<int32_t>, std::tuple<int, int>, int, int, int>())
      .def("embed", &PyRunner::embed, "codes"_a, "scales"_a, "mins"_a.none(), "row"_a, "n"_a, "k"_a, "bits"_a, "group"_a)
      .def("project", &PyRunner::project, "codes"_a, "scales"_a, "mins"_a.none(), "row"_a, "n"_a, "k"_a, "bits"_a,
           "group"_a, "target"_a, "bias"_a.none(), "residual"_a)
      .def("norm", &PyRunner::norm)
      .def("head_norm", &PyRunner::head_norm)
      .def("land", &PyRunner::land)
      .def("attend", &PyRunner::attend)
      .def("quantize", &PyRunner::quantize)
      .def("silu_mul", &PyRunner::silu_mul)
      .def("select", &PyRunner::select)
      .def("adapt", &PyRunner::adapt)
      .def("load_adapter", &PyRunner::load_adapter)
      .def("unload_adapter", &PyRunner::unload_adapter)
      .def("route", &PyRunner::route)
      .def("route_ahead", &PyRunner::route_ahead)
      .def("set_watched", &PyRunner::set_watched)
      .def("expert_uses", &PyRunner::expert_uses)
      .def("foretold", &PyRunner::foretold)
      .def("set_lookahead", &PyRunner::set_lookahead)
      .def("forecast", &PyRunner::forecast)
      .def("experts", &PyRunner::experts)
      .def("add_shared", &PyRunner::add_shared)
      .def("num_ops", &PyRunner::num_ops)
      .def("bind_slots", &PyRunner::bind_slots)
      .def("routes", &PyRunner::routes)
      .def("run_experts", &PyRunner::run_experts)
      .def("failure", &PyRunner::failure)
      .def("expert_bytes", &PyRunner::expert_bytes)
      .def("waited", &PyRunner::waited)
      .def("run", &PyRunner::run, "begin"_a, "end"_a, "tokens"_a, "positions"_a, "sequences"_a, "page_tables"_a,
           "logit_rows"_a, "cache"_a, "adapters"_a.none())
      .def("logits", &PyRunner::logits)
      .def("residual", &PyRunner::residual)
      .def("put", &PyRunner::put)
      .def("pass_rows", &PyRunner::pass_rows)
      .def("row_clipped", &PyRunner::row_clipped)
      .def("clipped", &PyRunner::clipped);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("tiers", &tiers);
  bind_runner(m);
  m.def("draw_i32", &draw_token<int32_t>);
  m.def("draw_i64", &draw_token<int64_t>);
  bind_lanes(m);
  m.def("op_quantize", &op_quantize);
  m.def("op_quantize_i32", &op_quantize_i32);
  m.def("op_project", &op_project, "tier"_a, "codes"_a, "scales"_a, "mins"_a.none(), "row"_a, "n"_a, "k"_a, "bits"_a,
        "group"_a, "x_codes"_a, "x_scales"_a, "x_sums"_a, "x_rounded"_a, "x_exponent"_a, "first_tile"_a, "last_tile"_a,
        "bias"_a.none(), "residual"_a, "y"_a, "fraction_bits"_a);
  m.def("op_norm", &op_norm);
  m.def("op_head_norm", &op_head_norm);
  m.def("op_rope", &op_rope);
  m.def("op_land", &op_land);
  m.def("op_attend", &op_attend);
  m.def("op_silu_mul", &op_silu_mul);
  m.def("op_mix", &op_mix);
  m.def("op_mix_groups", &op_mix_groups);
  m.def("op_embed", &op_embed, "tier"_a, "codes"_a, "scales"_a, "mins"_a.none(), "row"_a, "n"_a, "k"_a, "bits"_a,
        "group"_a, "token"_a, "fraction_bits"_a, "out"_a);
}

}  // namespace headrace
