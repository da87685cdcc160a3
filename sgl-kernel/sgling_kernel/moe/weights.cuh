// What a lane holds of an expert's weight: its 16 bytes of two rows in every block of 32 columns (tile.cuh).
#pragma once

#include "tile.cuh"

struct WeightBlock {
    uint4 top, bottom;  // rows g and g + 8 of the tile
};

// Address of a lane's part of the first block of a tile whose row 0 starts at `tile`; rows lie `stride` elements apart.
__device__ __forceinline__ const uint16_t* lane_part(const uint16_t* tile, long long stride) {
    return tile + (lane_id() / 4) * stride + (lane_id() % 4) * LANE_COLUMNS;
}

__device__ __forceinline__ WeightBlock load_block(const uint16_t* part, long long stride, int block) {
    return {load_stream16(part + block * BLOCK_COLUMNS), load_stream16(part + 8 * stride + block * BLOCK_COLUMNS)};
}
