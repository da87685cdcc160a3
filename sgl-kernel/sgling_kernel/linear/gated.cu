// The output projection of KDA with the gated norm folded in (gated.cuh), each warp gating what it multiplies: one K
// slice is one or more whole heads.
//
// A CTA owns one or two tiles of weight rows: every CTA gates all tokens, so with two the GPU gates half as often; no
// bit depends on it.
#include "gated.cuh"

// total += sum / rms(o) for the two tokens of this lane; `squares` is the lane's share of its own token's sum of o².
__device__ __forceinline__ void add_head(float (&total)[4], const float (&sum)[4], float squares, float eps) {
    const float scale = head_scale(squares, eps);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // the sums belong to tokens 2 t and 2 t + 1, whose lanes are 4 (2 t + i) and on
        const float of_token = shfl(scale, (lane_id() % 4 * 2 + i) * 4);
        total[i] = fmaf(sum[i], of_token, total[i]);
        total[i + 2] = fmaf(sum[i + 2], of_token, total[i + 2]);
    }
}

// One warp: TILES tiles of tokens through its HEADS heads, half a head at a time, two halves requested ahead. Tokens
// that do not exist repeat the last one; their sums are not stored.
template <int HEADS, int TILES, int ROW_TILES>
__device__ __forceinline__ void multiply_heads(
    float (&total)[ROW_TILES][TILES][4], const GatedProduct& p,
    const WeightSlice<HEADS * HEAD_BLOCKS, HEADS * HEAD_BLOCKS> (&weights)[ROW_TILES], const uint4* norm, int token,
    int column) {
    constexpr int HALVES = 2 * HEADS, STAGES = TILES * HALVES;
    HalfHead waiting[2];
    waiting[0].request(p, min(token, p.count - 1), column);
    waiting[1].request(p, min(token, p.count - 1), column + HALF * BLOCK_COLUMNS);
    float sum[ROW_TILES][4] = {}, squares = 0;
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        const int tile = stage / HALVES, half = stage % HALVES;
        const HalfHead& now = waiting[stage % 2];
#pragma unroll
        for (int b = 0; b < HALF; ++b) {
            const uint4 x = gate16(now.o[b], now.z[b], norm[(half % 2 * HALF + b) * 4]);
            squares = add_squares(now.o[b], squares);
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
            waiting[stage % 2].request(p, min(token + (stage + 2) / HALVES * TILE_TOKENS, p.count - 1),
                                       column + (stage + 2) % HALVES * HALF * BLOCK_COLUMNS);
        }
    }
}

template <int HEADS, int TILES, int ROW_TILES, int THREADS, int PER_SM>
__global__ void __launch_bounds__(THREADS, PER_SM) gated_kernel(GatedProduct p) {
    constexpr int BLOCKS = HEADS * HEAD_BLOCKS, SLICES = THREADS / WARP, TOKENS = TILES * TILE_TOKENS;
    constexpr size_t PARTIAL = partial_bytes(SLICES, TOKENS) / sizeof(float);
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

    for (int first = 0; first < p.count; first += TOKENS) {
        float total[ROW_TILES][TILES][4] = {};
        multiply_heads<HEADS, TILES, ROW_TILES>(total, p, weights, norm + t, first + g, column);
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
            store_partial<TOKENS>(partial + r * PARTIAL + Partials<TOKENS>::at(slice), total[r]);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
            add_slices<SLICES, TOKENS>(p.output(), partial + r * PARTIAL, first, first_row + r * TILE_ROWS);
        __syncthreads();
    }
}

template <int HEADS, int TILES, int ROW_TILES, int SLICES, int PER_SM>
static int start(const GatedProduct& p, int pdl, void* stream) {
    return SGLING_LAUNCH((gated_kernel<HEADS, TILES, ROW_TILES, SLICES * WARP, PER_SM>),
                         static_cast<unsigned>(ceil_div(p.outputs, ROW_TILES * TILE_ROWS)), SLICES * WARP,
                         ROW_TILES * partial_bytes(SLICES, TILES * TILE_TOKENS), stream, pdl, p);
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
                     long long stride_o, long long stride_z, long long outputs, long long heads, int z_aligned,
                     int paired, float eps, int pdl, void* stream) {
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
