// Runs the painted vectors of tests/vectors through one instruction set: the C++ twin of tests/kernels/vectors.py.
//
//   vectors TIER FILE...     prints a line a file; exit code 1 when an output differs, 3 when TIER cannot run here
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>

#include "../../src/native/tiers.h"
#include "sha256.h"

using namespace headrace;

namespace {

using Ints = std::vector<int64_t>;

struct Case {
  std::map<std::string, int64_t> numbers;
  std::string sha256;
  int64_t operator[](const char* name) const { return numbers.at(name); }
};

struct Document {
  std::string operation;
  std::vector<Case> cases;
};

std::string quoted(const std::string& text, size_t* at) {
  const size_t end = text.find('"', *at + 1);
  const std::string out = text.substr(*at + 1, end - *at - 1);
  *at = end + 1;
  return out;
}

// The files are JSON of a fixed kind: an operation's name and flat objects of integers with one digest.
Document read(const char* path) {
  std::stringstream stream;
  stream << std::ifstream(path).rdbuf();
  const std::string text = stream.str();
  Document out;
  std::string name;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '{') {
      if (!out.operation.empty()) out.cases.emplace_back();
      ++at;
    } else if (text[at] == '"') {
      const std::string word = quoted(text, &at);
      if (name == "operation") out.operation = word;
      else if (name == "sha256") out.cases.back().sha256 = word;
      else { name = word; continue; }
      name.clear();
    } else if (std::isdigit(text[at]) || text[at] == '-') {
      char* end;
      out.cases.back().numbers[name] = std::strtoll(text.c_str() + at, &end, 10);
      at = size_t(end - text.c_str());
      name.clear();
    } else {
      ++at;
    }
  }
  return out;
}

// ---- painting: see cases.painted and vectors.vector ------------------------------------------------------

Ints painted(int64_t count, int64_t low, int64_t high, int64_t start = 0) {
  Ints out;
  for (int64_t i = start; i < start + count; ++i) out.push_back(low + (i * i * 7 + i * 13 + 5) % 251 * (high - low) / 250);
  return out;
}

Ints vector(int64_t all_bits, int64_t count, int64_t start = 0) {
  const int64_t bits = all_bits < 54 ? all_bits : 54;
  Ints out = painted(count, -(int64_t(1) << bits) + 1, (int64_t(1) << bits) - 1, start);
  for (int64_t i = 0; i < count; ++i) out[i] = out[i] * (int64_t(1) << (all_bits - bits)) >> (i / 32 % 4 * 3);
  return out;
}

template <typename T>
std::vector<T> as(const Ints& x) {
  return std::vector<T>(x.begin(), x.end());
}

template <typename T>
void add(Sha256* sha, const std::vector<T>& x) {
  sha->add(x.data(), x.size() * sizeof(T));
}

void add(Sha256* sha, int64_t x) { sha->add(&x, sizeof(x)); }

// Memory for vectors of width k.
struct Vectors {
  Vectors(int rows, int k)
      : k(k), codes(size_t(rows) * k + 64), scales(size_t(rows) * k / kBlock + 64), sums(scales), rounded(scales),
        exponent(size_t(rows)) {}
  Activations view() { return {codes.data(), scales.data(), sums.data(), rounded.data(), exponent.data(), k}; }
  void add_to(Sha256* sha) {
    const size_t blocks = size_t(k) / kBlock;
    sha->add(codes.data(), size_t(k));
    for (auto* words : {&scales, &sums, &rounded}) sha->add(words->data(), blocks * 2);
    sha->add(exponent.data(), 4);
  }
  int k;
  std::vector<int8_t> codes;
  std::vector<int16_t> scales, sums, rounded;
  std::vector<int32_t> exponent;
};

struct Gain {
  explicit Gain(int k, int louder = 0) : values(as<int32_t>(painted(k, -(1 << 22), (1 << 23) - 1, 7))) {
    view = {values.data(), -22 + louder, 1407374884, -47};  // epsilon 1e-5
  }
  std::vector<int32_t> values;
  NormGain view;
};

