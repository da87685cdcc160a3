// Clamped SwiGLU of interleaved bf16 pairs, elementwise: gu [rows, 2 width] -> out [rows, width].
#include "swiglu.cuh"

constexpr int THREADS = 128, PAIRS = 4;  // a thread finishes four pairs: 16 bytes in, 8 out

__global__ void swiglu_kernel(uint16_t* out, const uint16_t* gu, long long stride, int width, float limit) {
    pdl_wait();
    pdl_trigger();
    const int first = static_cast<int>(blockIdx.y * THREADS + threadIdx.x) * PAIRS;
    if (first >= width) return;
    const uint4 pairs = load16(gu + blockIdx.x * stride + 2 * first);
    const uint32_t words[PAIRS] = {pairs.x, pairs.y, pairs.z, pairs.w};
    float value[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) value[i] = clamped_swiglu(bf16_lo(words[i]), bf16_hi(words[i]), limit);
    *reinterpret_cast<uint2*>(out + static_cast<long long>(blockIdx.x) * width + first) =
        make_uint2(pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3]));
}

// width is a multiple of 4; rows of gu lie `stride` elements apart, a multiple of 8; limit 0 means none.
extern "C" int swiglu(void* out, const void* gu, long long stride, long long rows, long long width, float limit,
                      int pdl, void* stream) {
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(width, THREADS * PAIRS)));
    return SGLING_LAUNCH(swiglu_kernel, grid, THREADS, 0, stream, pdl, static_cast<uint16_t*>(out),
                         static_cast<const uint16_t*>(gu), stride, static_cast<int>(width), limit);
}
