// The AVX2 tier.
#define HEADRACE_ISA avx2
#define HEADRACE_TIER_NAME "avx2"
#define HEADRACE_PROJECT project_avx2

#include <immintrin.h>

#include <cstring>

#include "project.h"
#include "rules.inl"
#include "rows.inl"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

inline __m256i broadcast4(const void* bytes) {
  int32_t word;
  std::memcpy(&word, bytes, 4);
  return _mm256_set1_epi32(word);
}

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// vpmaddubsw of |k| and q with k's sign: a pair is at most 2 * 127 * 127 = 32258, so it cannot saturate.
inline void score_tile(const int8_t* codes, const int8_t* q, int head_dim, int32_t* out) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int b = 0; b < head_dim / kBlock; ++b) {
    for (int half = 0; half < 2; ++half) {
      __m256i acc = _mm256_setzero_si256();
      for (int p = b * 8; p < b * 8 + 8; ++p) {
        const __m256i k = load(codes + p * 64 + half * 32);
        const __m256i pair = _mm256_maddubs_epi16(_mm256_abs_epi8(k), _mm256_sign_epi8(broadcast4(q + 4 * p), k));
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pair, ones));
      }
      store(out + b * kTile + half * 8, acc);
    }
  }
}

// c = 128 hi + lo with lo <= 127 and hi <= 129: a pair is at most 2 * 129 * 127 = 32766, no saturation.
inline void value_tile(const int8_t* codes, const int32_t* c, int head_dim, int32_t* acc) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int b = 0; b < head_dim / kBlock; ++b) {
    uint8_t lo[kTile], hi[kTile];
    for (int j = 0; j < kTile; ++j) {
      lo[j] = uint8_t(c[b * kTile + j] & 127);
      hi[j] = uint8_t(c[b * kTile + j] >> 7);
    }
    for (int d = b * kBlock; d < b * kBlock + kBlock; d += 8) {
      __m256i low = load(acc + d), high = _mm256_setzero_si256();
      for (int g = 0; g < 4; ++g) {
        const __m256i v = load(codes + (g * head_dim + d) * 4);
        low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_maddubs_epi16(broadcast4(lo + 4 * g), v), ones));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_maddubs_epi16(broadcast4(hi + 4 * g), v), ones));
      }
      store(acc + d, _mm256_add_epi32(low, _mm256_slli_epi32(high, 7)));
    }
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

#include "attend.inl"
#include "tier.inl"
