// R8 for AVX-512 with VNNI. Query heads that share a kv head go together: every key tile is held in registers
// while all of them score it. Included by ops_avx512.cpp after rows.inl.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

#define UNROLL _Pragma("GCC unroll 16")

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
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(visible - t * kTile));
}

// ---- scores ------------------------------------------------------------------------------------------

// The query heads of one call, a record of `stride` words each: base, visible, starts [blocks], scales [blocks]
// and, from word `codes` on, head_dim bytes of codes. vpdpbusd wants one unsigned operand: keys are read as
// k + 128, and starts = 8 - 128 * sum(q) takes that off and adds the rounding half.
struct Queries {
  int32_t* record(int row) const { return records + ptrdiff_t(row) * stride; }
  int32_t* scores_of(int row) const { return scores + ptrdiff_t(row) * num_tiles * kTile; }

  int rows, blocks, head_dim, stride, codes;
  int most, num_tiles;           // visible keys, and the tiles that hold them, rounded up to two
  int lowest_base, highest_base;
  int32_t mantissa;
  int32_t* records;
  int32_t* best;                 // [rows][16]: the largest score of each lane so far
  int32_t* scores;               // [rows][num_tiles][16]
};

// Blocks blocks of one tile of keys, from block `first` on, with what ends a score: the exponents of even and
// odd keys plus one, and whether they are such that no score needs a clip.
template <int Blocks>
struct Keys {
  __m512i code[8 * Blocks], scale[Blocks], even, odd;
  const int16_t* exponents;
  bool plain;
};

// Scores are acc * mantissa / 2^n, rounded, n = base - key exponent. |acc| <= 4 * 32512 * 8321 < 2^30.01 and
// mantissa < 2^30, so for n >= 31 the product shifted by n - 1 fits int32 and the score is below 2^30.
template <int Blocks>
inline Keys<Blocks> read_keys(const uint8_t* tile, int t, int first, const Queries& q) {
  const TileFields at(q.head_dim);
  Keys<Blocks> keys;
  UNROLL for (int p = 0; p < 8 * Blocks; ++p)
    keys.code[p] = _mm512_xor_si512(load512(tile + (first * 8 + p) * 64), _mm512_set1_epi8(char(0x80)));
  UNROLL for (int b = 0; b < Blocks; ++b)
    keys.scale[b] = _mm512_cvtepu16_epi32(load256(tile + at.key_scales + size_t(first + b) * kTile * 2));
  keys.exponents = reinterpret_cast<const int16_t*>(tile + at.key_exponent);
  const __m512i all = _mm512_cvtepi16_epi32(load256(keys.exponents));
  const __m512i e = _mm512_mask_mov_epi32(_mm512_set1_epi32(keys.exponents[0]), seen_lanes(q.most, t), all);
  const __m512i next = _mm512_add_epi32(e, _mm512_set1_epi32(1));
  keys.even = _mm512_srai_epi64(_mm512_slli_epi64(next, 32), 32);
  keys.odd = _mm512_srai_epi64(next, 32);
  keys.plain = q.lowest_base - _mm512_reduce_max_epi32(e) >= 31 && q.highest_base - _mm512_reduce_min_epi32(e) <= 62;
  return keys;
}

template <int Blocks>
inline __m512i finish_scores(__m512i acc, const Keys<Blocks>& keys, int32_t base, int32_t mantissa) {
  if (__builtin_expect(!keys.plain, 0)) {
    alignas(64) int32_t values[kTile];
    store512(values, acc);
    for (int j = 0; j < kTile; ++j) values[j] = score_of(values[j], mantissa, base - keys.exponents[j]);
    return load512(values);
  }
  const __m512i factor = _mm512_set1_epi64(mantissa), shift = _mm512_set1_epi64(base);
  const __m512i even = _mm512_srav_epi64(_mm512_mul_epi32(acc, factor), _mm512_sub_epi64(shift, keys.even));
  const __m512i odd = _mm512_srav_epi64(_mm512_mul_epi32(_mm512_srli_epi64(acc, 32), factor),
                                        _mm512_sub_epi64(shift, keys.odd));
  const __m512i both = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  return _mm512_srai_epi32(_mm512_add_epi32(both, _mm512_set1_epi32(1)), 1);
}

