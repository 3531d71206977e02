// What rows.inl gains from AVX-512 intrinsics. Included by ops_avx512.cpp before it.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
inline void store512(void* p, __m512i v) { _mm512_storeu_si512(p, v); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Even and odd lanes are multiplied apart; count is a multiple of 16.
inline void mul_round(const int32_t* a, const int32_t* b, int step, int count, int shift, int32_t* out, bool add) {
  const __m512i half = _mm512_set1_epi64(int64_t(1) << (shift - 1)), repeated = _mm512_set1_epi32(b[0]);
  const __m128i right = _mm_cvtsi32_si128(shift), left = _mm_cvtsi32_si128(32 - shift);
  for (int i = 0; i < count; i += 16) {
    const __m512i x = load512(a + i), y = step ? load512(b + i) : repeated;
    const __m512i even = _mm512_add_epi64(_mm512_mul_epi32(x, y), half);
    const __m512i odd = _mm512_add_epi64(_mm512_mul_epi32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(y, 32)), half);
    const __m512i z = _mm512_mask_blend_epi32(0xAAAA, _mm512_srl_epi64(even, right), _mm512_sll_epi64(odd, left));
    store512(out + i, add ? _mm512_add_epi32(z, x) : z);
  }
}

inline int64_t sum_squares(const int32_t* x, int count) {
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < count; i += 16) {
    const __m512i v = load512(x + i), w = _mm512_srli_epi64(v, 32);
    sum = _mm512_add_epi64(sum, _mm512_add_epi64(_mm512_mul_epi32(v, v), _mm512_mul_epi32(w, w)));
  }
  return _mm512_reduce_add_epi64(sum);
}

// A table entry and the next one are gathered as one 64-bit word; count is a multiple of 16.
inline void sigmoid(const int32_t* x, const int32_t* table, int fraction_bits, int count, int32_t* out) {
  const __m128i step = _mm_cvtsi32_si128(fraction_bits - 6);
  const __m512i limit = _mm512_set1_epi32(16 << fraction_bits), most = _mm512_set1_epi32((16 << fraction_bits) - 1);
  const __m512i lowest = _mm512_set1_epi32(-(16 << fraction_bits)), half = _mm512_set1_epi32(1 << (fraction_bits - 7));
  const __m512i mask = _mm512_set1_epi32((1 << (fraction_bits - 6)) - 1);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int i = 0; i < count; i += 16) {
    const __m512i g = load512(x + i);
    const __m512i inside = _mm512_add_epi32(_mm512_min_epi32(_mm512_max_epi32(g, lowest), most), limit);
    const __m512i index = _mm512_srl_epi32(inside, step), rest = _mm512_and_si512(inside, mask);
    const __m512i first = _mm512_i32gather_epi64(_mm512_castsi512_si256(index), table, 4);
    const __m512i second = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(index, 1), table, 4);
    const __m512i low = _mm512_permutex2var_epi32(first, even, second);
    const __m512i rise = _mm512_sub_epi32(_mm512_permutex2var_epi32(first, odd, second), low);
    const __m512i between = _mm512_sra_epi32(_mm512_add_epi32(_mm512_mullo_epi32(rise, rest), half), step);
    const __m512i s = _mm512_maskz_add_epi32(_mm512_cmpge_epi32_mask(g, lowest), low, between);
    store512(out + i, _mm512_mask_mov_epi32(s, _mm512_cmpge_epi32_mask(g, limit), _mm512_set1_epi32(1 << 24)));
  }
}

// x * c - sign * y * s for 8 pairs, rounded to Q0; cs holds a cosine and a sine in each 64-bit lane.
inline __m512i turn(__m256i x, __m256i y, __m512i cs, bool minus) {
  const __m512i sine = _mm512_srli_epi64(cs, 32), half = _mm512_set1_epi64(1 << 29);
  const __m512i a = _mm512_add_epi64(_mm512_mul_epi32(_mm512_cvtepi32_epi64(x), cs), half);
  const __m512i b = _mm512_mul_epi32(_mm512_cvtepi32_epi64(y), sine);
  return _mm512_srai_epi64(minus ? _mm512_sub_epi64(a, b) : _mm512_add_epi64(a, b), 30);
}

void rope(int32_t* x, int head_dim, const int32_t* cos_sin, int64_t* clipped) {
  const __m512i most = _mm512_set1_epi64(kInt32Max);
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 8) {
    const __m256i a = load256(x + i), b = load256(x + half + i);
    const __m512i cs = load512(cos_sin + 2 * i);
    const __m512i first = turn(a, b, cs, true), second = turn(b, a, cs, false);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + i), _mm512_cvtepi64_epi32(first));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + half + i), _mm512_cvtepi64_epi32(second));
    const unsigned outside = _mm512_cmpgt_epi64_mask(_mm512_abs_epi64(first), most) |
                             unsigned(_mm512_cmpgt_epi64_mask(_mm512_abs_epi64(second), most)) << 8;
    if (__builtin_expect(outside == 0, 1)) continue;
    alignas(64) int64_t wide[16];
    store512(wide, first);
    store512(wide + 8, second);
    for (int j = 0; j < 8; ++j) {
      x[i + j] = saturate(wide[j], clipped);
      x[half + i + j] = saturate(wide[8 + j], clipped);
    }
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
