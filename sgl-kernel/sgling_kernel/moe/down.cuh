// What both forms of the down product (down.cu) share: operands, a token's hidden values, its sums.
#pragma once

#include "deal.cuh"
#include "tile.cuh"

struct Down {
    float* slots;
    const uint16_t *hidden, *w2, *shared_w2;  // shared_w2 null: no shared expert
    const long long* ids;
    int rows, top, experts, dim, width;
    Tiles tiles;  // of w2

    __device__ __forceinline__ int pairs() const { return rows * top; }
    // Row * slots + slot of a pair, and of a row's shared expert; -1 for pair -1 and for a row that does not exist.
    __device__ __forceinline__ int slot_of(int pair) const {
        return shared_w2 != nullptr && pair >= 0 ? pair + pair / top : pair;
    }
    __device__ __forceinline__ int shared_slot_of(int row) const { return row < rows ? (row + 1) * (top + 1) - 1 : -1; }
    // Where row `row0` of an expert's w2 starts; expert < 0 is the shared one.
    __device__ __forceinline__ const uint16_t* weights(int expert, int row0) const {
        const uint16_t* all = expert < 0 ? shared_w2 : w2 + static_cast<long long>(expert) * dim * width;
        return all + static_cast<long long>(row0) * width;
    }
};

// BATCH blocks of the hidden values of token lane / 4, which belong to slot `place` (-1: there is no such token).
template <int BATCH>
__device__ __forceinline__ void load_hidden(uint4 (&hidden)[BATCH], const Down& down, int place, int batch) {
    const uint16_t* x = down.hidden + static_cast<long long>(max(place, 0)) * down.width;
    x += batch * BATCH * BLOCK_COLUMNS + lane_id() % 4 * LANE_COLUMNS;
#pragma unroll
    for (int block = 0; block < BATCH; ++block)
        hidden[block] = place < 0 ? zero16() : load16(x + block * BLOCK_COLUMNS);
}

// The sums of 16 rows to where the tokens' values lie: lane 4 * token has the slot of a token (-1: there is none).
__device__ __forceinline__ void store_tokens(const Down& down, const float (&d)[4], int place, int row0) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int to = shfl(place, 4 * (2 * t + i));
        if (to < 0) continue;
        float* slot = down.slots + static_cast<long long>(to) * down.dim + row0;
        slot[g] = d[i];
        slot[g + 8] = d[2 + i];
    }
}
