// What is left of an MoE layer behind its down product: weigh and sum the slots of a row (combine), and in one node
// with it the residual add and the next RMSNorm. Four columns a thread. A row of 92 KB of slots is more than one
// multiprocessor reads in the time of a small node, so a row is cut into CTAs: a cluster, where its squares are summed.
// The number of CTAs changes no bit: the sum runs over the row's warps in order.
//
// Roundings are those of the reference: the routed sum, the shared expert, their sum; the norm sees the unrounded
// residual sum and the stored stream is rounded once.
//
// The routing weights and the residual are read before pdl_wait(): they are older than the up and down products, which
// wait before they trigger. They are read past L1, which may still hold a line of an earlier layer.
#include "../norm/rms.cuh"
#include "cluster.cuh"

constexpr int COLUMNS = 4, MAX_TOP = 8, MAX_DIM = 4096;

struct Slots {
    const float *values, *weights;  // [rows, top (+ 1: the shared expert, last), dim], [rows, top]
    int top, dim;
    bool shared;

    __device__ __forceinline__ int count() const { return top + shared; }
};

// Grid (CTAs of a row, rows): the row, and the first column of this thread.
__device__ __forceinline__ long long this_row() { return blockIdx.y; }
__device__ __forceinline__ int this_column() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * COLUMNS; }

__device__ __forceinline__ float rounded(float value) { return to_float(to_bf16(value)); }

// Slots beyond the last one are read as the last one and left out of the sum: no load waits behind a branch.
__device__ __forceinline__ void load_weights(float (&weights)[MAX_TOP], const Slots& slots) {
    const float* row = slots.weights + this_row() * slots.top;
#pragma unroll
    for (int slot = 0; slot < MAX_TOP; ++slot) weights[slot] = __ldcg(row + min(slot, slots.top - 1));
}

// What the down product wrote of the thread's columns; the shared expert (or again the last slot) comes last. It stands
// between pdl_wait() and pdl_trigger(): behind both, ptxas saves registers and waits for one load before the next.
__device__ __forceinline__ void load_slots(uint4 (&parts)[MAX_TOP + 1], const Slots& slots, int column) {
    const float* row = slots.values + this_row() * slots.count() * slots.dim + column;
#pragma unroll
    for (int slot = 0; slot < MAX_TOP; ++slot) parts[slot] = load16(row + min(slot, slots.top - 1) * slots.dim);
    parts[MAX_TOP] = load16(row + (slots.count() - 1) * slots.dim);
}

// The layer's output, rounded, of the thread's columns.
__device__ __forceinline__ void combine_columns(float (&out)[COLUMNS], const uint4 (&parts)[MAX_TOP + 1],
                                                const Slots& slots, const float (&weights)[MAX_TOP]) {
    float routed[COLUMNS] = {0, 0, 0, 0};
#pragma unroll
    for (int slot = 0; slot < MAX_TOP; ++slot) {
        const uint32_t words[COLUMNS] = {parts[slot].x, parts[slot].y, parts[slot].z, parts[slot].w};
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const float sum = fmaf(weights[slot], __uint_as_float(words[i]), routed[i]);
            routed[i] = slot < slots.top ? sum : routed[i];
        }
    }
    const uint4& last = parts[MAX_TOP];
    const uint32_t words[COLUMNS] = {last.x, last.y, last.z, last.w};
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const float alone = rounded(routed[i]), both = rounded(__fadd_rn(alone, rounded(__uint_as_float(words[i]))));
        out[i] = slots.shared ? both : alone;
    }
}

__device__ __forceinline__ void widen4(float (&to)[COLUMNS], uint2 from) {
    to[0] = bf16_lo(from.x), to[1] = bf16_hi(from.x), to[2] = bf16_lo(from.y), to[3] = bf16_hi(from.y);
}
__device__ __forceinline__ void store4(uint16_t* to, const float (&from)[COLUMNS]) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]));
}
__device__ __forceinline__ uint2 load8(const uint16_t* from) { return __ldcg(reinterpret_cast<const uint2*>(from)); }

__global__ void __launch_bounds__(MAX_DIM / COLUMNS) combine_kernel(uint16_t* out, Slots slots) {
    const bool inside = this_column() < slots.dim;
    const int column = inside ? this_column() : 0;
    float weights[MAX_TOP], value[COLUMNS];
    load_weights(weights, slots);
    uint4 parts[MAX_TOP + 1];
    pdl_wait();
    load_slots(parts, slots, column);
    pdl_trigger();
    combine_columns(value, parts, slots, weights);
    if (inside) store4(out + this_row() * slots.dim + column, value);
}

struct Row {
    alignas(16) float partial[WARP];  // sums of the row's warps
    Landing landing;                  // of those sent by the cluster's CTAs
};

