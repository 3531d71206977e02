// R8 for AVX-512 with VNNI. Query heads that share a kv head go together: every key tile is held in registers
// while all of them score it. Included by ops_avx512.cpp after rows.inl.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
inline void store512(void* p, __m512i v) { _mm512_storeu_si512(p, v); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m512i broadcast4(const void* bytes) {
  int32_t word;
  std::memcpy(&word, bytes, 4);
  return _mm512_set1_epi32(word);
}

// Lanes of tile t that a query sees which sees `visible` keys.
inline __mmask16 seen_lanes(int visible, int t) {
  const int left = visible - t * kTile;
  return left >= kTile ? 0xFFFF : __mmask16((1u << left) - 1);
}

// ---- scores ------------------------------------------------------------------------------------------

// The query heads of one call. vpdpbusd wants one unsigned operand: keys are read as k + 128, and
// starts = 8 - 128 * sum(q) takes that off and adds the rounding half.
struct Queries {
  int rows, blocks, num_tiles, most;  // most: of the visible keys
  int8_t* codes;            // [rows][head_dim]
  int32_t *starts, *scales; // [rows][blocks]
  int32_t* base;            // [rows]
  const int32_t* visible;   // [rows]
  int32_t* best;            // [rows][16]: the largest score of each lane so far
  int32_t* scores;          // [rows][16 num_tiles]
};

// What scoring needs from one tile besides its codes. The exponents are those of even and odd keys plus one.
struct TileKeys {
  __m512i even, odd;
  int lowest, highest;
};

inline TileKeys read_exponents(const int16_t* exponents, __mmask16 seen) {
  const __m512i all = _mm512_cvtepi16_epi32(load256(exponents));
  const __m512i e = _mm512_mask_mov_epi32(_mm512_set1_epi32(exponents[0]), seen, all);
  const __m512i next = _mm512_add_epi32(e, _mm512_set1_epi32(1));
  return {_mm512_srai_epi64(_mm512_slli_epi64(next, 32), 32), _mm512_srai_epi64(next, 32), _mm512_reduce_min_epi32(e),
          _mm512_reduce_max_epi32(e)};
}

// Scores are acc * mantissa / 2^n, rounded, n = base - key exponent. |acc| <= 4 * 32512 * 8321 < 2^30.01 and
// mantissa < 2^30, so for n >= 31 the product shifted by n - 1 fits int32, and no score needs a clip.
inline __m512i finish_scores(__m512i acc, const TileKeys& keys, const int16_t* exponents, int32_t base, int32_t mantissa) {
  if (__builtin_expect(base - keys.highest < 31 || base - keys.lowest > 62, 0)) {
    alignas(64) int32_t values[kTile];
    store512(values, acc);
    for (int j = 0; j < kTile; ++j) values[j] = score_of(values[j], mantissa, base - exponents[j]);
    return load512(values);
  }
  const __m512i factor = _mm512_set1_epi64(mantissa), shift = _mm512_set1_epi64(base);
  const __m512i even = _mm512_srav_epi64(_mm512_mul_epi32(acc, factor), _mm512_sub_epi64(shift, keys.even));
  const __m512i odd = _mm512_srav_epi64(_mm512_mul_epi32(_mm512_srli_epi64(acc, 32), factor),
                                        _mm512_sub_epi64(shift, keys.odd));
  const __m512i both = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  return _mm512_srai_epi32(_mm512_add_epi32(both, _mm512_set1_epi32(1)), 1);
}

// Scores of every query against Blocks blocks of one tile, from block `first` on; the sums of wider heads wait
// in the scores between calls. Block sums fit int16, so vpmaddwd multiplies them by their combined scale.
template <int Blocks>
void score_tile(const AttentionShape& shape, const uint8_t* tile, int t, int first, const Queries& q) {
  const TileFields at(shape.head_dim);
  const int r = dot_shift(q.blocks);
  const bool begin = first == 0, end = first + Blocks == q.blocks;
  const int16_t* exponents = reinterpret_cast<const int16_t*>(tile + at.key_exponent);
  const TileKeys keys = read_exponents(exponents, seen_lanes(q.most, t));
  __m512i code[8 * Blocks], scale[Blocks];
  for (int p = 0; p < 8 * Blocks; ++p)
    code[p] = _mm512_xor_si512(load512(tile + (first * 8 + p) * 64), _mm512_set1_epi8(char(0x80)));
  for (int b = 0; b < Blocks; ++b)
    scale[b] = _mm512_cvtepu16_epi32(load256(tile + at.key_scales + size_t(first + b) * kTile * 2));
  for (int row = 0; row < q.rows; ++row) {
    if (q.visible[row] <= t * kTile) continue;
    const int8_t* codes = q.codes + ptrdiff_t(row) * shape.head_dim + first * kBlock;
    const int32_t *starts = q.starts + row * q.blocks + first, *scales = q.scales + row * q.blocks + first;
    int32_t* out = q.scores + (ptrdiff_t(row) * q.num_tiles + t) * kTile;
    __m512i acc = begin ? _mm512_setzero_si512() : load512(out);
    for (int b = 0; b < Blocks; ++b) {
      __m512i even = _mm512_set1_epi32(starts[b]), odd = _mm512_setzero_si512();
      for (int p = 8 * b; p < 8 * b + 8; p += 2) {
        even = _mm512_dpbusd_epi32(even, code[p], broadcast4(codes + 4 * p));
        odd = _mm512_dpbusd_epi32(odd, code[p + 1], broadcast4(codes + 4 * p + 4));
      }
      const __m512i narrow = _mm512_srai_epi32(_mm512_add_epi32(even, odd), 4);
      const __m512i combined = _mm512_mulhrs_epi16(scale[b], _mm512_set1_epi32(scales[b]));
      acc = _mm512_add_epi32(acc, _mm512_srai_epi32(_mm512_madd_epi16(narrow, combined), r));
    }
    if (end) {
      acc = finish_scores(acc, keys, exponents, q.base[row], shape.scale_mantissa);
      int32_t* best = q.best + row * kTile;
      store512(best, _mm512_mask_max_epi32(load512(best), seen_lanes(q.visible[row], t), load512(best), acc));
    }
    store512(out, acc);
  }
}

void score_all(const AttentionShape& shape, const uint8_t* const* tiles, const Queries& q) {
  for (int t = 0; t < q.num_tiles; ++t) {
    int b = 0;
    for (; b + 2 <= q.blocks; b += 2) score_tile<2>(shape, tiles[t], t, b, q);
    if (b < q.blocks) score_tile<1>(shape, tiles[t], t, b, q);
  }
}

// ---- weights -----------------------------------------------------------------------------------------

// 2^-delta in Q16 for two times 16 lanes of delta >= 0, in place. The fractions of both share 16-bit lanes:
// all products are t * f >> 16, which is vpmulhuw.
inline void exp2_pair(__m512i* a, __m512i* b) {
  const __m512i f = _mm512_mask_blend_epi16(0xAAAAAAAA, *a, _mm512_slli_epi32(*b, 16));
  __m512i t = _mm512_sub_epi16(_mm512_set1_epi16(3496), _mm512_mulhi_epu16(_mm512_set1_epi16(454), f));
  t = _mm512_sub_epi16(_mm512_set1_epi16(15698), _mm512_mulhi_epu16(t, f));
  t = _mm512_sub_epi16(_mm512_set1_epi16(short(45423)), _mm512_mulhi_epu16(t, f));
  const __m512i carry = _mm512_srli_epi16(_mm512_mullo_epi16(t, f), 15);
  const __m512i less = _mm512_add_epi16(_mm512_mulhi_epu16(t, f), carry);  // 65536 - p, at most 32768
  // p / 2^n, rounded: (2 p >> n) + 1 >> 1, 0 beyond n = 31 as vpsrlvd does.
  const __m512i one = _mm512_set1_epi32(1), twice = _mm512_set1_epi32(1 << 17);
  const __m512i pa = _mm512_sub_epi32(twice, _mm512_slli_epi32(_mm512_and_si512(less, _mm512_set1_epi32(0xFFFF)), 1));
  const __m512i pb = _mm512_sub_epi32(twice, _mm512_slli_epi32(_mm512_srli_epi32(less, 16), 1));
  *a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_srlv_epi32(pa, _mm512_srli_epi32(*a, 16)), one), 1);
  *b = _mm512_srli_epi32(_mm512_add_epi32(_mm512_srlv_epi32(pb, _mm512_srli_epi32(*b, 16)), one), 1);
}