// R3's accumulators of Rows queries, several at once to hide vpdpbusd's latency. Block sums fit int16, so
// vpmaddwd multiplies them by their combined scale.
template <int Blocks, int Rows, bool Shift>
inline void add_blocks(const Keys<Blocks>& keys, int first, const Queries& q, const int32_t* record, __m512i* acc) {
  UNROLL for (int b = 0; b < Blocks; ++b) {
    const int32_t *start = record + 2 + first + b, *scale = start + q.blocks;
    const int32_t* code = record + q.codes + 8 * (first + b);
    __m512i sum[Rows];
    UNROLL for (int i = 0; i < Rows; ++i) sum[i] = _mm512_set1_epi32(start[i * q.stride]);
    UNROLL for (int p = 0; p < 8; ++p)
      UNROLL for (int i = 0; i < Rows; ++i)
        sum[i] = _mm512_dpbusd_epi32(sum[i], keys.code[8 * b + p], _mm512_set1_epi32(code[i * q.stride + p]));
    UNROLL for (int i = 0; i < Rows; ++i) {
      const __m512i combined = _mm512_mulhrs_epi16(keys.scale[b], _mm512_set1_epi32(scale[i * q.stride]));
      const __m512i product = _mm512_madd_epi16(_mm512_srai_epi32(sum[i], 4), combined);
      acc[i] = _mm512_add_epi32(acc[i], Shift ? _mm512_srai_epi32(product, dot_shift(q.blocks)) : product);
    }
  }
}

// Scores of Rows queries from `row` on. The accumulators of heads wider than Blocks wait in the scores.
template <int Blocks, int Rows, bool Shift>
inline void score_rows(const Keys<Blocks>& keys, int t, int first, const Queries& q, int row) {
  const int32_t* record = q.record(row);
  int32_t* out = q.scores_of(row) + t * kTile;
  const ptrdiff_t step = ptrdiff_t(q.num_tiles) * kTile;
  __m512i acc[Rows];
  UNROLL for (int i = 0; i < Rows; ++i) acc[i] = first == 0 ? _mm512_setzero_si512() : load512(out + i * step);
  add_blocks<Blocks, Rows, Shift>(keys, first, q, record, acc);
  if (first + Blocks == q.blocks) {
    UNROLL for (int i = 0; i < Rows; ++i) {
      acc[i] = finish_scores(acc[i], keys, record[i * q.stride], q.mantissa);
      int32_t* best = q.best + (row + i) * kTile;
      const __m512i before = load512(best);
      store512(best, _mm512_mask_max_epi32(before, seen_lanes(record[i * q.stride + 1], t), before, acc[i]));
    }
  }
  UNROLL for (int i = 0; i < Rows; ++i) store512(out + i * step, acc[i]);
}

template <int Blocks, bool Shift>
void score_tile(const uint8_t* tile, int t, int first, const Queries& q) {
  const Keys<Blocks> keys = read_keys<Blocks>(tile, t, first, q);
  int row = 0;
  for (; row + 4 <= q.rows; row += 4) score_rows<Blocks, 4, Shift>(keys, t, first, q, row);
  for (; row < q.rows; ++row) score_rows<Blocks, 1, Shift>(keys, t, first, q, row);
}

