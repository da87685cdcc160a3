// Everything between the input projection of an MLA layer and attention in one node (see reference.py): absorbed
// queries, rotated queries, and the rows' own cache entries.
//
// CTAs 0 .. H * LATENT / COLUMNS - 1 multiply: one head and COLUMNS latent columns each, for all rows, with the weights
// in registers before the wait. The CTAs behind them take one row each: rotation, norm of the latent, cache entry.
#include "matrix.cuh"

namespace {

constexpr int THREADS = 128, WARPS = THREADS / WARP, COLUMNS = 16 * WARPS;

struct Prepare {
    const uint16_t *q_nope, *w_kc, *pe, *latent, *norm;  // rows of q_nope, pe and latent are strided (elements)
    long long stride_q, stride_pe, stride_latent;
    float eps;
    const int64_t *positions, *loc;
    const float* table;  // [P, ROPE / 2, (cos, sin)]
    uint16_t *kv_pool, *q_lat, *q_pe;
    int rows, heads;
};

// Slot s of step u of a pair of k16 steps holds this one of the pair's 32 columns: lane t of a fragment then needs the
// eight neighbours 8 t .. 8 t + 7.
__device__ __forceinline__ int column_of_slot(int s, int u) { return s % 8 / 2 * 8 + 4 * u + s / 8 * 2 + s % 2; }

template <int NOPE, int LATENT>
__device__ __forceinline__ void absorb(const Prepare& p, unsigned char* shared) {
    constexpr int PITCH = COLUMNS + 8, PAIRS = NOPE / 32;
    uint16_t* tile = reinterpret_cast<uint16_t*>(shared);
    const int head = blockIdx.x / (LATENT / COLUMNS), first = blockIdx.x % (LATENT / COLUMNS) * COLUMNS;
    const uint16_t* weights = p.w_kc + static_cast<size_t>(head) * NOPE * LATENT + first;
    for (int i = threadIdx.x; i < NOPE * COLUMNS / 8; i += THREADS) {
        const int k = i / (COLUMNS / 8), c = i % (COLUMNS / 8) * 8;
        cp_async16(tile + k * PITCH + c, weights + static_cast<size_t>(k) * LATENT + c);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const int lane = lane_id(), g = lane / 4, t = lane % 4;
    uint32_t a[PAIRS][2][4];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int k = 32 * i + column_of_slot(lane / 16 * 8 + lane % 8, u);
            load_matrices_transposed(a[i][u], tile + k * PITCH + 16 * warp_id() + lane / 8 % 2 * 8);
        }
    pdl_wait();
    pdl_trigger();
    const uint16_t* queries = p.q_nope + head * NOPE + 8 * t;
    uint16_t* out = p.q_lat + static_cast<size_t>(head) * LATENT + first + 16 * warp_id() + g;
    for (int n0 = 0; n0 < p.rows; n0 += 8) {
        const int n = min(n0 + g, p.rows - 1);
        float d[4] = {};
        uint4 q[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) q[i] = load16(queries + n * p.stride_q + 32 * i);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const uint32_t low[2] = {q[i].x, q[i].y}, high[2] = {q[i].z, q[i].w};
            mma_bf16_16816(d, a[i][0], low);
            mma_bf16_16816(d, a[i][1], high);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = n0 + 2 * t + e % 2;
            if (row < p.rows) out[static_cast<size_t>(row) * p.heads * LATENT + e / 2 * 8] = to_bf16(d[e]);
        }
    }
}

