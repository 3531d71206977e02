// The Python module headrace.kernels._native: arrays in, arrays out, the GIL released around the work.
//
// Arrays are borrowed: the caller (kernels/native.py) keeps them alive and has checked their shapes.
#include <algorithm>
#include <memory>

#include "bind_adapt.h"
#include "bind_common.h"
#include "bind_parallel_for.h"
#include "draw.h"
#include "runner.h"

namespace headrace {
namespace {

WorkspaceSize size_of(int threads, const std::vector<int>& v, int max_positions, int capacity, int logit_capacity,
                      int max_pairs) {
  require(max_pairs > 0, "there is no room for a pair");
  require(threads > 0 && capacity > 0 && logit_capacity >= 0, "a runner without threads or rows");
  const ModelShape shape{v.at(0), v.at(1), v.at(2), v.at(3),  v.at(4),  v.at(5), v.at(6),
                         v.at(7), v.at(8), v.at(9), v.at(10), v.at(11), v.at(12)};
  return {shape, threads, max_positions, capacity, logit_capacity, max_pairs};
}

size_t bytes_of(int threads, std::vector<int> shape, int max_positions, int capacity, int logit_capacity, int max_pairs) {
  return workspace_bytes(size_of(threads, shape, max_positions, capacity, logit_capacity, max_pairs));
}

// A runner with the Python-side calls that fill it.
class PyRunner {
 public:
  PyRunner(const std::string& tier, int threads, std::vector<int> shape, In<int32_t> low, In<int32_t> high,
           In<int32_t> sigmoid, In<int32_t> exp2_high, In<int32_t> exp2_low, std::tuple<int, int> attention, int capacity,
           int logit_capacity, int max_pairs, std::optional<Out<uint8_t>> memory)
      : capacity_(capacity), logit_capacity_(logit_capacity), max_positions_(int(high.shape(0)) * 256) {
    const WorkspaceSize size = size_of(threads, shape, max_positions_, capacity, logit_capacity, max_pairs);
    const ModelShape& s = size.shape;
    hidden_ = s.hidden, vocab_ = s.vocab, num_experts_ = s.num_experts, top_k_ = s.top_k, num_layers_ = s.num_layers;
    page_bytes_ = size_t(s.num_layers) * s.num_kv_heads * kPageTiles * kv_tile_bytes(s.head_dim);
    const Tables tables{{low.data(), high.data()}, sigmoid.data(), {exp2_high.data(), exp2_low.data()}, max_positions_,
                        std::get<0>(attention), std::get<1>(attention)};
    if (memory) {
      require(memory->size() >= workspace_bytes(size), "the memory is too small");
      require(reinterpret_cast<uintptr_t>(memory->data()) % kAlignment == 0, "the memory is not at a 64-byte boundary");
    }
    runner_ = std::make_unique<Runner>(tier_named(tier), size, tables, memory ? memory->data() : nullptr);
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
    require_idle();
    require(runner_->mixture() != nullptr && runner_->mixture()->bound(), "there are no slots");
    require(0 <= begin && begin + kExpertStages <= runner_->num_ops(), "no such operation");
    require(experts.size() == slots.size(), "experts and slots differ in length");
    std::vector<bool> given(size_t(num_experts_), false);
    for (size_t i = 0; i < slots.size(); ++i) {
      require(0 <= experts.data()[i] && experts.data()[i] < num_experts_, "no such expert");
      require(0 <= slots.data()[i] && slots.data()[i] < num_slots_, "no such slot");
      require(!given[size_t(experts.data()[i])], "an expert is given twice");
      given[size_t(experts.data()[i])] = true;
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

  // Returns -1 where the hook failed; `hook_failure` then says how.
  int run(int begin, int end, In<int32_t> tokens, In<int32_t> positions, In<int32_t> sequences,
          std::vector<In<int32_t>> page_tables, In<int32_t> logit_rows, Out<uint8_t> cache,
          MaybeI32 adapters, std::optional<nb::callable> hook) {
    check(begin, end, tokens, positions, sequences, page_tables, logit_rows, cache);
    std::vector<const int32_t*> pages;
    for (const auto& table : page_tables) pages.push_back(table.data());
    const Batch batch{int(tokens.size()), tokens.data(), positions.data(), sequences.data(), pages.data(),
                      int(logit_rows.size()), logit_rows.data(), cache.data(),
                      adapters ? adapters->data() : nullptr};
    if (adapters) check_adapters(*runner_, *adapters, pages.size());
    if (!hook) {
      nb::gil_scoped_release release;
      return runner_->run(begin, end, batch, nullptr);
    }
    PyParallelFor host(*hook);
    busy_ = true;
    int stopped;
    {
      nb::gil_scoped_release release;
      stopped = runner_->run(begin, end, batch, &host);
    }
    busy_ = false;
    hook_failure_ = stopped < 0 ? host.failure() : "";
    return stopped;
  }

  void set_parallel_for(int max_tasks, bool matvec) {
    require_idle();
    require(0 <= max_tasks && max_tasks <= kMaxTasks, "max_tasks is not between 0 and 256");
    runner_->set_parallel_for(max_tasks, matvec);
  }

  std::string hook_failure() const { return hook_failure_; }

  nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>> logits() {
    return {runner_->logits(), {size_t(logit_capacity_), size_t(vocab_)}, nb::find(this)};
  }

  nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>> residual() {
    return {runner_->residual(), {size_t(capacity_), size_t(hidden_)}, nb::find(this)};
  }

  void put(In<int32_t> x) {
    require_idle();
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
    require_idle();
    require(0 <= begin && begin <= end && end <= runner_->num_ops(), "no such range of operations");
    require(rows >= 1 && rows <= size_t(capacity_), "more rows than the runner holds, or none");
    require(begin == 0 || !runner_->broken(), "the pass has ended where its hook failed");
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

  void add_layer(Kind kind, int layer) {
    Operation op{kind};
    op.layer = layer;
    runner_->add(op);
  }

  // A hook may call what it likes.
  void require_idle() const { require(!busy_, "the runner is at work"); }

  std::unique_ptr<Runner> runner_;
  bool busy_ = false;
  std::string hook_failure_;
  int capacity_, logit_capacity_, max_positions_, hidden_ = 0, vocab_ = 0;
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
                    In<int32_t>, std::tuple<int, int>, int, int, int, std::optional<Out<uint8_t>>>())
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
      .def("run", &PyRunner::run)
      .def("logits", &PyRunner::logits)
      .def("residual", &PyRunner::residual)
      .def("put", &PyRunner::put)
      .def("set_parallel_for", &PyRunner::set_parallel_for)
      .def("hook_failure", &PyRunner::hook_failure)
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
  m.def("workspace_bytes", &bytes_of);
  bind_ops(m);
  bind_parallel_for(m);
}

}  // namespace headrace
