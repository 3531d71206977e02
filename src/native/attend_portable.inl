// The inner loops of attention without intrinsics.
namespace headrace {
namespace HEADRACE_ISA {
namespace {

// out[b * 16 + j] = sum of q * k over block b of key j. codes int8 [head_dim / 4][16][4].
inline void score_tile(const int8_t* codes, const int8_t* q, int head_dim, int32_t* out) {
  for (int b = 0; b < head_dim / kBlock; ++b) {
    for (int j = 0; j < kTile; ++j) out[b * kTile + j] = 0;
    for (int p = b * 8; p < b * 8 + 8; ++p) {
      for (int j = 0; j < kTile; ++j) {
        for (int i = 0; i < 4; ++i) out[b * kTile + j] += int32_t(codes[(p * kTile + j) * 4 + i]) * q[4 * p + i];
      }
    }
  }
}

// acc[d] += sum of c * v over 16 positions. codes int8 [4][head_dim][4]; c i32 [head_dim / 32][16], 15 bits.
inline void value_tile(const int8_t* codes, const int32_t* c, int head_dim, int32_t* acc) {
  for (int g = 0; g < 4; ++g) {
    for (int d = 0; d < head_dim; ++d) {
      const int32_t* w = c + d / kBlock * kTile + 4 * g;
      const int8_t* v = codes + (g * head_dim + d) * 4;
      acc[d] += w[0] * v[0] + w[1] * v[1] + w[2] * v[2] + w[3] * v[3];
    }
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
