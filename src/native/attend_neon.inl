// The dot products of attention with Arm's sdot. Included by ops_neon.cpp before attend_portable.inl.

namespace headrace {
namespace HEADRACE_ISA {
namespace {

inline int8x16_t broadcast4(const int8_t* bytes) {
  int32_t word;
  __builtin_memcpy(&word, bytes, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

inline void block_sums(const int8_t* codes, const int8_t* q, int b, int32_t* sums) {
  int32x4_t acc[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
  for (int p = b * 8; p < b * 8 + 8; ++p) {
    const int8x16_t x = broadcast4(q + 4 * p);
    for (int j = 0; j < 4; ++j) acc[j] = vdotq_s32(acc[j], vld1q_s8(codes + p * 64 + j * 16), x);
  }
  for (int j = 0; j < 4; ++j) vst1q_s32(sums + j * 4, acc[j]);
}

inline bool combine(const uint8_t* tile, const TileFields& at, int b, int top, const int32_t* weights, int16_t* c);

constexpr int kMixRows = 1;

// Bytes of a mix: int8 [2][2][16], the low and high parts of two blocks' combined weights, c = 256 high + low
// with low signed: high is at most 65.
inline bool combine_tile(const uint8_t* tile, const TileFields& at, int blocks, int top, const int32_t* weights,
                         uint8_t* out) {
  bool any = false;
  for (int b = 0; b < blocks; ++b, out += 2 * kTile) {
    int16_t c[kTile];
    any |= combine(tile, at, b, top, weights, c);
    for (int j = 0; j < kTile; ++j) {
      const int8_t low = int8_t(c[j]);
      out[j] = uint8_t(low);
      out[kTile + j] = uint8_t((c[j] - low) >> 8);
    }
  }
  return any;
}

constexpr int kFlushTiles = 4096;  // 65536 positions: 65536 * 128 * 127 < 2^31

// acc[0..4) += one group of four dimensions over the listed tiles [begin, end).
inline void add_four(const uint8_t* const* tiles, size_t offset, int head_dim, const Mix& mix, int pair, int b, int begin,
                     int end, int64_t* acc) {
  int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);
  for (int i = begin; i < end; ++i) {
    const int8_t* c = reinterpret_cast<const int8_t*>(mix.of(i, 0)) + pair * 64 + b * 2 * kTile;
    const int8_t* v = reinterpret_cast<const int8_t*>(tiles[mix.list[i]] + offset);
    for (int g = 0; g < 4; ++g, c += 4, v += head_dim * 4) {
      const int8x16_t codes = vld1q_s8(v);
      low = vdotq_s32(low, codes, broadcast4(c));
      high = vdotq_s32(high, codes, broadcast4(c + kTile));
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int32x2_t l = half ? vget_high_s32(low) : vget_low_s32(low), h = half ? vget_high_s32(high) : vget_low_s32(high);
    const int64x2_t sum = vaddq_s64(vmovl_s32(l), vshlq_n_s64(vmovl_s32(h), 8));
    vst1q_s64(acc + 2 * half, vaddq_s64(vld1q_s64(acc + 2 * half), sum));
  }
}

template <int Rows>
inline void add_values(const uint8_t* const* tiles, const TileFields& at, int head_dim, const Mix& mix, int pair,
                       int blocks, int64_t (*acc)[kMaxHeadDim]) {
  for (int begin = 0; begin < mix.count; begin += kFlushTiles) {
    const int end = mix.count - begin < kFlushTiles ? mix.count : begin + kFlushTiles;
    for (int d = 0; d < blocks * kBlock; d += 4) {
      const size_t offset = at.value_codes + size_t(pair * 64 + d) * 4;
      add_four(tiles, offset, head_dim, mix, pair, d / kBlock, begin, end, acc[0] + pair * 64 + d);
    }
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