template <int LATENT, int ROPE>
__device__ __forceinline__ void store_row(const Prepare& p, int n, unsigned char* shared) {
    constexpr int EACH = LATENT / THREADS, HALF = ROPE / 2;
    float* sums = reinterpret_cast<float*>(shared);
    float weight[EACH], value[EACH], sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) weight[e] = to_float(p.norm[threadIdx.x + e * THREADS]);
    pdl_wait();
    pdl_trigger();
    uint16_t* entry = p.kv_pool + p.loc[n] * (LATENT + ROPE);
    const float* angles = p.table + p.positions[n] * ROPE;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        value[e] = to_float(p.latent[n * p.stride_latent + threadIdx.x + e * THREADS]);
        sum = fmaf(value[e], value[e], sum);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) sums[warp_id()] = sum;
    for (int i = threadIdx.x; i < (p.heads + 1) * HALF; i += THREADS) {
        const int head = i / HALF, pair = i % HALF;
        const uint16_t* from = p.pe + n * p.stride_pe + head * ROPE + 2 * pair;
        const float first = to_float(from[0]), second = to_float(from[1]);
        const float cosine = angles[2 * pair], sine = angles[2 * pair + 1];
        const uint32_t turned = pack_bf16(__fsub_rn(__fmul_rn(first, cosine), __fmul_rn(second, sine)),
                                          __fadd_rn(__fmul_rn(second, cosine), __fmul_rn(first, sine)));
        uint16_t* to = head == p.heads ? entry + LATENT : p.q_pe + (static_cast<size_t>(n) * p.heads + head) * ROPE;
        reinterpret_cast<uint32_t*>(to)[pair] = turned;
    }
    __syncthreads();
    const float total = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
    const float scale = rsqrtf(__fadd_rn(__fdiv_rn(total, LATENT), p.eps));
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const float normed = __fmul_rn(__fmul_rn(value[e], scale), weight[e]);
        const bool finite = fabsf(normed) < CUDART_INF_F;  // what a row must not see is then 0 times a number
        entry[threadIdx.x + e * THREADS] = to_bf16(finite ? normed : 0.0f);
    }
}

template <int NOPE, int LATENT, int ROPE>
__global__ void __launch_bounds__(THREADS) prepare_kernel(Prepare p) {
    SGLING_DYNAMIC_SHARED(unsigned char, shared);
    const int products = p.heads * (LATENT / COLUMNS), index = static_cast<int>(blockIdx.x);
    if (index < products) {
        absorb<NOPE, LATENT>(p, shared);
    } else {
        store_row<LATENT, ROPE>(p, index - products, shared);
    }
}

template <int NOPE, int LATENT, int ROPE>
int launch_prepare(const Prepare& p, int pdl, void* stream) {
    const unsigned blocks = p.heads * (LATENT / COLUMNS) + p.rows;
    const size_t shared = static_cast<size_t>(NOPE) * (COLUMNS + 8) * sizeof(uint16_t);
    return SGLING_LAUNCH((prepare_kernel<NOPE, LATENT, ROPE>), dim3(blocks), dim3(THREADS), shared, stream, pdl, p);
}

}  // namespace

// q_nope [rows, heads, nope], pe [rows, heads + 1, rope] (last: the key), latent [rows, latent]; strides in elements.
// Shapes: nope 128, latent 512, rope 64.
extern "C" int mla_prepare(const void* q_nope, const void* w_kc, const void* pe, const void* latent, const void* norm,
                           long long stride_q, long long stride_pe, long long stride_latent, float eps,
                           const void* positions, const void* table, void* kv_pool, const void* loc, void* q_lat,
                           void* q_pe, long long rows, long long heads, int pdl, void* stream) {
    Prepare p{};
    p.q_nope = static_cast<const uint16_t*>(q_nope);
    p.w_kc = static_cast<const uint16_t*>(w_kc);
    p.pe = static_cast<const uint16_t*>(pe);
    p.latent = static_cast<const uint16_t*>(latent);
    p.norm = static_cast<const uint16_t*>(norm);
    p.stride_q = stride_q;
    p.stride_pe = stride_pe;
    p.stride_latent = stride_latent;
    p.eps = eps;
    p.positions = static_cast<const int64_t*>(positions);
    p.loc = static_cast<const int64_t*>(loc);
    p.table = static_cast<const float*>(table);
    p.kv_pool = static_cast<uint16_t*>(kv_pool);
    p.q_lat = static_cast<uint16_t*>(q_lat);
    p.q_pe = static_cast<uint16_t*>(q_pe);
    p.rows = static_cast<int>(rows);
    p.heads = static_cast<int>(heads);
    return launch_prepare<128, 512, 64>(p, pdl, stream);
}
