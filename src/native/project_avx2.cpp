#include "project.h"
namespace headrace {
void project_avx2(const PackedWeight& w, const Activations& x, int m_begin, int m_end, int t_begin, int t_end,
                  const int32_t* bias, bool residual, int32_t* y, ptrdiff_t y_stride, int fraction_bits,
                  int64_t* clipped) { project_portable(w,x,m_begin,m_end,t_begin,t_end,bias,residual,y,y_stride,fraction_bits,clipped); }
}
