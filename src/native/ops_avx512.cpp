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

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

#define HEADRACE_OWN_ATTEND
#include "vector_ops.inl"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// What the scores of one query need besides its codes.
struct ScorePlan {
  __m512i mantissa, base;  // 64-bit lanes: log2(e) / sqrt(d), and the shift before the key's exponent
  int r;
};

// Even or odd lanes of scores: clip(round(acc * mantissa / 2^n)). Shifts of 1 to 62 only.
inline __m512i scale_scores(__m512i acc, __m512i exponents, const ScorePlan& plan) {
  const __m512i one = _mm512_set1_epi64(1), limit = _mm512_set1_epi64(int64_t(1) << 30);
  const __m512i n = _mm512_sub_epi64(plan.base, exponents);
  const __m512i half = _mm512_sllv_epi64(one, _mm512_sub_epi64(n, one));
  const __m512i s = _mm512_srav_epi64(_mm512_add_epi64(_mm512_mul_epi32(acc, plan.mantissa), half), n);
  return _mm512_max_epi64(_mm512_min_epi64(s, limit), _mm512_sub_epi64(_mm512_setzero_si512(), limit));
}

inline __m512i finish_scores(__m512i acc, const int16_t* exponents, const ScorePlan& plan) {
  const __m512i wide = _mm512_cvtepi16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(exponents)));
  const __m512i even_e = _mm512_srai_epi64(_mm512_slli_epi64(wide, 32), 32), odd_e = _mm512_srai_epi64(wide, 32);
  const __m512i n0 = _mm512_sub_epi64(plan.base, even_e), n1 = _mm512_sub_epi64(plan.base, odd_e);
  const __m512i lowest = _mm512_set1_epi64(1), highest = _mm512_set1_epi64(62);
  const unsigned outside = _mm512_cmplt_epi64_mask(n0, lowest) | _mm512_cmpgt_epi64_mask(n0, highest) |
                           _mm512_cmplt_epi64_mask(n1, lowest) | _mm512_cmpgt_epi64_mask(n1, highest);
  if (__builtin_expect(outside != 0, 0)) {
    alignas(64) int32_t values[kTile];
    _mm512_store_si512(values, acc);
    const int64_t mantissa = _mm_cvtsi128_si64(_mm512_castsi512_si128(plan.mantissa));
    const int64_t base = _mm_cvtsi128_si64(_mm512_castsi512_si128(plan.base)), limit = int64_t(1) << 30;
    for (int j = 0; j < kTile; ++j) {
      const int64_t s = shift_round(values[j] * mantissa, base - exponents[j]);
      values[j] = int32_t(s > limit ? limit : s < -limit ? -limit : s);
    }
    return _mm512_load_si512(values);
  }
  const __m512i even = scale_scores(acc, even_e, plan);
  const __m512i odd = scale_scores(_mm512_srli_epi64(acc, 32), odd_e, plan);
  return _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}

// Scores of one query against 16 keys. vpdpbusd wants one unsigned operand: keys are read as k + 128, and
// 128 * sum(q) is taken off first. The block sums fit int16, so vpmaddwd multiplies them by their scale.
inline __m512i score_tile(const uint8_t* tile, const TileFields& at, const Query& q, int blocks, const ScorePlan& plan) {
  const __m512i flip = _mm512_set1_epi8(char(0x80));
  const int16_t* scales = reinterpret_cast<const int16_t*>(tile + at.key_scales);
  __m512i acc = _mm512_setzero_si512();
  for (int b = 0; b < blocks; ++b) {
    __m512i even = _mm512_set1_epi32(8 - 128 * q.sums[b]), odd = _mm512_setzero_si512();
    for (int p = b * 8; p < b * 8 + 8; p += 2) {
      even = _mm512_dpbusd_epi32(even, _mm512_xor_si512(_mm512_load_si512(tile + p * 64), flip), broadcast4(q.codes + 4 * p));
      odd = _mm512_dpbusd_epi32(odd, _mm512_xor_si512(_mm512_load_si512(tile + p * 64 + 64), flip),
                                broadcast4(q.codes + 4 * p + 4));
    }
    const __m256i s = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales + b * kTile));
    const __m512i c = _mm512_cvtepu16_epi32(_mm256_mulhrs_epi16(s, _mm256_set1_epi16(q.scales[b])));
    const __m512i narrow = _mm512_srai_epi32(_mm512_add_epi32(even, odd), 4);
    acc = _mm512_add_epi32(acc, _mm512_srai_epi32(_mm512_madd_epi16(narrow, c), plan.r));
  }
  return finish_scores(acc, reinterpret_cast<const int16_t*>(tile + at.key_exponent), plan);
}