struct Weight {
  explicit Weight(const Case& c) {
    const int n = int(c["n"]), k = int(c["k"]), bits = int(c["bits"]), group = int(c["group"]);
    const int tiles = (n + 15) / 16, groups = k / group, supers = (groups + 3) / 4;
    codes = as<uint8_t>(painted(int64_t(tiles) * k * 2 * bits, 0, 255));
    scales = as<int16_t>(painted(int64_t(tiles) * groups * 16, -32767, 32767, 1));
    mins = as<int16_t>(painted(int64_t(tiles) * supers * 64, -32767, 32767, 2));
    for (size_t i = 0; i < mins.size(); ++i)
      if (int(i / 64) % supers * 4 + int(i % 4) >= groups) mins[i] = 0;
    for (const Ints& part : {painted(tiles * 16, 1 << 14, (1 << 15) - 1, 3), painted(tiles * 16, -55, -30, 4),
                             painted(tiles * 16, 0, 14, 5)})
      row.insert(row.end(), part.begin(), part.end());
    if (!c["mins"]) std::fill(row.begin() + tiles * 32, row.end(), 0);
    view = {codes.data(), scales.data(), c["mins"] ? mins.data() : nullptr, row.data(), n, k, bits, group};
  }
  std::vector<uint8_t> codes;
  std::vector<int16_t> scales, mins;
  std::vector<int32_t> row;
  PackedWeight view;
};

// ---- operations --------------------------------------------------------------------------------------------

void quantize_i32(const Tier& t, const Case& c, Sha256* sha) {
  Vectors out(1, int(c["k"]));
  t.quantize_i32(as<int32_t>(vector(c["bits"], c["k"])).data(), int(c["exponent"]), out.view(), 0);
  out.add_to(sha);
}

void quantize_i64(const Tier& t, const Case& c, Sha256* sha) {
  Vectors out(1, int(c["k"]));
  t.quantize_i64(vector(c["bits"], c["k"]).data(), int(c["exponent"]), out.view(), 0);
  out.add_to(sha);
}

void norm(const Tier& t, const Case& c, Sha256* sha) {
  const int k = int(c["k"]);
  Vectors out(1, k);
  std::vector<int32_t> scratch(k);
  t.norm_quantize(as<int32_t>(vector(c["bits"], k)).data(), Gain(k).view, int(c["fraction_bits"]), out.view(), 0,
                  scratch.data());
  out.add_to(sha);
}

void head_norm(const Tier& t, const Case& c, Sha256* sha) {
  const int k = int(c["k"]);
  const Gain gain(k, int(c["louder"]));
  auto x = as<int32_t>(vector(c["bits"], k));
  int64_t clipped = 0;
  t.norm_rescale(x.data(), k, gain.view, int(c["fraction_bits"]), &clipped);
  add(sha, x);
  add(sha, clipped);
}

void rope(const Tier& t, const Case& c, Sha256* sha) {
  const int d = int(c["head_dim"]), limit = 1 << 30;
  const auto low = as<int32_t>(painted(256 * d, -limit, limit, 1)), high = as<int32_t>(painted(2 * d, -limit, limit, 2));
  std::vector<int32_t> turn(d);
  auto x = as<int32_t>(vector(c["bits"], d));
  int64_t clipped = 0;
  t.rotary({low.data(), high.data()}, d, int(c["position"]), turn.data());
  t.rope(x.data(), d, turn.data(), &clipped);
  add(sha, x);
  add(sha, clipped);
}

std::vector<int32_t> shifted(const Ints& x, int places) {
  std::vector<int32_t> out;
  for (int64_t v : x) out.push_back(int32_t(v >> places));
  return out;
}

void attend(const Tier& t, const Case& c, Sha256* sha) {
  const int d = int(c["head_dim"]), keys = int(c["keys"]), f = int(c["fraction_bits"]), rows = int(c["rows"]);
  const size_t count = size_t(keys + 15) / 16, bytes = kv_tile_bytes(d);
  std::vector<uint8_t> memory(count * bytes);
  for (int at = 0; at < keys; ++at)
    t.land(memory.data() + at / 16 * bytes, at % 16, shifted(vector(c["bits"], d, 11 * at), at % 5).data(),
           shifted(vector(c["bits"], d, 17 * at + 3), at % 3).data(), d, f);
  add(sha, memory);

  std::vector<const uint8_t*> tiles;
  for (size_t i = 0; i < count; ++i) tiles.push_back(memory.data() + i * bytes);
  std::vector<std::vector<int32_t>> q, out(c["rows"], std::vector<int32_t>(c["head_dim"]));
  std::vector<const int32_t*> q_at;
  std::vector<int32_t*> out_at;
  std::vector<int32_t> visible;
  for (int i = 0; i < rows; ++i) {
    q.push_back(as<int32_t>(vector(c["bits"], d, 29 * i + 1)));
    visible.push_back(keys - 3 * i < 1 ? 1 : keys - 3 * i);
  }
  for (int i = 0; i < rows; ++i) q_at.push_back(q[i].data()), out_at.push_back(out[i].data());
  std::vector<uint8_t> scratch(attend_scratch_bytes(rows, keys, d) + 64);
  uint8_t* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
  const std::map<int, std::pair<int, int>> scales = {{32, {547683195, -31}}, {64, {774541002, -32}}, {96, {632410080, -32}}, {128, {547683195, -32}}, {256, {774541002, -33}}};
  std::vector<int64_t> clips(size_t(rows), 0);
  t.attend({d, scales.at(d).first, scales.at(d).second, f}, tiles.data(), q_at.data(), visible.data(), rows, out_at.data(),
           aligned, clips.data());
  for (const auto& row : out) add(sha, row);
  add(sha, std::accumulate(clips.begin(), clips.end(), int64_t(0)));
}

