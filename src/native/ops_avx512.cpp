// The AVX-512 tier (F, BW, VL, DQ, VNNI).
#define HEADRACE_ISA avx512
#define HEADRACE_TIER_NAME "avx512"
#define HEADRACE_PROJECT project_avx512

#include <immintrin.h>

#include <cstring>

#include "project.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

inline __m512i broadcast4(const void* bytes) {
  int32_t word;
  std::memcpy(&word, bytes, 4);
  return _mm512_set1_epi32(word);
}

// vpdpbusd wants one unsigned operand: keys are read as k + 128 and 128 * sum(q) is taken off first.
inline void score_tile(const int8_t* codes, const int8_t* q, const int16_t* sums, int head_dim, int32_t* out) {
  const __m512i flip = _mm512_set1_epi8(char(0x80));
  for (int b = 0; b < head_dim / kBlock; ++b) {
    __m512i even = _mm512_set1_epi32(-128 * sums[b]), odd = _mm512_setzero_si512();
    for (int p = b * 8; p < b * 8 + 8; p += 2) {
      const __m512i k0 = _mm512_xor_si512(_mm512_load_si512(codes + p * 64), flip);
      const __m512i k1 = _mm512_xor_si512(_mm512_load_si512(codes + p * 64 + 64), flip);
      even = _mm512_dpbusd_epi32(even, k0, broadcast4(q + 4 * p));
      odd = _mm512_dpbusd_epi32(odd, k1, broadcast4(q + 4 * p + 4));
    }
    _mm512_store_si512(out + b * kTile, _mm512_add_epi32(even, odd));
  }
}

// c = 256 hi + lo, each an unsigned byte; |hi part| and |lo part| of 512 positions stay far below 2^31.
inline void value_tile(const int8_t* codes, const int32_t* c, int head_dim, int32_t* acc) {
  for (int b = 0; b < head_dim / kBlock; ++b) {
    alignas(16) uint8_t lo[kTile], hi[kTile];
    const __m512i w = _mm512_load_si512(c + b * kTile);
    _mm_store_si128(reinterpret_cast<__m128i*>(lo), _mm512_cvtepi32_epi8(w));
    _mm_store_si128(reinterpret_cast<__m128i*>(hi), _mm512_cvtepi32_epi8(_mm512_srli_epi32(w, 8)));
    for (int d = b * kBlock; d < b * kBlock + kBlock; d += 16) {
      __m512i low = _mm512_load_si512(acc + d), high = _mm512_setzero_si512();
      for (int g = 0; g < 4; ++g) {
        const __m512i v = _mm512_load_si512(codes + (g * head_dim + d) * 4);
        low = _mm512_dpbusd_epi32(low, broadcast4(lo + 4 * g), v);
        high = _mm512_dpbusd_epi32(high, broadcast4(hi + 4 * g), v);
      }
      _mm512_store_si512(acc + d, _mm512_add_epi32(low, _mm512_slli_epi32(high, 8)));
    }
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

#include "vector_ops.inl"
