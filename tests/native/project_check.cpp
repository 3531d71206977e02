// Compares every projection kernel that this build and processor have with the portable one, or times one.
//
//   project_check                                        equality; prints a digest that no platform may change
//   project_check TIER VECTORS N K BITS GROUP MINS(0|1)  multiply-adds and weight bytes a second
//
// Built by hand (tests/native/README.md), for the machine or for qemu.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "../../src/native/project.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace headrace;

namespace {

using Project = decltype(&project_portable);

struct Kernel {
  const char* name;
  Project run;
};

std::vector<Kernel> kernels() {
  std::vector<Kernel> found{{"portable", project_portable}};
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  const bool amx = avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("amx-int8") &&
                   syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", project_avx2});
  if (avx512) found.push_back({"avx512", project_avx512});
  if (amx) found.push_back({"amx", project_amx});
#elif defined(__aarch64__)
  found.push_back({"neon", project_neon});
#endif
  return found;
}

uint64_t state = 88172645463325252u;

int pick(int low, int high) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return int(low + int64_t((state >> 20) % uint64_t(int64_t(high) - low + 1)));
}

enum Mode { kTypical, kWild, kExtreme, kHuge, kNumModes };

// One projection with inputs of a kind: real-looking, any exponents, every value at its limit, exponents of 31 bits.
struct Case {
  int m, n, k, bits, group;
  std::vector<uint8_t> codes;
  std::vector<int16_t> scales, mins, x_scales, x_sums, x_rounded;
  std::vector<int32_t> row, x_exponent, bias;
  std::vector<int8_t> x_codes;

  Case(int m_, int n_, int k_, int bits_, int group_, bool with_mins, bool with_bias, Mode mode)
      : m(m_), n(n_), k(k_), bits(bits_), group(group_) {
    const int tiles = (n + 15) / 16, groups = k / group, lanes = tiles * 16;
    codes.resize(size_t(lanes) * k * bits / 8);
    scales.resize(size_t(lanes) * groups);
    mins.resize(with_mins ? size_t(lanes) * ((groups + 3) / 4 * 4) : 0);
    row.resize(size_t(lanes) * 3);
    bias.resize(with_bias ? n : 0);
    const int sign = pick(0, 2);  // extreme: all positive, all negative, mixed
    const auto value = [&](int limit) {
      if (mode != kExtreme) return pick(-limit, limit);
      return sign == 0 || (sign == 2 && pick(0, 1)) ? limit : -limit;
    };
    for (auto& c : codes) c = uint8_t(mode == kExtreme ? value(1) > 0 ? 255 : 0 : pick(0, 255));
    for (auto& s : scales) s = int16_t(value(32767));
    for (auto& v : mins) v = int16_t(value(32767));
    for (auto& b : bias) b = pick(-INT32_MAX, INT32_MAX) >> (mode == kTypical ? 8 : 0);
    const int exponent = pick(-45, -15);
    const auto spread = [&](int around) {
      return mode == kHuge ? pick(0, 1) ? INT32_MIN : INT32_MAX : around + (mode == kWild ? pick(-60, 60) : pick(-2, 2));
    };
    for (int r = 0; r < n; ++r) {
      row[r] = pick(0, 9) == 0 ? 0 : mode == kExtreme ? 32767 : pick(16384, 32767);
      row[lanes + r] = spread(exponent);
      row[2 * lanes + r] = with_mins ? pick(0, mode == kTypical ? 3 : 14) : 0;
    }
    fill_vectors(mode, value, spread);
  }

  template <class Value, class Spread>
  void fill_vectors(Mode mode, Value value, Spread spread) {
    const int blocks = k / 32;
    for (int i = 0; i < m; ++i) x_exponent.push_back(spread(-18));
    for (int i = 0; i < m * blocks; ++i) {
      int sum = 0;
      for (int j = 0; j < 32; ++j) x_codes.push_back(int8_t(value(127))), sum += x_codes.back();
      x_scales.push_back(int16_t(mode == kExtreme ? 16513 : pick(0, 16513)));
      x_sums.push_back(int16_t(sum));
      x_rounded.push_back(int16_t((x_scales.back() * sum + 4096) >> 13));
    }
  }

