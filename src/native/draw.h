// The draw of R11 (src/headrace/arith/sampling.py): from logits and a random word to a token.
#pragma once

#include <cstdint>

#include "exp2.h"

namespace headrace {

// Parameters in Q16: inverse_temperature 1 to 2^36, top_k 0 to 2^31 - 1, top_p and min_p 0 to 2^16, fraction_bits 8 to
// 24, `reach` (how far below the largest a logit may be and still have a weight) as arith/sampling.py derives it.
struct Draw {
  int64_t inverse_temperature, top_k, top_p, min_p, reach;
  int fraction_bits;
  Exp2 exp2;
};

template <typename T>
int draw(const T* logits, int count, const Draw& how, uint64_t word);

}  // namespace headrace
