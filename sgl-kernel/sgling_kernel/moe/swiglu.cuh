// The clamped SwiGLU of one gate and one up value.
#pragma once

#include "sgling.cuh"

// min(silu(gate), limit) * clamp(up, -limit, limit), fp32; limit 0 means none. The clamp follows the SiLU and has no
// lower bound on the gate side. Written with comparisons, which let NaN through as torch.clamp does.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) {
    float activated = __fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate)));
    if (limit > 0.0f) {
        activated = activated > limit ? limit : activated;
        up = up > limit ? limit : up < -limit ? -limit : up;
    }
    return __fmul_rn(activated, up);
}