void silu_mul(const Tier& t, const Case& c, Sha256* sha) {
  const int k = int(c["k"]), f = int(c["fraction_bits"]);
  Vectors out(1, k);
  std::vector<int32_t> table;
  for (int i = 0; i < 2049; ++i) table.push_back(i * 8191);
  std::vector<int64_t> scratch(k);
  t.silu_mul_quantize(as<int32_t>(vector(c["bits"], k)).data(), as<int32_t>(vector(c["bits"], k, 5)).data(), table.data(),
                      f, out.view(), 0, scratch.data());
  out.add_to(sha);
}

void embed(const Tier& t, const Case& c, Sha256* sha) {
  const Weight w(c);
  std::vector<int32_t> out(c["k"]);
  int64_t clipped = 0;
  t.embed(w.view, int(c["token"]), 16, out.data(), &clipped);
  add(sha, out);
  add(sha, clipped);
}

void project(const Tier& t, const Case& c, Sha256* sha) {
  const Weight w(c);
  const int k = int(c["k"]), n = int(c["n"]), rows = int(c["rows"]);
  const auto bias = as<int32_t>(painted(n, -(1 << 20), 1 << 20, 6));
  Vectors x(rows, k);
  std::vector<int32_t> y;
  for (int i = 0; i < rows; ++i) {
    t.quantize_i32(as<int32_t>(vector(24, k, 31 * i)).data(), -16, x.view(), i);
    for (int64_t v : painted(n, -(1 << 22), 1 << 22, 37 * i)) y.push_back(int32_t(v));
  }
  std::vector<int64_t> clips(size_t(rows), 0);
  t.project(w.view, x.view(), 0, rows, 0, (n + 15) / 16, bias.data(), true, y.data(), n, 16, clips.data());
  add(sha, y);
  add(sha, std::accumulate(clips.begin(), clips.end(), int64_t(0)));
}

using Operation = void (*)(const Tier&, const Case&, Sha256*);
const std::map<std::string, Operation> kOperations = {
    {"quantize_i32", quantize_i32}, {"quantize_i64", quantize_i64}, {"norm", norm},   {"head_norm", head_norm},
    {"rope", rope},                 {"attend", attend},             {"embed", embed}, {"silu_mul", silu_mul},
    {"project", project}};

// The number of cases whose output differs.
int check(const Tier& tier, const Document& document) {
  int wrong = 0;
  for (const Case& c : document.cases) {
    Sha256 sha;
    kOperations.at(document.operation)(tier, c, &sha);
    if (sha.hex() == c.sha256) continue;
    ++wrong;
    std::printf("  differs:");
    for (const auto& [name, value] : c.numbers) std::printf(" %s=%lld", name.c_str(), static_cast<long long>(value));
    std::printf("\n");
  }
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: vectors TIER FILE...\n"), 2;
  const Tier* tier = find_tier(argv[1]);
  if (tier == nullptr) return std::fprintf(stderr, "tier %s cannot run here\n", argv[1]), 3;
  int wrong = 0;
  for (int i = 2; i < argc; ++i) {
    const Document document = read(argv[i]);
    const int differ = check(*tier, document);
    std::printf("%s %s: %zu cases, %d differ\n", argv[1], document.operation.c_str(), document.cases.size(), differ);
    wrong += differ;
  }
  return wrong != 0;
}
