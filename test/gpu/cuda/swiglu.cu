// Clamped SwiGLU written a second time, from the formula alone, for test_cuda_kernels.py: out[i] of pairs[i] (gate, up),
// bf16 bits; limit 0 means none. Shares no code with the kernels but the launcher.
#include "sgling.cuh"

__device__ float number(uint16_t bits) { return __uint_as_float(static_cast<unsigned>(bits) * 65536u); }

__device__ uint16_t nearest_even(float value) {
    const unsigned bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    const unsigned down = bits / 65536u, rest = bits % 65536u;
    return static_cast<uint16_t>(rest > 32768u || (rest == 32768u && down % 2 == 1) ? down + 1 : down);
}

__global__ void second_swiglu_kernel(uint16_t* out, const uint16_t* pairs, long long count, float limit) {
    pdl_wait();
    pdl_trigger();
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float gate = number(pairs[2 * i]);
    float up = number(pairs[2 * i + 1]);
    const float denominator = static_cast<float>(1.0 + exp(-static_cast<double>(gate)));  // overflows like fp32's
    float activated = static_cast<float>(static_cast<double>(gate) / static_cast<double>(denominator));
    if (limit != 0.0f && activated >= limit) activated = limit;
    if (limit != 0.0f && up >= limit) up = limit;
    if (limit != 0.0f && up <= -limit) up = -limit;
    out[i] = nearest_even(activated * up);
}

extern "C" int second_swiglu(void* out, const void* pairs, long long count, float limit, int pdl, void* stream) {
    return SGLING_LAUNCH(second_swiglu_kernel, static_cast<unsigned>(ceil_div(count, 256)), 256, 0, stream, pdl,
                         static_cast<uint16_t*>(out), static_cast<const uint16_t*>(pairs), count, limit);
}
