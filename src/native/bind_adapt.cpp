#include "bind_adapt.h"

namespace headrace {

namespace {

PackedWeight pair_weight(const PairWeight& given) {
  const auto& [codes, scales, row, n, k] = given;
  require(n > 0 && k > 0 && k % kBlock == 0, "a pair's weight has no possible size");
  const size_t rows = size_t(n + kTile - 1) / kTile * kTile, blocks = size_t(k / kBlock);
  require(codes.size() == rows * size_t(k) && scales.size() == rows * blocks && row.size() == 3 * rows,
          "a pair's weight has arrays of another size");
  return {codes.data(), scales.data(), nullptr, row.data(), n, k, 8, kBlock};
}

}  // namespace

int load_adapter(Runner& runner, const std::vector<PyPair>& pairs) {
  std::vector<LowRank> out;
  for (const auto& [op, offset, a, b] : pairs) {
    const LowRank pair{op, offset, pair_weight(a), pair_weight(b)};
    const PackedWeight* base = runner.adapted(op);
    require(base != nullptr, "no such operation can be adapted");
    require(pair.a.k == base->k && pair.b.k == pair.a.n, "a pair does not fit its operation");
    require(offset >= 0 && offset % kTile == 0 && offset + pair.b.n <= base->n, "a pair's rows are not its operation's");
    out.push_back(pair);
  }
  return runner.adapters().load(out, runner.num_ops());
}

void unload_adapter(Runner& runner, int number) {
  require(runner.adapters().loaded(number), "no such adapter is loaded");
  runner.adapters().unload(number);
}

void check_adapters(const Runner& runner, const In<int32_t>& adapters, size_t num_sequences) {
  require(adapters.size() == num_sequences, "there is no adapter, or none, for each sequence");
  for (size_t i = 0; i < num_sequences; ++i) {
    const int number = adapters.data()[i];
    require(number == -1 || runner.adapters().loaded(number), "a sequence's adapter is not loaded");
  }
}

}  // namespace headrace
