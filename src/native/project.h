// The projection (R3) of each instruction set; every one has the signature of Tier::project.
#pragma once

#include "ops.h"

namespace headrace {

void project_portable(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                      const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                      int64_t* clipped);
void project_avx2(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                  const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                  int64_t* clipped);
void project_avx512(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                    const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                    int64_t* clipped);
void project_amx(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                 const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                 int64_t* clipped);
void project_neon(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                  const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                  int64_t* clipped);

}  // namespace headrace
