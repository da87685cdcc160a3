// The output projection of KDA with the gated norm folded in: operands and arithmetic of both kernels.
//
// x' = round(o w sigmoid(z)) is multiplied as it is; the head's 1 / rms(o), a number per token and head, scales the
// head's fp32 sum. Compared with the two-node form the rounding sits before the scaling and not behind it.
// Reference: linear/reference.py, gated_linear_folded.
#pragma once

#include "small_m.cuh"

constexpr int HEAD_COLUMNS = 128;
constexpr int HEAD_BLOCKS = HEAD_COLUMNS / BLOCK_COLUMNS, HALF = HEAD_BLOCKS / 2;

struct GatedProduct {
    uint16_t* out;         // [count, outputs]
    const uint16_t* o;     // [count, width], rows `stride_o` elements apart
    const uint16_t* z;     // likewise
    const uint16_t* norm;  // [128]
    const uint16_t* w;     // [outputs, width]
    long long stride_o, stride_z;
    int count, outputs, width;
    int z_aligned;  // whether the rows of z begin at multiples of 16 bytes; otherwise of 4
    float eps;

    __device__ __forceinline__ Output output() const { return {out, count, outputs, outputs, 0}; }
};

// 16 bytes of z, which may be a part of a fused projection at an odd place.
__device__ __forceinline__ uint4 load_gate(const uint16_t* from, int aligned) {
    if (aligned) return load16(from);
    const volatile uint32_t* words = reinterpret_cast<const volatile uint32_t*>(from);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// round(o · norm · σ(z)) of a pair of columns.
__device__ __forceinline__ uint32_t gate_pair(uint32_t o, uint32_t z, uint32_t norm) {
    return pack_bf16(__fmul_rn(__fmul_rn(bf16_lo(o), bf16_lo(norm)), sigmoid(bf16_lo(z))),
                     __fmul_rn(__fmul_rn(bf16_hi(o), bf16_hi(norm)), sigmoid(bf16_hi(z))));
}

__device__ __forceinline__ uint4 gate16(const uint4& o, const uint4& z, const uint4& norm) {
    return make_uint4(gate_pair(o.x, z.x, norm.x), gate_pair(o.y, z.y, norm.y), gate_pair(o.z, z.z, norm.z),
                      gate_pair(o.w, z.w, norm.w));
}

// sum + o² of eight columns, in order.
__device__ __forceinline__ float add_squares(const uint4& o, float sum) {
    const uint32_t pairs[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(bf16_lo(pairs[i]), bf16_lo(pairs[i]), sum);
        sum = fmaf(bf16_hi(pairs[i]), bf16_hi(pairs[i]), sum);
    }
    return sum;
}

// 1 / rms(o) of a head; `squares` is the lane's share of its token's sum of o².
__device__ __forceinline__ float head_scale(float squares, float eps) {
    squares = __fadd_rn(squares, shfl_xor(squares, 1));
    squares = __fadd_rn(squares, shfl_xor(squares, 2));
    return rsqrtf(fmaf(squares, 1.0f / HEAD_COLUMNS, eps));
}

// Half a head of one token as this lane loads it.
struct HalfHead {
    uint4 o[HALF], z[HALF];

    __device__ __forceinline__ void request(const GatedProduct& p, int token, int column) {
#pragma unroll
        for (int b = 0; b < HALF; ++b) {
            o[b] = load16(p.o + token * p.stride_o + column + b * BLOCK_COLUMNS);
            z[b] = load_gate(p.z + token * p.stride_z + column + b * BLOCK_COLUMNS, p.z_aligned);
        }
    }
};
