// Adapters as Python gives them, checked against the program that they are for.
#pragma once

#include <tuple>
#include <vector>

#include "bind_common.h"
#include "runner.h"

namespace headrace {

// Codes, scales, rows, n and k of a weight of 8 bits in groups of 32 without minimums.
using PairWeight = std::tuple<In<uint8_t>, In<int16_t>, In<int32_t>, int, int>;
// The operation and the first of its rows that a pair is for, and its two weights.
using PyPair = std::tuple<int, int, PairWeight, PairWeight>;

int load_adapter(Runner& runner, const std::vector<PyPair>& pairs);
void unload_adapter(Runner& runner, int number);
// Throws std::invalid_argument where a batch names an adapter that is not loaded.
void check_adapters(const Runner& runner, const In<int32_t>& adapters, size_t num_sequences);

}  // namespace headrace