// Sum over the threads of a row, the same bits in every thread: lanes by a tree, then the row's warps in order.
template <bool CLUSTER>
__device__ __forceinline__ float row_sum(float value, Row& row) {
    if constexpr (!CLUSTER) return block_sum(value, row.partial);
    const int warps = static_cast<int>(blockDim.x) / WARP, ctas = static_cast<int>(gridDim.x);
    const int place = static_cast<int>(blockIdx.x) * warps + warp_id();
    value = warp_sum(value);
    cluster_wait();
    if (lane_id() < ctas) send_in_cluster(row.partial + place, &row.landing, lane_id(), value);
    landing_wait(&row.landing, 0);
    return sum_in_order(row.partial, warps * ctas);
}

template <bool CLUSTER>
__global__ void __launch_bounds__(CLUSTER ? MAX_DIM / COLUMNS / 2 : MAX_DIM / COLUMNS)
    combine_add_rms_norm_kernel(uint16_t* out, uint16_t* new_residual, Slots slots, const uint16_t* residual,
                                long long stride, const uint16_t* norm_weight, float eps) {
    __shared__ Row row;
    if constexpr (CLUSTER) {
        if (threadIdx.x == 0) {
            landing_init(&row.landing);
            landing_expect(&row.landing, static_cast<int>(gridDim.x * blockDim.x / WARP * sizeof(float)));
        }
        cluster_arrive_with_landings();
    }
    const bool inside = this_column() < slots.dim;
    const int column = inside ? this_column() : 0;
    float weights[MAX_TOP], scale[COLUMNS], value[COLUMNS], old[COLUMNS];
    load_weights(weights, slots);
    widen4(scale, load8(norm_weight + column));
    widen4(old, load8(residual + this_row() * stride + column));
    uint4 parts[MAX_TOP + 1];
    pdl_wait();
    load_slots(parts, slots, column);
    pdl_trigger();
    float squares = 0.0f;
    combine_columns(value, parts, slots, weights);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        value[i] = __fadd_rn(value[i], old[i]);
        if (inside) squares = fmaf(value[i], value[i], squares);
    }
    const float inverse = inverse_rms(row_sum<CLUSTER>(squares, row), slots.dim, eps);
    if (!inside) return;
    const long long at = this_row() * slots.dim + column;
    store4(new_residual + at, value);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) value[i] = __fmul_rn(__fmul_rn(value[i], inverse), scale[i]);
    store4(out + at, value);
}

// Threads of each of the `ctas` CTAs of a row; 0: the row's warps cannot be dealt evenly to so many.
static unsigned cta_threads(long long dim, long long ctas) {
    const unsigned threads = row_threads(dim, COLUMNS), count = static_cast<unsigned>(ctas);
    return count >= 1 && count <= 8 && threads % (count * WARP) == 0 ? threads / count : 0;
}

// out bf16 [rows, dim] from values fp32 [rows, top + shared, dim] and weights fp32 [rows, top]; top <= 8, dim a
// multiple of 4 and at most 4096; `ctas` to a row, which must divide its warps. Returns 1 (invalid value) otherwise.
extern "C" int combine(void* out, const float* values, const float* weights, long long rows, long long top,
                       long long dim, int shared, long long ctas, int pdl, void* stream) {
    const unsigned threads = cta_threads(dim, ctas);
    if (top > MAX_TOP || dim > MAX_DIM || threads == 0) return 1;
    const Slots slots{values, weights, static_cast<int>(top), static_cast<int>(dim), shared != 0};
    const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(rows));
    return SGLING_LAUNCH(combine_kernel, grid, threads, 0, stream, pdl, static_cast<uint16_t*>(out), slots);
}

// The same, then out = norm of (combined + residual) and new_residual = that sum, all bf16 [rows, dim]; `stride` is the
// distance of two rows of residual in elements. More than one CTA to a row needs compute capability 9.0.
extern "C" int combine_add_rms_norm(void* out, void* new_residual, const float* values, const float* weights,
                                    const void* residual, long long stride, const void* norm_weight, long long rows,
                                    long long top, long long dim, int shared, float eps, long long ctas, int pdl,
                                    void* stream) {
    const unsigned threads = cta_threads(dim, ctas);
    if (top > MAX_TOP || dim > MAX_DIM || threads == 0) return 1;
    const Slots slots{values, weights, static_cast<int>(top), static_cast<int>(dim), shared != 0};
    const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(rows));
    const auto kernel = ctas == 1 ? combine_add_rms_norm_kernel<false> : combine_add_rms_norm_kernel<true>;
    return sgling_launch_cluster(kernel, grid.x, grid, threads, stream, pdl, static_cast<uint16_t*>(out),
                                 static_cast<uint16_t*>(new_residual), slots, static_cast<const uint16_t*>(residual),
                                 stride, static_cast<const uint16_t*>(norm_weight), eps);
}
