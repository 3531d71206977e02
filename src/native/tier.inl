// The table of an instruction set. Included last.

namespace headrace {
namespace HEADRACE_ISA {

extern const Tier kTier;
const Tier kTier = {HEADRACE_TIER_NAME, HEADRACE_PROJECT, quantize_i32, quantize_i64, norm_quantize, norm_rescale,
                    rotary, rope, land, attend, silu_mul_quantize, route, mix, add_terms, add_sums, add_shared, embed};

}  // namespace HEADRACE_ISA
}  // namespace headrace