// 2^-delta in Q16 for 16 lanes of delta >= 0: products of 16 bits, so vpmulhuw is t * f >> 16.
inline __m512i exp2_lanes(__m512i delta) {
  const __m256i f = _mm512_cvtepi32_epi16(delta);
  __m256i t = _mm256_sub_epi16(_mm256_set1_epi16(3496), _mm256_mulhi_epu16(_mm256_set1_epi16(454), f));
  t = _mm256_sub_epi16(_mm256_set1_epi16(15698), _mm256_mulhi_epu16(t, f));
  t = _mm256_sub_epi16(_mm256_set1_epi16(short(45423)), _mm256_mulhi_epu16(t, f));
  const __m256i carry = _mm256_srli_epi16(_mm256_mullo_epi16(t, f), 15);
  const __m512i product = _mm512_cvtepu16_epi32(_mm256_add_epi16(_mm256_mulhi_epu16(t, f), carry));
  const __m512i p = _mm512_sub_epi32(_mm512_set1_epi32(65536), product);
  const __m512i n = _mm512_min_epu32(_mm512_srli_epi32(delta, 16), _mm512_set1_epi32(31));
  const __m512i half = _mm512_srli_epi32(_mm512_sllv_epi32(_mm512_set1_epi32(1), n), 1);
  return _mm512_srlv_epi32(_mm512_add_epi32(p, half), n);
}

// acc[d] += sum over 16 positions of c * v, c = 256 hi + lo in two unsigned bytes.
inline void add_values(const uint8_t* codes, __m512i c, int head_dim, int b, int32_t* acc) {
  alignas(16) uint8_t lo[kTile], hi[kTile];
  _mm_store_si128(reinterpret_cast<__m128i*>(lo), _mm512_cvtepi32_epi8(c));
  _mm_store_si128(reinterpret_cast<__m128i*>(hi), _mm512_cvtepi32_epi8(_mm512_srli_epi32(c, 8)));
  __m512i low0 = _mm512_load_si512(acc + b * kBlock), low1 = _mm512_load_si512(acc + b * kBlock + 16);
  __m512i high0 = _mm512_setzero_si512(), high1 = _mm512_setzero_si512();
  for (int g = 0; g < 4; ++g) {
    const uint8_t* at = codes + (g * head_dim + b * kBlock) * 4;
    const __m512i v0 = _mm512_load_si512(at), v1 = _mm512_load_si512(at + 64);
    const __m512i l = broadcast4(lo + 4 * g), h = broadcast4(hi + 4 * g);
    low0 = _mm512_dpbusd_epi32(low0, l, v0);
    low1 = _mm512_dpbusd_epi32(low1, l, v1);
    high0 = _mm512_dpbusd_epi32(high0, h, v0);
    high1 = _mm512_dpbusd_epi32(high1, h, v1);
  }
  _mm512_store_si512(acc + b * kBlock, _mm512_add_epi32(low0, _mm512_slli_epi32(high0, 8)));
  _mm512_store_si512(acc + b * kBlock + 16, _mm512_add_epi32(low1, _mm512_slli_epi32(high1, 8)));
}

inline __mmask16 visible_lanes(int visible, int t) {
  const int left = visible - t * kTile;
  return left >= kTile ? 0xFFFF : __mmask16((1u << left) - 1);
}

