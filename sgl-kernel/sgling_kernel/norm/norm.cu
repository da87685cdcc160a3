// RMS norms of bf16 rows, one CTA a row, eight columns a thread; statistics in fp32, one rounding (reference.py).
#include "rms.cuh"

constexpr int COLUMNS = 8;

struct Input {
    const uint16_t *x, *weight;
    long long stride;  // elements between two rows of x
};

// A weight that no node writes: loaded before the wait.
__device__ __forceinline__ void load_weight(float (&to)[COLUMNS], const uint16_t* weight, int column, bool inside) {
    widen8(to, inside ? load_stream16(weight + column) : make_uint4(0, 0, 0, 0));
}

__device__ __forceinline__ void scale_row(float (&x)[COLUMNS], const float (&weight)[COLUMNS], int dim, float eps) {
    __shared__ __align__(16) float partial[WARP];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) squares = fmaf(x[i], x[i], squares);
    const float scale = inverse_rms(block_sum(squares, partial), dim, eps);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], scale), weight[i]);
}

__global__ void rms_norm_kernel(uint16_t* out, Input input, int dim, float eps) {
    const int column = static_cast<int>(threadIdx.x) * COLUMNS;
    const bool inside = column < dim;
    float weight[COLUMNS], x[COLUMNS];
    load_weight(weight, input.weight, column, inside);
    pdl_wait();
    pdl_trigger();
    const long long row = blockIdx.x;
    widen8(x, inside ? load16(input.x + row * input.stride + column) : make_uint4(0, 0, 0, 0));
    scale_row(x, weight, dim, eps);
    if (inside) store16(out + row * dim + column, round8(x));
}

// out, new_residual [rows, dim]: the norm sees the unrounded sum, the stored stream is rounded once.
__global__ void add_rms_norm_kernel(uint16_t* out, uint16_t* new_residual, Input input, const uint16_t* residual,
                                    long long residual_stride, int dim, float eps) {
    const int column = static_cast<int>(threadIdx.x) * COLUMNS;
    const bool inside = column < dim;
    float weight[COLUMNS], x[COLUMNS], other[COLUMNS];
    load_weight(weight, input.weight, column, inside);
    pdl_wait();
    pdl_trigger();
    const long long row = blockIdx.x, at = row * dim + column;
    widen8(x, inside ? load16(input.x + row * input.stride + column) : make_uint4(0, 0, 0, 0));
    widen8(other, inside ? load16(residual + row * residual_stride + column) : make_uint4(0, 0, 0, 0));
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) x[i] = __fadd_rn(x[i], other[i]);
    if (inside) store16(new_residual + at, round8(x));
    scale_row(x, weight, dim, eps);
    if (inside) store16(out + at, round8(x));
}

static Input input_of(const void* x, const void* weight, long long stride) {
    return {static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(weight), stride};
}

// All bf16 [rows, dim]; strides are distances of two rows in elements, multiples of 8; dim is a multiple of 8 and at
// most 8192; addresses are multiples of 16 bytes.
extern "C" int rms_norm(void* out, const void* x, const void* weight, long long stride, long long rows, long long dim,
                        float eps, int pdl, void* stream) {
    return SGLING_LAUNCH(rms_norm_kernel, static_cast<unsigned>(rows), row_threads(dim, COLUMNS), 0, stream, pdl,
                         static_cast<uint16_t*>(out), input_of(x, weight, stride), static_cast<int>(dim), eps);
}

extern "C" int add_rms_norm(void* out, void* new_residual, const void* x, const void* residual, const void* weight,
                            long long stride, long long residual_stride, long long rows, long long dim, float eps,
                            int pdl, void* stream) {
    return SGLING_LAUNCH(add_rms_norm_kernel, static_cast<unsigned>(rows), row_threads(dim, COLUMNS), 0, stream, pdl,
                         static_cast<uint16_t*>(out), static_cast<uint16_t*>(new_residual),
                         input_of(x, weight, stride), static_cast<const uint16_t*>(residual), residual_stride,
                         static_cast<int>(dim), eps);
}
