// Arrays and operands as the files of the Python module take them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "ops.h"
#include "tiers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {

template <typename T>
using In = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
using MaybeI16 = std::optional<In<int16_t>>;
using MaybeI32 = std::optional<In<int32_t>>;

inline const Tier& tier_named(const std::string& name) {
  const Tier* tier = find_tier(name.c_str());
  if (tier == nullptr) throw std::invalid_argument("no such kernel tier here: " + name);
  return *tier;
}

inline PackedWeight weight_of(In<uint8_t> codes, In<int16_t> scales, MaybeI16 mins, In<int32_t> row, int n, int k, int bits,
                       int group) {
  return {codes.data(), scales.data(), mins ? mins->data() : nullptr, row.data(), n, k, bits, group};
}

inline NormGain gain_of(In<int32_t> gain, int exponent, std::tuple<int, int> eps) {
  return {gain.data(), exponent, std::get<0>(eps), std::get<1>(eps)};
}

inline void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

void bind_lanes(nb::module_& m);
void bind_ops(nb::module_& m);           // single operations, for tests
void bind_parallel_for(nb::module_& m);  // the task that a hook calls

}  // namespace headrace