// The tiles in which one query's combined weights are not all 0. For tile list[i] and a pair of blocks,
// bytes u8[4][2][2][4]: for four positions, the low and high bytes of the first and second block's weights.
struct Mix {
  uint8_t* bytes;  // [count][pairs][64]
  int32_t* list;
  int count, pairs;
};

inline __m512i combine(__m512i weights, const int16_t* scales, __m512i shift) {
  const __m512i product = _mm512_mullo_epi32(weights, _mm512_cvtepu16_epi32(load256(scales)));  // below 2^31
  return _mm512_srli_epi32(_mm512_add_epi32(_mm512_srlv_epi32(product, shift), _mm512_set1_epi32(1)), 1);
}

// c = shift_round(w * a_v, 16 + top - E_v), 15 bits. Unseen positions have weight 0, and so c = 0.
inline void add_tile(const uint8_t* tile, const TileFields& at, int blocks, int top, int t, __m512i weights, Mix* mix) {
  const __m512i by_byte = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i exponents = _mm512_cvtepi16_epi32(load256(tile + at.value_exponent));
  const __m512i shift = _mm512_sub_epi32(_mm512_set1_epi32(15 + top), exponents);
  const int16_t* scales = reinterpret_cast<const int16_t*>(tile + at.value_scales);
  uint8_t* out = mix->bytes + ptrdiff_t(mix->count) * mix->pairs * 64;
  __m512i any = _mm512_setzero_si512();
  for (int b = 0; b < blocks; b += 2, out += 64) {
    __m512i c = combine(weights, scales + b * kTile, shift);
    if (b + 1 < blocks) c = _mm512_or_si512(c, _mm512_slli_epi32(combine(weights, scales + (b + 1) * kTile, shift), 16));
    store512(out, _mm512_shuffle_epi8(c, by_byte));
    any = _mm512_or_si512(any, c);
  }
  mix->list[mix->count] = t;
  mix->count += _mm512_test_epi32_mask(any, any) != 0;
}