  PackedWeight weight() const {
    return {codes.data(), scales.data(), mins.empty() ? nullptr : mins.data(), row.data(), n, k, bits, group};
  }
  Activations vectors() {
    return {x_codes.data(), x_scales.data(), x_sums.data(), x_rounded.data(), x_exponent.data(), k};
  }
  int stride() const { return (n + 15) / 16 * 16; }

  // Clips of each vector are counted apart.
  std::vector<int32_t> run(Project project, bool residual, std::vector<int64_t>* clipped) {
    clipped->assign(size_t(m), 0);
    std::vector<int32_t> y(size_t(m) * stride());
    for (size_t i = 0; i < y.size(); ++i) y[i] = int32_t(i * 2654435761u) >> 4;
    project(weight(), vectors(), 0, m, 0, stride() / 16, bias.empty() ? nullptr : bias.data(), residual, y.data(),
            stride(), 16, clipped->data());
    return y;
  }
};

uint64_t hash(uint64_t h, const std::vector<int32_t>& y) {
  for (int32_t v : y) h = (h ^ uint32_t(v)) * 1099511628211u;
  return h;
}

Case random_case(int i) {
  constexpr int kSizes[] = {1, 2, 3, 4, 5, 8, 13, 16, 17, 24, 33}, kRows[] = {1, 15, 16, 17, 40, 64};
  constexpr int kWidths[] = {64, 128, 192, 320, 576, 1088};
  const int group = pick(0, 1) ? 32 : 64, bits = pick(0, 1) ? 4 : 8;
  const int m = kSizes[pick(0, 10)], n = kRows[pick(0, 5)], width = i % 97 == 0 ? 16448 : kWidths[pick(0, 5)];
  const int k = group == 32 && pick(0, 1) ? width - 32 : width;  // an odd number of blocks
  const bool mins = pick(0, 1), bias = pick(0, 3) == 0;
  return Case(m, n, k, bits, group, mins, bias, Mode(i % kNumModes));
}

int check() {
  uint64_t digest = 14695981039346656037u;
  int failures = 0;
  constexpr int kCases = 400;
  for (int i = 0; i < kCases; ++i) {
    Case c = random_case(i);
    const bool residual = pick(0, 1);
    std::vector<int64_t> expected_clips, clips;
    const std::vector<int32_t> expected = c.run(project_portable, residual, &expected_clips);
    digest = hash(digest, expected) + uint64_t(std::accumulate(expected_clips.begin(), expected_clips.end(), int64_t(0)));
    for (const Kernel& kernel : kernels()) {
      if (c.run(kernel.run, residual, &clips) == expected && clips == expected_clips) continue;
      ++failures;
      std::printf("%s differs: case %d, %d x %d x %d, %d bits, group %d\n", kernel.name, i, c.m, c.n, c.k, c.bits, c.group);
    }
  }
  for (const Kernel& kernel : kernels()) std::printf("%s ", kernel.name);
  std::printf("| %d cases, %d failures, digest %016llx\n", kCases, failures, static_cast<unsigned long long>(digest));
  return failures != 0;
}

int bench(const Kernel& kernel, int m, int n, int k, int bits, int group, bool mins) {
  Case c(m, n, k, bits, group, mins, false, kTypical);
  std::vector<double> seconds;
  for (double total = 0; total < 1 || seconds.size() < 5; total += seconds.back()) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<int64_t> clipped;
    c.run(kernel.run, false, &clipped);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double macs = double(m) * n * k, bytes = double(c.codes.size() + 2 * c.scales.size() + 2 * c.mins.size());
  for (const double s : {seconds[0], seconds[seconds.size() / 2]})
    std::printf("%s %.1f GMAC/s %.1f GB/s\n", s == seconds[0] ? "best" : "median", macs / s * 1e-9,
                bytes / s * 1e-9);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) return check();
  for (const Kernel& kernel : kernels())
    if (argc == 8 && std::strcmp(kernel.name, argv[1]) == 0)
      return bench(kernel, std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]),
                   std::atoi(argv[6]), std::atoi(argv[7]) != 0);
  std::fprintf(stderr, "usage: project_check [TIER VECTORS N K BITS GROUP MINS]\n");
  return 2;
}