// Scores become weights; returns their total. *top becomes the largest value exponent.
inline int64_t weigh(const uint8_t* const* tiles, const TileFields& at, int visible, int32_t best, int32_t* scores,
                     int* top) {
  __m512i total = _mm512_setzero_si512(), highest = _mm512_set1_epi32(INT16_MIN);
  for (int t = 0; t * kTile < visible; ++t) {
    const __mmask16 seen = visible_lanes(visible, t);
    const __m512i delta = _mm512_sub_epi32(_mm512_set1_epi32(best), _mm512_load_si512(scores + t * kTile));
    const __m512i w = _mm512_maskz_mov_epi32(seen, exp2_lanes(_mm512_maskz_mov_epi32(seen, delta)));
    _mm512_store_si512(scores + t * kTile, w);
    total = _mm512_add_epi64(total, _mm512_add_epi64(_mm512_srli_epi64(w, 32),
                                                     _mm512_and_si512(w, _mm512_set1_epi64(0xFFFFFFFF))));
    const __m512i e = _mm512_cvtepi16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(tiles[t] + at.value_exponent)));
    highest = _mm512_mask_max_epi32(highest, seen, highest, e);
  }
  *top = _mm512_reduce_max_epi32(highest);
  return _mm512_reduce_add_epi64(total);
}

// Adds one tile's weighted values. The weights of unseen positions are 0.
inline void mix_tile(const uint8_t* tile, const TileFields& at, const int32_t* weights, int top, int head_dim, int32_t* acc) {
  const __m512i e = _mm512_cvtepi16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(tile + at.value_exponent)));
  const __m512i n = _mm512_sub_epi32(_mm512_set1_epi32(16 + top), e);
  const __mmask16 some = _mm512_cmp_epu32_mask(n, _mm512_set1_epi32(31), _MM_CMPINT_LE);  // also drops n < 0: unseen
  const __m512i half = _mm512_sllv_epi32(_mm512_set1_epi32(1), _mm512_sub_epi32(n, _mm512_set1_epi32(1)));
  const __m512i w = _mm512_load_si512(weights);
  const int16_t* scales = reinterpret_cast<const int16_t*>(tile + at.value_scales);
  for (int b = 0; b < head_dim / kBlock; ++b) {
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(scales + b * kTile)));
    const __m512i product = _mm512_add_epi32(_mm512_mullo_epi32(w, a), half);
    add_values(tile + at.value_codes, _mm512_maskz_srlv_epi32(some, product, n), head_dim, b, acc);
  }
}

void attend(const AttentionShape& shape, const uint8_t* const* tiles, const int32_t* const* q, const int32_t* visible,
            int rows, int32_t* const* out, void* scratch, int64_t* clipped) {
  const int head_dim = shape.head_dim, blocks = head_dim / kBlock;
  const TileFields at(head_dim);
  int32_t* scores = static_cast<int32_t*>(scratch);
  for (int i = 0; i < rows; ++i) {
    Query query;
    make_query(q[i], shape, &query);
    const int r = dot_shift(blocks);
    const int base = -(15 + 4 + r + query.exponent + shape.scale_exponent + 16);
    const ScorePlan plan{_mm512_set1_epi64(shape.scale_mantissa), _mm512_set1_epi64(base), r};
    const int num_tiles = (visible[i] + kTile - 1) / kTile;
    __m512i best = _mm512_set1_epi32(INT32_MIN);
    for (int t = 0; t < num_tiles; ++t) {
      const __m512i s = score_tile(tiles[t], at, query, blocks, plan);
      _mm512_store_si512(scores + t * kTile, s);
      best = _mm512_mask_max_epi32(best, visible_lanes(visible[i], t), best, s);
    }
    int top;
    const int64_t total = weigh(tiles, at, visible[i], _mm512_reduce_max_epi32(best), scores, &top);
    int64_t acc[kMaxHeadDim] = {0};
    alignas(64) int32_t part[kMaxHeadDim] = {0};
    for (int t = 0; t < num_tiles; ++t) {
      mix_tile(tiles[t], at, scores + t * kTile, top, head_dim, part);
      if (t % 32 == 31 || t + 1 == num_tiles) {  // 512 positions: 512 * 16513 * 127 < 2^31
        for (int d = 0; d < head_dim; ++d) acc[d] += part[d], part[d] = 0;
      }
    }
    divide(acc, head_dim, total, top, shape.fraction_bits, out[i], clipped);
  }
}

}  // namespace
HEADRACE_DEFINE_TIER
}  // namespace HEADRACE_ISA
}  // namespace headrace
