// Small-M products in registers: a CTA owns 16 weight rows, K is cut into slices, one warp each.
//
// The tensor cores see the weight as the 16-row operand and tokens as the 8-column one. Both are loaded 16 bytes per
// lane: lane (g, t) takes columns 8 t .. 8 t + 7 of every 32-column block, of weight rows g and g + 8 and of token g.
// Those eight values feed two k = 16 instructions; the order of k inside an instruction differs from memory order, for
// both operands alike. The slice's weights are requested before pdl_wait(): the first HELD blocks into registers, the
// others into shared memory, where each lane finds its own 16 bytes again.
//
// Numerics, a property of the weight's shape alone: a slice's blocks in order into one fp32 accumulator, then the
// slices in order. Tokens never meet, so a row's bits do not depend on M, its place or its neighbours.
#pragma once

#include "tile.cuh"

constexpr int TOKEN_PITCH = 20;   // floats between tokens of the partial sums: no bank conflicts when they are written

// One warp's slice of the weight rows: BLOCKS blocks of 32 columns, HELD of them in registers.
template <int BLOCKS, int HELD>
struct WeightSlice {
    uint4 held[HELD][2];
    uint4* parked;  // of this thread, in shared memory: [BLOCKS - HELD][2] with a stride of the CTA's threads

    // Bytes of shared memory that a CTA of that many threads parks weights in.
    __host__ __device__ static constexpr size_t parked_bytes(int threads) {
        return (BLOCKS - HELD) * 2 * sizeof(uint4) * threads;
    }

    // Requests the slice. `column` is this lane's first column; columns from `last` on are replaced by `last`, rows
    // from `outputs` on by the last row (their results are never used).
    __device__ __forceinline__ void request(const uint16_t* w, int row, int outputs, int width, int column, int last,
                                            uint4* park) {
        const uint16_t* rows[2];
        rows[0] = w + static_cast<long long>(min(row, outputs - 1)) * width;
        rows[1] = w + static_cast<long long>(min(row + 8, outputs - 1)) * width;
        parked = park + threadIdx.x;
#pragma unroll
        for (int b = HELD; b < BLOCKS; ++b)
            for (int half = 0; half < 2; ++half)
                cp_async16(&parked[((b - HELD) * 2 + half) * blockDim.x],
                           rows[half] + min(column + b * BLOCK_COLUMNS, last));
        if (HELD < BLOCKS) cp_async_commit();
#pragma unroll
        for (int b = 0; b < HELD; ++b)
            for (int half = 0; half < 2; ++half)
                held[b][half] = load_stream16(rows[half] + min(column + b * BLOCK_COLUMNS, last));
    }

    // Block b, weight row g (half 0) or g + 8 (half 1). Behind cp_async_wait<0>() only.
    __device__ __forceinline__ uint4 block(int b, int half) const {
        return b < HELD ? held[b < HELD ? b : 0][half] : parked[((b - HELD) * 2 + half) * blockDim.x];
    }
};

// Where in a CTA's partial sums, in floats, those of a slice and a tile of weight rows begin: [TOKENS][TOKEN_PITCH]
// each, the TILES tiles of a slice in a row.
template <int TOKENS, int TILES = 1>
__device__ __forceinline__ constexpr int partial_at(int slice, int tile = 0) {
    return (slice * TILES + tile) * TOKENS * TOKEN_PITCH;
}

// Bytes of the partial sums of a CTA, one slice behind the other.
constexpr size_t partial_bytes(int slices, int tokens) { return sizeof(float) * slices * tokens * TOKEN_PITCH; }

// Leaves a warp's sums of one slice in shared memory [token][row], those of the first TOKENS tokens.
template <int TOKENS, int TILES>
__device__ __forceinline__ void store_partial(float* mine, const float (&acc)[TILES][4]) {
    static_assert(ceil_div(TOKENS, TILE_TOKENS) == TILES);
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = tile * TILE_TOKENS + 2 * t + i % 2;
            if ((tile + 1) * TILE_TOKENS <= TOKENS || token < TOKENS)
                mine[token * TOKEN_PITCH + g + i / 2 * 8] = acc[tile][i];
        }
}

// Where sums go: out[count, outputs], fp32 or bf16.
struct Output {
    void* out;
    int count, outputs, fp32;

    __device__ __forceinline__ void store(float sum, int token, int row) const {
        const long long at = static_cast<long long>(token) * outputs + row;
        if (fp32)
            static_cast<float*>(out)[at] = sum;
        else
            static_cast<uint16_t*>(out)[at] = to_bf16(sum);
    }
};

// Adds the slices in order and stores the sums of tokens and rows that exist, from a first one on.
template <int SLICES, int TOKENS, int TILES = 1>
__device__ __forceinline__ void add_slices(const Output& to, const float* partial, int first_token, int first_row) {
    for (int i = threadIdx.x; i < TILES * TOKENS * TILE_ROWS; i += blockDim.x) {
        const int token = i / TILE_ROWS % TOKENS, tile = i / (TILE_ROWS * TOKENS), row = i % TILE_ROWS;
        const int to_token = first_token + token, to_row = first_row + tile * TILE_ROWS + row;
        if (to_token >= to.count || to_row >= to.outputs) continue;
        const float* from = partial + token * TOKEN_PITCH + row;
        float sum = from[partial_at<TOKENS, TILES>(0, tile)];
#pragma unroll
        for (int s = 1; s < SLICES; ++s) sum = __fadd_rn(sum, from[partial_at<TOKENS, TILES>(s, tile)]);
        to.store(sum, to_token, to_row);
    }
}
