// What rows.inl gains from AVX2 intrinsics. Included by ops_avx2.cpp before it.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// Even and odd lanes are multiplied apart; count is a multiple of 8.
inline void mul_round(const int32_t* a, const int32_t* b, int step, int count, int shift, int32_t* out, bool add) {
  const __m256i half = _mm256_set1_epi64x(int64_t(1) << (shift - 1)), repeated = _mm256_set1_epi32(b[0]);
  const __m128i right = _mm_cvtsi32_si128(shift), left = _mm_cvtsi32_si128(32 - shift);
  for (int i = 0; i < count; i += 8) {
    const __m256i x = load(a + i), y = step ? load(b + i) : repeated;
    const __m256i even = _mm256_add_epi64(_mm256_mul_epi32(x, y), half);
    const __m256i odd = _mm256_add_epi64(_mm256_mul_epi32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32)), half);
    const __m256i z = _mm256_blend_epi32(_mm256_srl_epi64(even, right), _mm256_sll_epi64(odd, left), 0xAA);
    store(out + i, add ? _mm256_add_epi32(z, x) : z);
  }
}

inline int64_t sum_squares(const int32_t* x, int count) {
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < count; i += 8) {
    const __m256i v = load(x + i), w = _mm256_srli_epi64(v, 32);
    sum = _mm256_add_epi64(sum, _mm256_add_epi64(_mm256_mul_epi32(v, v), _mm256_mul_epi32(w, w)));
  }
  alignas(32) int64_t lanes[4];
  store(lanes, sum);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
