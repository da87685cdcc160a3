// The output projection of KDA with the gated norm folded in: one K slice is one or more whole heads.
//
// x' = round(o w sigmoid(z)) is multiplied as it is; the head's 1 / rms(o), a number per token and head, scales the
// head's fp32 sum. Compared with the two-node form the rounding sits before the scaling and not behind it.
// A CTA owns one or two tiles of weight rows: every CTA gates all tokens, so with two the GPU gates half as often; no bit
// depends on it. Reference: linear/reference.py, gated_linear_folded.
#include "small_m.cuh"

constexpr int HEAD_COLUMNS = 128;
constexpr int HEAD_BLOCKS = HEAD_COLUMNS / BLOCK_COLUMNS, HALF = HEAD_BLOCKS / 2;

struct GatedProduct {
    uint16_t* out;         // [count, outputs]
    const uint16_t* o;     // [count, width], rows `stride_o` elements apart
    const uint16_t* z;     // likewise
    const uint16_t* norm;  // [128]
    const uint16_t* w;     // [outputs, width]
    long long stride_o, stride_z;
    int count, outputs, width;
    int z_aligned;  // whether the rows of z begin at multiples of 16 bytes; otherwise of 4
    float eps;
};

// 16 bytes of z, which may be a part of a fused projection at an odd place.
__device__ __forceinline__ uint4 load_gate(const uint16_t* from, int aligned) {
    if (aligned) return load16(from);
    const volatile uint32_t* words = reinterpret_cast<const volatile uint32_t*>(from);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// round(o · norm · σ(z)) of a pair of columns; adds o² of both to `squares`.
__device__ __forceinline__ uint32_t gate_pair(uint32_t o, uint32_t z, uint32_t norm, float& squares) {
    const float lo = bf16_lo(o), hi = bf16_hi(o);
    squares = fmaf(lo, lo, squares);
    squares = fmaf(hi, hi, squares);
    return pack_bf16(__fmul_rn(__fmul_rn(lo, bf16_lo(norm)), sigmoid(bf16_lo(z))),
                     __fmul_rn(__fmul_rn(hi, bf16_hi(norm)), sigmoid(bf16_hi(z))));
}

__device__ __forceinline__ uint4 gate16(const uint4& o, const uint4& z, const uint4& norm, float& squares) {
    uint4 x;
    x.x = gate_pair(o.x, z.x, norm.x, squares);
    x.y = gate_pair(o.y, z.y, norm.y, squares);
    x.z = gate_pair(o.z, z.z, norm.z, squares);
    x.w = gate_pair(o.w, z.w, norm.w, squares);
    return x;
}

// Half a head of one token as this lane loads it.
struct HalfHead {
    uint4 o[HALF], z[HALF];

    // Tokens that do not exist repeat the last one; their sums are not stored.
    __device__ __forceinline__ void request(const GatedProduct& p, int token, int column) {
        token = min(token, p.count - 1);
#pragma unroll
        for (int b = 0; b < HALF; ++b) {
            o[b] = load16(p.o + token * p.stride_o + column + b * BLOCK_COLUMNS);
            z[b] = load_gate(p.z + token * p.stride_z + column + b * BLOCK_COLUMNS, p.z_aligned);
        }
    }
};

// total += sum / rms(o) for the two tokens of this lane; `squares` is the lane's share of its own token's sum of o².
__device__ __forceinline__ void add_head(float (&total)[4], const float (&sum)[4], float squares, float eps) {
    squares = __fadd_rn(squares, shfl_xor(squares, 1));
    squares = __fadd_rn(squares, shfl_xor(squares, 2));
    const float scale = rsqrtf(fmaf(squares, 1.0f / HEAD_COLUMNS, eps));
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // the sums belong to tokens 2 t and 2 t + 1, whose lanes are 4 (2 t + i) and on
        const float of_token = shfl(scale, (lane_id() % 4 * 2 + i) * 4);
        total[i] = fmaf(sum[i], of_token, total[i]);
        total[i + 2] = fmaf(sum[i + 2], of_token, total[i + 2]);
    }
}

// One warp: TILES tiles of tokens through its HEADS heads, half a head at a time, two halves requested ahead.
template <int HEADS, int TILES, int ROW_TILES>
__device__ __forceinline__ void multiply_heads(
    float (&total)[ROW_TILES][TILES][4], const GatedProduct& p,
    const WeightSlice<HEADS * HEAD_BLOCKS, HEADS * HEAD_BLOCKS> (&weights)[ROW_TILES], const uint4* norm, int token,
    int column) {
    constexpr int HALVES = 2 * HEADS, STAGES = TILES * HALVES;
    HalfHead waiting[2];
    waiting[0].request(p, token, column);
    waiting[1].request(p, token, column + HALF * BLOCK_COLUMNS);
    float sum[ROW_TILES][4] = {}, squares = 0;
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        const int tile = stage / HALVES, half = stage % HALVES;
        const HalfHead& now = waiting[stage % 2];
#pragma unroll
        for (int b = 0; b < HALF; ++b) {
            const uint4 x = gate16(now.o[b], now.z[b], norm[(half % 2 * HALF + b) * 4], squares);
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
                multiply_block(sum[r], weights[r].block(half * HALF + b, 0), weights[r].block(half * HALF + b, 1), x);
        }
        if (half % 2 == 1) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                add_head(total[r][tile], sum[r], squares, p.eps);
                sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = 0;
            }
            squares = 0;
        }
        if (stage + 2 < STAGES) {
            __syncwarp();  // keeps the compiler from requesting more than the registers hold
            waiting[stage % 2].request(p, token + (stage + 2) / HALVES * TILE_TOKENS,
                                       column + (stage + 2) % HALVES * HALF * BLOCK_COLUMNS);
        }
    }
}

