// Adapters as Python gives them, checked against the program that they are for.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <tuple>
#include <vector>

#include "runner.h"

namespace headrace {

template <typename T>
using Borrowed = nanobind::ndarray<const T, nanobind::c_contig, nanobind::device::cpu>;
// Codes, scales, rows, n and k of a weight of 8 bits in groups of 32 without minimums.
using PairWeight = std::tuple<Borrowed<uint8_t>, Borrowed<int16_t>, Borrowed<int32_t>, int, int>;
// The operation and the first of its rows that a pair is for, and its two weights.
using PyPair = std::tuple<int, int, PairWeight, PairWeight>;

int load_adapter(Runner& runner, const std::vector<PyPair>& pairs);
void unload_adapter(Runner& runner, int number);
// Throws std::invalid_argument where a batch names an adapter that is not loaded.
void check_adapters(const Runner& runner, const Borrowed<int32_t>& adapters, size_t num_sequences);

}  // namespace headrace