inline int largest_exponent(const uint8_t* const* tiles, const TileFields& at, int visible) {
  __m512i top = _mm512_set1_epi32(INT16_MIN);
  for (int t = 0; t * kTile < visible; ++t) {
    const __m512i e = _mm512_cvtepi16_epi32(load256(tiles[t] + at.value_exponent));
    top = _mm512_mask_max_epi32(top, seen_lanes(visible, t), top, e);
  }
  return _mm512_reduce_max_epi32(top);
}

inline __m512i distance(const int32_t* scores, int t, int visible, __m512i best) {
  if (t * kTile >= visible) return _mm512_set1_epi32(INT32_MAX);  // weight 0
  return _mm512_mask_sub_epi32(_mm512_set1_epi32(INT32_MAX), seen_lanes(visible, t), best, load512(scores + t * kTile));
}

inline int64_t sum_unsigned(__m512i v) {
  const __m512i low = _mm512_and_si512(v, _mm512_set1_epi64(0xFFFFFFFF));
  return _mm512_reduce_add_epi64(_mm512_add_epi64(low, _mm512_srli_epi64(v, 32)));
}

// Returns the total weight of one query's keys; its combined weights go to mix.
inline int64_t weigh(const uint8_t* const* tiles, const AttentionShape& shape, int visible, int32_t best, int top,
                     const int32_t* scores, Mix* mix) {
  const TileFields at(shape.head_dim);
  const int blocks = shape.head_dim / kBlock, num_tiles = (visible + kTile - 1) / kTile;
  const __m512i most = _mm512_set1_epi32(best);
  __m512i part = _mm512_setzero_si512();
  int64_t total = 0;
  mix->count = 0;
  for (int t = 0; t < num_tiles; t += 2) {
    __m512i a = distance(scores, t, visible, most), b = distance(scores, t + 1, visible, most);
    exp2_pair(&a, &b);
    part = _mm512_add_epi32(part, _mm512_add_epi32(a, b));
    if (t % 32768 == 32766) total += sum_unsigned(part), part = _mm512_setzero_si512();  // 32768 * 65536 = 2^31
    add_tile(tiles[t], at, blocks, top, t, a, mix);
    if (t + 1 < num_tiles) add_tile(tiles[t + 1], at, blocks, top, t + 1, b, mix);
  }
  return total + sum_unsigned(part);
}

