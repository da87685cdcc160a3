// What both forms of the up product share: operands, which lane holds which rows of a tile, and the finish of a pair.
#pragma once

#include "deal.cuh"
#include "swiglu.cuh"
#include "tile.cuh"

constexpr int TILE_PAIRS = TILE_ROWS / 2;           // gate/up pairs of a tile: rows 2 p and 2 p + 1
constexpr int TILE_SUMS = TILE_ROWS * TILE_TOKENS;  // sums of one tile; element 4 * lane + i is acc[i] of that lane

struct Up {
    uint16_t* hidden;
    const uint16_t *x, *w13, *shared_w13;  // shared_w13 null: no shared expert
    const long long* ids;
    long long stride_x;
    int rows, top, experts, dim, width;
    float limit, shared_limit;
    Tiles tiles;  // of w13

    __device__ __forceinline__ int slots() const { return top + (shared_w13 != nullptr); }
    // Row 0 of a tile; expert < 0 is the shared one.
    __device__ __forceinline__ const uint16_t* tile(int expert, int tile) const {
        const uint16_t* weights = expert < 0 ? shared_w13 : w13 + static_cast<long long>(expert) * 2 * width * dim;
        return weights + static_cast<long long>(tile) * TILE_ROWS * dim;
    }
};

// The pair of a lane: its gate is row g = lane / 4 of the instruction, its up row g + 8, so both sums of a token are
// acc[i] and acc[i + 2] of one lane. Lanes of neighbouring rows hold pairs of the tile's two halves.
__device__ __forceinline__ int pair_of_lane() { return lane_id() / 8 + lane_id() / 4 % 2 * (TILE_PAIRS / 2); }

// A lane's four sums of this warp's slice, and the sum over slices of element `element`, in slice order.
__device__ __forceinline__ void keep_slice(float* sums, const float (&d)[4]) {
    reinterpret_cast<float4*>(sums)[threadIdx.x] = make_float4(d[0], d[1], d[2], d[3]);
}
template <int SLICES>
__device__ __forceinline__ float sum_slices(const float* sums, int element) {
    float total = sums[element];
#pragma unroll
    for (int slice = 1; slice < SLICES; ++slice) total = __fadd_rn(total, sums[slice * TILE_SUMS + element]);
    return total;
}

// Finishes this lane's pair for its token number `i` (0 or 1): gate and up rounded, SwiGLU in fp32, one rounding.
// `hidden` is where the token's value of pair 0 of the tile goes.
template <int SLICES>
__device__ __forceinline__ void finish_pair(uint16_t* hidden, const float* sums, int i, float limit) {
    const int element = 4 * lane_id() + i;
    const float gate = sum_slices<SLICES>(sums, element), up = sum_slices<SLICES>(sums, element + 2);
    hidden[pair_of_lane()] = to_bf16(clamped_swiglu(to_float(to_bf16(gate)), to_float(to_bf16(up)), limit));
}
