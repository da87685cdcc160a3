// 16 weight rows times 8 tokens over a block of 32 columns, on tensor cores straight from 16-byte loads.
//
// With g = lane / 4 and t = lane % 4 a lane holds columns 8 t .. 8 t + 7 of the block: of weight rows g and g + 8, and
// of token g. Those eight values feed two k = 16 instructions; the order of k inside an instruction differs from memory
// order, for both operands alike. A lane's sums acc[0..3] belong to weight rows g, g, g + 8, g + 8 and tokens 2 t,
// 2 t + 1, 2 t, 2 t + 1. The sum of one token never depends on the other seven.
#pragma once

#include "sgling.cuh"

constexpr int TILE_ROWS = 16;      // weight rows of a tile
constexpr int TILE_TOKENS = 8;     // tokens of one instruction
constexpr int BLOCK_COLUMNS = 32;  // columns that one 16-byte load per lane covers
constexpr int LANE_COLUMNS = 8;    // consecutive columns of a lane

__device__ __forceinline__ uint4 zero16() { return make_uint4(0, 0, 0, 0); }

// acc += weight rows (top: row g, bottom: row g + 8) times tokens, over one block.
__device__ __forceinline__ void multiply_block(float (&acc)[4], const uint4& top, const uint4& bottom,
                                               const uint4& tokens) {
    const uint32_t a0[4] = {top.x, bottom.x, top.y, bottom.y}, b0[2] = {tokens.x, tokens.y};
    mma_bf16_16816(acc, a0, b0);
    const uint32_t a1[4] = {top.z, bottom.z, top.w, bottom.w}, b1[2] = {tokens.z, tokens.w};
    mma_bf16_16816(acc, a1, b1);
}
