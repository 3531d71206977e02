// Single operations in the Python module, for tests.
#include "bind_common.h"

namespace headrace {
namespace {

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

}  // namespace

void bind_ops(nb::module_& m) {
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
