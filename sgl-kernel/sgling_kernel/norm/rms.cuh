// One row spread over the threads of a CTA, and its root mean square.
#pragma once

#include "sgling.cuh"

// partial[0] + partial[1] + ... + partial[count - 1], in this order; `partial` [WARP] is aligned to 16 bytes.
__device__ __forceinline__ float sum_in_order(const float* partial, int count) {
    float4 parts[WARP / 4];
#pragma unroll
    for (int i = 0; i < WARP / 4; ++i) parts[i] = reinterpret_cast<const float4*>(partial)[i];
    float total = parts[0].x;
#pragma unroll
    for (int i = 0; i < WARP / 4; ++i) {
        if (4 * i >= count) break;
        if (i > 0) total = __fadd_rn(total, parts[i].x);
        if (4 * i + 1 < count) total = __fadd_rn(total, parts[i].y);
        if (4 * i + 2 < count) total = __fadd_rn(total, parts[i].z);
        if (4 * i + 3 < count) total = __fadd_rn(total, parts[i].w);
    }
    return total;
}

// Sum over the threads of a CTA of whole warps, the same bits in every thread: lanes by a tree, then warps in order.
// `partial` [WARP] lies in shared memory, aligned to 16 bytes, and is not used again before the next barrier.
__device__ __forceinline__ float block_sum(float value, float* partial) {
    value = warp_sum(value);
    if (lane_id() == 0) partial[warp_id()] = value;
    __syncthreads();
    return sum_in_order(partial, static_cast<int>(blockDim.x) / WARP);
}

// (mean(x^2) + eps)^(-1/2) of a row of `dim` values from the sum of their squares.
__device__ __forceinline__ float inverse_rms(float squares, int dim, float eps) {
    return rsqrtf(__fadd_rn(__fdiv_rn(squares, static_cast<float>(dim)), eps));
}

// Eight bf16 values (16 bytes) as fp32, and back with one rounding each.
__device__ __forceinline__ void widen8(float (&to)[8], uint4 from) {
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = bf16_lo(words[i]);
        to[2 * i + 1] = bf16_hi(words[i]);
    }
}

__device__ __forceinline__ uint4 round8(const float (&from)[8]) {
    return make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]),
                      pack_bf16(from[6], from[7]));
}

// Threads that hold a row of `dim` columns, `columns` each: a function of the row's length alone, so that no other row
// and no batch size changes the order of the sum.
inline unsigned row_threads(long long dim, int columns) {
    return static_cast<unsigned>(ceil_div(dim / columns, WARP) * WARP);
}
