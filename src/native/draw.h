// The draw of R11 (src/headrace/arith/sampling.py): from logits and a random word to a token.
#pragma once

#include <cstdint>

namespace headrace {

// Parameters in Q16; `reach` is how far below the largest a logit may be and still have a weight.
struct Draw {
  int64_t inverse_temperature, top_k, top_p, min_p, reach;
  int fraction_bits;
  const int32_t *exp2_high, *exp2_low;  // [256] each: 2^(-i / 256) and 2^(-i / 65536), Q30
};

template <typename T>
int draw(const T* logits, int count, const Draw& how, uint64_t word);

}  // namespace headrace
