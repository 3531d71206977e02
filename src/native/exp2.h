// 2^-delta in Q30 from two tables (R11, R13); the definition is exp2_negative_q30 of src/headrace/arith/ops.py.
#pragma once

#include <cstdint>

namespace headrace {

struct Exp2 {
  const int32_t *high, *low;  // [256] each: 2^(-i / 256) and 2^(-i / 65536), Q30

  // delta >= 0, log2, Q16.
  int64_t operator()(int64_t delta) const {
    const int64_t product = int64_t(high[delta >> 8 & 255]) * low[delta & 255];
    const int64_t whole = delta >> 16;
    return shift_round(shift_round(product, 30), whole > 62 ? 62 : int(whole));
  }

 private:
  static int64_t shift_round(int64_t x, int shift) { return shift == 0 ? x : ((x >> (shift - 1)) + 1) >> 1; }
};

}  // namespace headrace
