// 8x8 bf16 matrices from shared memory into mma fragments (ldmatrix), four at a time; sums transposed between lanes.
#pragma once

#include "sgling.cuh"

#ifdef SGLING_EMULATE
// Lane 8 i + r hands in the address of row r of matrix i; the exchange is the rendezvous that ldmatrix is.
static inline const unsigned char* matrix_row(const void* row, int lane) {
    return reinterpret_cast<const unsigned char*>(shfl(reinterpret_cast<uint64_t>(row), lane));
}
static inline uint16_t matrix_half(const unsigned char* row, int column) {
    uint16_t half;
    memcpy(&half, row + 2 * column, 2);
    return half;
}
#endif

// out[i]: of matrix i the elements (lane / 4, 2 (lane % 4)) and the next column; row r of matrix i lies at the address
// that lane 8 i + r passes, 16 bytes, aligned.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], const void* row) {
#ifdef SGLING_EMULATE
    for (int i = 0; i < 4; ++i) {
        const unsigned char* from = matrix_row(row, 8 * i + lane_id() / 4);
        const int column = lane_id() % 4 * 2;
        out[i] = matrix_half(from, column) | static_cast<uint32_t>(matrix_half(from, column + 1)) << 16;
    }
#else
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
#endif
}

// The same of the transposed matrices: elements (2 (lane % 4), lane / 4) and the next row.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
#ifdef SGLING_EMULATE
    for (int i = 0; i < 4; ++i) {
        const unsigned char* low = matrix_row(row, 8 * i + lane_id() % 4 * 2);
        const unsigned char* high = matrix_row(row, 8 * i + lane_id() % 4 * 2 + 1);
        const int column = lane_id() / 4;
        out[i] = matrix_half(low, column) | static_cast<uint32_t>(matrix_half(high, column)) << 16;
    }
#else
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
#endif
}

// Transposes 4 x 4 values between the lanes at distances 4 and 8: lane `place` gets number `place` of each.
__device__ __forceinline__ void transpose_quad(float (&value)[4], int place) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = place & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const float got = shfl_xor(upper ? value[i] : value[i + bit], 4 * bit);
            if (upper)
                value[i] = got;
            else
                value[i + bit] = got;
        }
    }
}
