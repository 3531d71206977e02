// The Python module headrace.kernels._native: arrays in, arrays out, the GIL released around the work.
//
// Arrays are borrowed: the caller (kernels/native.py) keeps them alive and has checked their shapes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind_lanes.h"
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
           In<int32_t> sigmoid, std::tuple<int, int> attention, int capacity, int logit_capacity)
      : vocab_(shape.at(7)), capacity_(capacity), logit_capacity_(logit_capacity) {
    const ModelShape s{shape.at(0), shape.at(1), shape.at(2), shape.at(3), shape.at(4),
                       shape.at(5), shape.at(6), shape.at(7), shape.at(8)};
    max_positions_ = int(high.shape(0)) * 256;
    page_bytes_ = size_t(s.num_layers) * s.num_kv_heads * kPageTiles * kv_tile_bytes(s.head_dim);
    const Tables tables{{low.data(), high.data()}, sigmoid.data(), max_positions_, std::get<0>(attention),
                        std::get<1>(attention)};
    runner_ = std::make_unique<Runner>(tier_named(tier), threads, s, tables, capacity, logit_capacity);
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

  void head_norm(In<int32_t> gain, int exponent, std::tuple<int, int> eps, int first, int count) {
    Operation op{Kind::kHeadNorm};
    op.gain = gain_of(gain, exponent, eps);
    op.first = first;
    op.count = count;
    runner_->add(op);
  }

  void land(int layer) { add_layer(Kind::kLand, layer); }
  void attend(int layer) { add_layer(Kind::kAttend, layer); }
  void quantize() { runner_->add(Operation{Kind::kQuantize}); }
  void silu_mul() { runner_->add(Operation{Kind::kSiluMul}); }
  void select() { runner_->add(Operation{Kind::kSelect}); }

  void run(int begin, int end, In<int32_t> tokens, In<int32_t> positions, In<int32_t> sequences,
           std::vector<In<int32_t>> page_tables, In<int32_t> logit_rows, Out<uint8_t> cache) {
    check(begin, end, tokens, positions, sequences, page_tables, logit_rows, cache);
    std::vector<const int32_t*> pages;
    for (const auto& table : page_tables) pages.push_back(table.data());
    const Batch batch{int(tokens.size()), tokens.data(), positions.data(), sequences.data(), pages.data(),
                      int(logit_rows.size()), logit_rows.data(), cache.data()};
    nb::gil_scoped_release release;
    runner_->run(begin, end, batch);
  }

  nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>> logits() {
    return {runner_->logits(), {size_t(logit_capacity_), size_t(vocab_)}, nb::find(this)};
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

  static void require(bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
  }

  void add_layer(Kind kind, int layer) {
    Operation op{kind};
    op.layer = layer;
    runner_->add(op);
  }

  std::unique_ptr<Runner> runner_;
  int vocab_, capacity_, logit_capacity_, max_positions_ = 0;
  size_t page_bytes_ = 0;
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

int64_t op_project(const std::string& tier, In<uint8_t> wcodes, In<int16_t> wscales, MaybeI16 mins, In<int32_t> row, int n,
                   int k, int bits, int group, Out<int8_t> codes, Out<int16_t> scales, Out<int16_t> sums,
                   Out<int16_t> rounded, Out<int32_t> exponent, int first_tile, int last_tile, MaybeI32 bias,
                   bool residual, Out<int32_t> y, int fraction_bits) {
  ActivationArrays x{codes, scales, sums, rounded, exponent};
  int64_t clipped = 0;
  tier_named(tier).project(weight_of(wcodes, wscales, mins, row, n, k, bits, group), x.view(k), 0, int(exponent.size()),
                           first_tile, last_tile, bias ? bias->data() : nullptr, residual, y.data(),
                           ptrdiff_t(y.shape(1)), fraction_bits, &clipped);
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
int64_t op_attend(const std::string& tier, In<uint8_t> tiles, In<int32_t> q, In<int32_t> visible,
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
  int64_t clipped = 0;
  const AttentionShape shape{d, std::get<0>(scale), std::get<1>(scale), fraction_bits};
  tier_named(tier).attend(shape, records.data(), queries.data(), visible.data(), rows, outs.data(),
                          reinterpret_cast<void*>(at), &clipped);
  return clipped;
}

void op_silu_mul(const std::string& tier, In<int32_t> gate, In<int32_t> up, In<int32_t> table, int fraction_bits,
                 Out<int8_t> codes, Out<int16_t> scales, Out<int16_t> sums, Out<int16_t> rounded, Out<int32_t> exponent) {
  ActivationArrays out{codes, scales, sums, rounded, exponent};
  std::vector<int64_t> scratch(gate.size());
  tier_named(tier).silu_mul_quantize(gate.data(), up.data(), table.data(), fraction_bits, out.view(int(gate.size())), 0,
                                     scratch.data());
}

int64_t op_embed(const std::string& tier, In<uint8_t> codes, In<int16_t> scales, MaybeI16 mins, In<int32_t> row, int n,
                 int k, int bits, int group, int token, int fraction_bits, Out<int32_t> out) {
  int64_t clipped = 0;
  tier_named(tier).embed(weight_of(codes, scales, mins, row, n, k, bits, group), token, fraction_bits, out.data(),
                         &clipped);
  return clipped;
}

void bind_runner(nb::module_& m) {
  nb::class_<PyRunner>(m, "Runner")
      .def(nb::init<const std::string&, int, std::vector<int>, In<int32_t>, In<int32_t>, In<int32_t>,
                    std::tuple<int, int>, int, int>())
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
      .def("run", &PyRunner::run)
      .def("logits", &PyRunner::logits)
      .def("clipped", &PyRunner::clipped);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("tiers", &tiers);
  bind_runner(m);
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
  m.def("op_embed", &op_embed, "tier"_a, "codes"_a, "scales"_a, "mins"_a.none(), "row"_a, "n"_a, "k"_a, "bits"_a,
        "group"_a, "token"_a, "fraction_bits"_a, "out"_a);
}

}  // namespace headrace
