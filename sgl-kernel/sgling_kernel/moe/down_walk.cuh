// The walking form of the down product (down.cu): which tiles a CTA has, a warp's ring, the tokens of an expert.
#pragma once

#include "bulk.cuh"
#include "down.cuh"
#include "weights.cuh"

// Warps of a CTA and tiles in a warp's ring. Both are free: they change no bit. Binding and launch know the product.
constexpr int WALK_WARPS = 12, WALK_STAGES = 2, WALK_TILES = WALK_WARPS * WALK_STAGES;

struct Workplace {
    int experts[MAX_PAIRS];  // of every pair
    unsigned bits[WARP];     // the chosen ones
    int next;                // tile of this CTA that no warp has asked for yet
    Landing landed[WALK_TILES];
};

// Fills the workplace. A whole CTA calls it; ends with a barrier.
__device__ __forceinline__ void prepare(Workplace& place, const Down& down) {
    stage_experts(place.experts, place.bits, down.ids, down.pairs(), down.experts, [&] {
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < WALK_TILES) landing_init(place.landed + thread);
        if (thread == 0) place.next = WALK_TILES;
    });
}

// A warp's ring. A tile's rows follow one another in memory, so a stage is one copy.
struct Ring {
    uint16_t* memory;
    Landing* landed;
    int expert, row0;  // lane s: of the tile in stage s; expert -1 is the shared one, NO_TILE: the CTA has no more

    static constexpr int NO_TILE = -2;

    // Asks for a tile of the CTA by its number. A whole warp calls it.
    __device__ __forceinline__ void request(const Share& share, const Down& down, int stage, int number) {
        int of = NO_TILE, row = 0;
        if (share.has(number)) {
            const Tile tile = share.tile(number);
            of = tile.expert, row = tile.tile * TILE_ROWS;
            if (lane_id() == 0) {
                const int size = TILE_ROWS * down.width;
                landing_expect(landed + stage, size * 2);
                bulk_copy(memory + stage * size, down.weights(of, row), size * 2, landed + stage);
            }
        }
        if (lane_id() == stage) expert = of, row0 = row;
    }
    // acc += tile of a stage times tokens, over BATCH blocks.
    template <int BATCH>
    __device__ __forceinline__ void multiply(float (&acc)[4], const Down& down, int stage, int batch,
                                             const uint4 (&tokens)[BATCH]) const {
        const uint16_t* part = lane_part(memory + stage * TILE_ROWS * down.width, down.width);
        part += batch * BATCH * BLOCK_COLUMNS;
#pragma unroll
        for (int block = 0; block < BATCH; ++block, part += BLOCK_COLUMNS) {
            const uint4 top = *reinterpret_cast<const uint4*>(part);
            const uint4 bottom = *reinterpret_cast<const uint4*>(part + 8 * down.width);
            multiply_block(acc, top, bottom, tokens[block]);
        }
    }
};

// Eight tokens of an expert from number `base` on; `place` is the slot of token lane / 4.
struct Tokens {
    int expert, base, count, place;

    __device__ __forceinline__ bool are(int of, int from) const { return expert == of && base == from; }
    // `experts` of all pairs. A whole warp calls it.
    __device__ __forceinline__ void find(const Down& down, const int* experts, int of, int from) {
        const int token = from + lane_id() / 4;
        expert = of, base = from, count = down.rows, place = down.shared_slot_of(token);
        if (expert < 0) return;
        int pair = -1;
        count = 0;
#pragma unroll 1
        for (int start = 0; start < down.pairs(); start += WARP) {
            const unsigned mask = ballot(experts[start + lane_id()] == expert);
            const int index = token - count, found = __popc(mask);
            if (index >= 0 && index < found) pair = start + nth_bit(mask, index);
            count += found;
        }
        place = down.slot_of(pair);
    }
};

// Zeros in the slots of pairs that name no expert. A whole CTA calls it.
__device__ __forceinline__ void clear_unchosen(const Down& down, const int* experts) {
#pragma unroll 1
    for (int pair = static_cast<int>(blockIdx.x); pair < down.pairs(); pair += static_cast<int>(gridDim.x)) {
        if (experts[pair] < down.experts) continue;
        float4* slot = reinterpret_cast<float4*>(down.slots + static_cast<long long>(down.slot_of(pair)) * down.dim);
#pragma unroll 1
        for (int at = static_cast<int>(threadIdx.x); at < down.dim / 4; at += static_cast<int>(blockDim.x))
            slot[at] = make_float4(0, 0, 0, 0);
    }
}