// ---- values ------------------------------------------------------------------------------------------

constexpr int kFlushTiles = 2048;  // 32768 positions: 32768 * 255 * 127 < 2^31

inline void add_wide(int64_t* acc, __m512i low, __m512i high) {
  for (int half = 0; half < 2; ++half) {
    const __m256i l = half ? _mm512_extracti64x4_epi64(low, 1) : _mm512_castsi512_si256(low);
    const __m256i h = half ? _mm512_extracti64x4_epi64(high, 1) : _mm512_castsi512_si256(high);
    const __m512i sum = _mm512_add_epi64(_mm512_cvtepi32_epi64(l), _mm512_slli_epi64(_mm512_cvtepi32_epi64(h), 8));
    store512(acc + 8 * half, _mm512_add_epi64(load512(acc + 8 * half), sum));
  }
}

// acc[d] += sum of c * v over the listed tiles for the Blocks blocks of pair `pair`. Two sets of sums keep
// vpdpbusd's latency hidden.
template <int Blocks>
void add_values(const uint8_t* const* tiles, const TileFields& at, int head_dim, const Mix& mix, int pair, int64_t* acc) {
  const size_t offset = at.value_codes + size_t(pair) * 256;
  for (int begin = 0; begin < mix.count; begin += kFlushTiles) {
    const int end = mix.count - begin < kFlushTiles ? mix.count : begin + kFlushTiles;
    __m512i low[2][2 * Blocks], high[2][2 * Blocks];
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2 * Blocks; ++j) low[i][j] = high[i][j] = _mm512_setzero_si512();
    for (int i = begin; i < end; ++i) {
      const uint8_t* c = mix.bytes + (ptrdiff_t(i) * mix.pairs + pair) * 64;
      const uint8_t* values = tiles[mix.list[i]] + offset;
      for (int g = 0; g < 4; ++g, c += 16, values += head_dim * 4) {
        for (int b = 0; b < Blocks; ++b) {
          const __m512i l = broadcast4(c + 8 * b), h = broadcast4(c + 8 * b + 4);
          for (int j = 2 * b; j < 2 * b + 2; ++j) {
            const __m512i v = load512(values + 64 * j);
            low[g & 1][j] = _mm512_dpbusd_epi32(low[g & 1][j], l, v);
            high[g & 1][j] = _mm512_dpbusd_epi32(high[g & 1][j], h, v);
          }
        }
      }
    }
    for (int j = 0; j < 2 * Blocks; ++j)
      add_wide(acc + pair * 64 + 16 * j, _mm512_add_epi32(low[0][j], low[1][j]), _mm512_add_epi32(high[0][j], high[1][j]));
  }
}

// The rounding shifts of `Division` for 8 elements, when both counts are those of ordinary attention.
inline void divide(const int64_t* acc, int head_dim, const Division& by, int32_t* out, int64_t* clipped) {
  for (int d = 0; d < head_dim; d += 8) {
    alignas(64) int64_t value[8];
    const __m512i x = load512(acc + d), one = _mm512_set1_epi64(1);
    const __m512i reduced =
        by.first < 1 ? _mm512_sll_epi64(x, _mm_cvtsi32_si128(-by.first))
                     : _mm512_srai_epi64(_mm512_add_epi64(_mm512_sra_epi64(x, _mm_cvtsi32_si128(by.first - 1)), one), 1);
    const __m512i product = _mm512_mullo_epi64(reduced, _mm512_set1_epi64(by.inverse));
    if (by.last >= 1 && by.last <= 62) {
      const __m512i y = _mm512_srai_epi64(_mm512_add_epi64(_mm512_sra_epi64(product, _mm_cvtsi32_si128(by.last - 1)), one), 1);
      const __m512i size = _mm512_abs_epi64(y);
      if (_mm512_cmpgt_epi64_mask(size, _mm512_set1_epi64(kInt32Max)) == 0) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), _mm512_cvtepi64_epi32(y));
        continue;
      }
    }
    store512(value, product);
    for (int i = 0; i < 8; ++i) out[d + i] = saturate(shift_round(value[i], by.last), clipped);
  }
}