template <bool Shift>
void score_all(const uint8_t* const* tiles, const Queries& q) {
  for (int t = 0; t * kTile < q.most; ++t) {
    int b = 0;
    for (; b + 2 <= q.blocks; b += 2) score_tile<2, Shift>(tiles[t], t, b, q);
    if (b < q.blocks) score_tile<1, Shift>(tiles[t], t, b, q);
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

// Scores become weights, of an even number of tiles; returns their total.
inline int64_t weigh(int32_t* scores, int visible, int32_t best) {
  const __m512i most = _mm512_set1_epi32(best);
  __m512i part = _mm512_setzero_si512();
  int64_t total = 0;
  for (int t = 0; t * kTile < visible; t += 2) {
    __m512i a = distance(scores, t, visible, most), b = distance(scores, t + 1, visible, most);
    exp2_pair(&a, &b);
    store512(scores + t * kTile, a);
    store512(scores + (t + 1) * kTile, b);
    part = _mm512_add_epi32(part, _mm512_add_epi32(a, b));
    if (t % 32768 == 32766) total += sum_unsigned(part), part = _mm512_setzero_si512();  // 32768 * 65536 = 2^31
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
            __m512i v = load512(values + 64 * j);
            asm("" : "+v"(v));  // one load for both
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
  Queries out{};
  out.rows = rows;
  out.head_dim = shape.head_dim;
  out.blocks = shape.head_dim / kBlock;
  out.codes = (2 + 2 * out.blocks + 15) / 16 * 16;
  out.stride = out.codes + shape.head_dim / 4;
  out.mantissa = shape.scale_mantissa;
  out.lowest_base = INT32_MAX, out.highest_base = INT32_MIN;
  out.records = scratch->take<int32_t>(size_t(rows) * out.stride);
  out.best = scratch->take<int32_t>(size_t(rows) * kTile);
  for (int row = 0; row < rows; ++row) {
    int32_t* record = out.record(row);
    int16_t scales[kMaxHeadBlocks], sums[kMaxHeadBlocks];
    int8_t* codes = reinterpret_cast<int8_t*>(record + out.codes);
    record[0] = score_base(shape, quantize_to(q[row], shape.head_dim, -shape.fraction_bits, codes, scales, sums));
    record[1] = visible[row];
    for (int b = 0; b < out.blocks; ++b) {
      record[2 + b] = 8 - 128 * sums[b];
      record[2 + out.blocks + b] = scales[b];
    }
    out.most = visible[row] > out.most ? visible[row] : out.most;
    out.lowest_base = record[0] < out.lowest_base ? record[0] : out.lowest_base;
    out.highest_base = record[0] > out.highest_base ? record[0] : out.highest_base;
    store512(out.best + row * kTile, _mm512_set1_epi32(INT32_MIN));
  }
  out.num_tiles = (out.most + 2 * kTile - 1) / (2 * kTile) * 2;
  out.scores = scratch->take<int32_t>(size_t(rows) * out.num_tiles * kTile);
  return out;
}

void attend(const AttentionShape& shape, const uint8_t* const* tiles, const int32_t* const* q, const int32_t* visible,
            int rows, int32_t* const* out, void* memory, int64_t* clipped) {
  Scratch scratch{static_cast<uint8_t*>(memory)};
  const Queries queries = make_queries(shape, q, visible, rows, &scratch);
  if (dot_shift(queries.blocks) == 0) {
    score_all<false>(tiles, queries);
  } else {
    score_all<true>(tiles, queries);
  }
  const TileFields at(shape.head_dim);
  const int pairs = (queries.blocks + 1) / 2;
  Mix mix{scratch.take<uint8_t>(size_t(queries.num_tiles) * pairs * 64), scratch.take<int32_t>(queries.num_tiles + 1), 0, pairs};
  for (int row = 0; row < rows; ++row) {
    int32_t* scores = queries.scores_of(row);
    const int32_t best = _mm512_reduce_max_epi32(load512(queries.best + row * kTile));
    const int top = largest_exponent(tiles, at, visible[row]);
    const int64_t total = weigh(scores, visible[row], best);
    mix.count = 0;
    for (int t = 0; t * kTile < visible[row]; ++t)
      add_tile(tiles[t], at, queries.blocks, top, t, load512(scores + t * kTile), &mix);
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
