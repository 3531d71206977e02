// What the AVX-512 and AMX projections share: minimum terms and the last step, 16 rows to a register.
#pragma once

#include <immintrin.h>

#include "project_chunk.h"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own headers
#define UNROLL _Pragma("GCC unroll 16")

namespace headrace {
namespace {

inline __m512i broadcast(const void* four_bytes) {
  int32_t word;
  __builtin_memcpy(&word, four_bytes, 4);
  return _mm512_set1_epi32(word);
}

// Minimum terms of M vectors: the four of a supergroup are summed below 2^31, then shifted.
template <int M>
void min_dot(const int16_t* mins, const Shape& s, const GroupSums* x, int32_t* out) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  const __m512i shift = _mm512_set1_epi32(s.min_shift);
  __m512i acc[M];
  for (int m = 0; m < M; ++m) acc[m] = _mm512_setzero_si512();
  for (int g = 0; g < s.supergroups; ++g, mins += 64, x += M) {
    const __m512i a = _mm512_loadu_si512(mins), b = _mm512_loadu_si512(mins + 32);
    const __m512i first = _mm512_permutex2var_epi32(a, even, b), second = _mm512_permutex2var_epi32(a, odd, b);
    UNROLL for (int m = 0; m < M; ++m) {
      const __m512i half = _mm512_madd_epi16(first, broadcast(x[m].sum));
      const __m512i term = _mm512_dpwssd_epi32(half, second, broadcast(x[m].sum + 2));
      acc[m] = _mm512_add_epi32(acc[m], _mm512_srav_epi32(term, shift));
    }
  }
  for (int m = 0; m < M; ++m) _mm512_storeu_si512(out + kTile * m, acc[m]);
}

// a + b, or false where a sum leaves the symmetric int32 range.
inline bool add_exact(__m512i* a, __m512i b) {
  const __m512i sum = _mm512_add_epi32(*a, b);
  const __m512i wrapped = _mm512_and_si512(_mm512_xor_si512(*a, sum), _mm512_xor_si512(b, sum));
  const __mmask16 lowest = _mm512_cmpeq_epi32_mask(sum, _mm512_set1_epi32(INT32_MIN));
  *a = sum;
  return (_mm512_movepi32_mask(wrapped) | lowest) == 0;
}

// The odd lanes in the place of the even ones.
inline __m512i odd(__m512i x) { return _mm512_shuffle_epi32(x, _MM_PERM_DDBB); }

// The end of R3 for one vector, when nothing needs to be clipped; otherwise false, and nothing is written.
// |acc * mantissa| < 2^53 and |min_acc * min_mantissa| < 2^60. The shift stops one place early; adding
// 2^31 + 1 then rounds, and leaves a 32-bit number exactly when the result lies within +-2^30.
template <bool Mins>
inline bool finish_fast(const Rows& rows, const Output& out, int tile, int m, int exponent, const int32_t* acc,
                        const int32_t* min_acc) {
  if (!rows.fits(exponent)) return false;
  const __m512i a = _mm512_loadu_si512(acc), b = Mins ? _mm512_loadu_si512(min_acc) : a;
  const __m512i mantissa = _mm512_load_si512(rows.mantissa), min_mantissa = _mm512_load_si512(rows.min_mantissa);
  const __m512i less = _mm512_set1_epi32(int32_t(uint32_t(exponent) + 1));
  const __m512i shift = _mm512_sub_epi32(_mm512_load_si512(rows.places), less);
  const __m512i offset = _mm512_set1_epi64((int64_t(1) << 31) + 1), high = _mm512_set1_epi64(~int64_t(UINT32_MAX));
  __m512i even = _mm512_mul_epi32(a, mantissa), other = _mm512_mul_epi32(odd(a), odd(mantissa));
  if (Mins) {
    even = _mm512_add_epi64(even, _mm512_mul_epi32(b, min_mantissa));
    other = _mm512_add_epi64(other, _mm512_mul_epi32(odd(b), odd(min_mantissa)));
  }
  even = _mm512_add_epi64(_mm512_srav_epi64(even, _mm512_andnot_si512(high, shift)), offset);
  other = _mm512_add_epi64(_mm512_srav_epi64(other, _mm512_srli_epi64(shift, 32)), offset);
  if (_mm512_test_epi64_mask(_mm512_or_si512(even, other), high)) return false;
  const __m512i both = _mm512_mask_shuffle_epi32(even, 0xAAAA, other, _MM_PERM_CCAA);
  __m512i result = _mm512_sub_epi32(_mm512_srli_epi32(both, 1), _mm512_set1_epi32(1 << 30));
  const __mmask16 valid = __mmask16((1u << rows.count) - 1);
  int32_t* y = out.y + m * out.stride + tile * kTile;
  if (out.bias && !add_exact(&result, _mm512_maskz_loadu_epi32(valid, out.bias + tile * kTile))) return false;
  if (out.residual && !add_exact(&result, _mm512_maskz_loadu_epi32(valid, y))) return false;
  _mm512_mask_storeu_epi32(y, valid, result);
  return true;
}

inline void finish_vector(const Call& c, const Rows& rows, int tile, int m, const int32_t* acc, const int32_t* min_acc) {
  const int exponent = c.x.exponent[m];
  const bool done = min_acc ? finish_fast<true>(rows, c.out, tile, m, exponent, acc, min_acc)
                            : finish_fast<false>(rows, c.out, tile, m, exponent, acc, min_acc);
  if (!done) finish_tile(c.w, c.shape, c.x, c.out, tile, m, acc, min_acc);
}

}  // namespace
}  // namespace headrace