// ---- all of it ---------------------------------------------------------------------------------------

// Hands out consecutive 64-byte aligned pieces of the scratch memory.
struct Scratch {
  template <typename T>
  T* take(size_t count) {
    uint8_t* at = next;
    next += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
  uint8_t* next;
};

Queries make_queries(const AttentionShape& shape, const int32_t* const* q, const int32_t* visible, int rows,
                     Scratch* scratch) {
  const int d = shape.head_dim, blocks = d / kBlock;
  int most = 0;
  for (int row = 0; row < rows; ++row) most = visible[row] > most ? visible[row] : most;
  const int num_tiles = (most + kTile - 1) / kTile;
  const size_t words = size_t(rows) * blocks;
  const Queries out{rows, blocks, num_tiles, most, scratch->take<int8_t>(size_t(rows) * d), scratch->take<int32_t>(words),
                    scratch->take<int32_t>(words), scratch->take<int32_t>(rows), visible,
                    scratch->take<int32_t>(size_t(rows) * kTile), scratch->take<int32_t>(size_t(rows) * num_tiles * kTile)};
  for (int row = 0; row < rows; ++row) {
    int16_t scales[kMaxHeadBlocks], sums[kMaxHeadBlocks];
    const int32_t exponent = quantize_to(q[row], d, -shape.fraction_bits, out.codes + ptrdiff_t(row) * d, scales, sums);
    for (int b = 0; b < blocks; ++b) {
      out.starts[row * blocks + b] = 8 - 128 * sums[b];
      out.scales[row * blocks + b] = scales[b];
    }
    out.base[row] = score_base(shape, exponent);
    store512(out.best + row * kTile, _mm512_set1_epi32(INT32_MIN));
  }
  return out;
}

void attend(const AttentionShape& shape, const uint8_t* const* tiles, const int32_t* const* q, const int32_t* visible,
            int rows, int32_t* const* out, void* memory, int64_t* clipped) {
  Scratch scratch{static_cast<uint8_t*>(memory)};
  const Queries queries = make_queries(shape, q, visible, rows, &scratch);
  score_all(shape, tiles, queries);
  const TileFields at(shape.head_dim);
  const int pairs = (queries.blocks + 1) / 2;
  Mix mix{scratch.take<uint8_t>(size_t(queries.num_tiles) * pairs * 64), scratch.take<int32_t>(queries.num_tiles + 1), 0, pairs};
  for (int row = 0; row < rows; ++row) {
    const int32_t* scores = queries.scores + ptrdiff_t(row) * queries.num_tiles * kTile;
    const int32_t best = _mm512_reduce_max_epi32(load512(queries.best + row * kTile));
    const int top = largest_exponent(tiles, at, visible[row]);
    const int64_t total = weigh(tiles, shape, visible[row], best, top, scores, &mix);
    alignas(64) int64_t acc[kMaxHeadDim];
    std::memset(acc, 0, size_t(shape.head_dim) * sizeof(int64_t));
    for (int pair = 0; pair < pairs; ++pair) {
      if (2 * pair + 2 <= queries.blocks) {
        add_values<2>(tiles, at, shape.head_dim, mix, pair, acc);
      } else {
        add_values<1>(tiles, at, shape.head_dim, mix, pair, acc);
      }
    }
    divide(acc, shape.head_dim, Division(total, top, shape.fraction_bits), out[row], clipped);
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