template <int HEADS, int TILES, int ROW_TILES, int THREADS, int PER_SM>
__global__ void __launch_bounds__(THREADS, PER_SM) gated_kernel(GatedProduct p) {
    constexpr int BLOCKS = HEADS * HEAD_BLOCKS, SLICES = THREADS / WARP;
    constexpr size_t PARTIAL = partial_bytes(SLICES, TILES) / sizeof(float);
    SGLING_DYNAMIC_SHARED(float, partial);
    __shared__ uint4 norm[HEAD_COLUMNS / 8];
    const int g = lane_id() / 4, t = lane_id() % 4, slice = warp_id();
    const int first_row = blockIdx.x * ROW_TILES * TILE_ROWS;
    const int column = slice * BLOCKS * BLOCK_COLUMNS + 8 * t;

    WeightSlice<BLOCKS, BLOCKS> weights[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
        weights[r].request(p.w, first_row + r * TILE_ROWS + g, p.outputs, p.width, column,
                           p.width - BLOCK_COLUMNS + 8 * t, nullptr);
    if (threadIdx.x < HEAD_COLUMNS / 8) norm[threadIdx.x] = load_stream16(p.norm + 8 * threadIdx.x);
    __syncthreads();
    pdl_wait();
    pdl_trigger();

    for (int first = 0; first < p.count; first += TILES * TILE_TOKENS) {
        float total[ROW_TILES][TILES][4] = {};
        multiply_heads<HEADS, TILES, ROW_TILES>(total, p, weights, norm + t, first + g, column);
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) store_partial<TILES>(partial + r * PARTIAL, total[r], slice);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
            add_slices<TILES>(p.out, partial + r * PARTIAL, SLICES, first, p.count, first_row + r * TILE_ROWS,
                              p.outputs, 0);
        __syncthreads();
    }
}

template <int HEADS, int TILES, int ROW_TILES, int SLICES, int PER_SM>
static int start(const GatedProduct& p, int pdl, void* stream) {
    return SGLING_LAUNCH((gated_kernel<HEADS, TILES, ROW_TILES, SLICES * WARP, PER_SM>),
                         static_cast<unsigned>(ceil_div(p.outputs, ROW_TILES * TILE_ROWS)), SLICES * WARP,
                         ROW_TILES * partial_bytes(SLICES, TILES), stream, pdl, p);
}

template <int ROW_TILES, int SLICES, int PER_SM>
static int start_tiles(const GatedProduct& p, int pdl, void* stream) {
    if (p.count <= TILE_TOKENS) return start<1, 1, ROW_TILES, SLICES, PER_SM>(p, pdl, stream);
    if (p.count <= 2 * TILE_TOKENS) return start<1, 2, ROW_TILES, SLICES, PER_SM>(p, pdl, stream);
    return start<1, 3, ROW_TILES, SLICES, PER_SM>(p, pdl, stream);
}

// Heads of 128 columns: 2, 4, 8 or 16 of them in one slice each, 32 in sixteen slices of two. `paired` nonzero gives
// the CTAs of up to eight heads two tiles of weight rows.
extern "C" int gated(void* out, const void* o, const void* z, const void* norm, const void* w, long long count,
                     long long stride_o, long long stride_z, long long outputs, long long heads, int z_aligned, int paired,
                     float eps, int pdl, void* stream) {
    const GatedProduct p{static_cast<uint16_t*>(out),
                         static_cast<const uint16_t*>(o),
                         static_cast<const uint16_t*>(z),
                         static_cast<const uint16_t*>(norm),
                         static_cast<const uint16_t*>(w),
                         stride_o,
                         stride_z,
                         static_cast<int>(count),
                         static_cast<int>(outputs),
                         static_cast<int>(heads) * HEAD_COLUMNS,
                         z_aligned,
                         eps};
    if (heads == 2) return paired ? start_tiles<2, 2, 2>(p, pdl, stream) : start_tiles<1, 2, 4>(p, pdl, stream);
    if (heads == 4) return paired ? start_tiles<2, 4, 2>(p, pdl, stream) : start_tiles<1, 4, 4>(p, pdl, stream);
    if (heads == 8) return paired ? start_tiles<2, 8, 1>(p, pdl, stream) : start_tiles<1, 8, 2>(p, pdl, stream);
    if (heads == 16) return start_tiles<1, 16, 1>(p, pdl, stream);
    if (heads == 32) return start<2, 1, 1, 16, 1>(p, pdl, stream);
    return 1;  // cudaErrorInvalidValue: the binding refuses other counts
}
