// Up product and clamped SwiGLU of routed and shared experts: x [N, d] -> hidden [N, slots, I], bf16.
//
// Two forms with the same bits, so a row does not notice which one served it. In both, a CTA holds 16 interleaved rows
// of one expert's w13 (eight gate/up pairs) with K cut into SLICES slices, one warp each; the slices' sums are added in
// slice order. `up_each`: a CTA per pair and tile, weights in registers: best for few rows. `up_grouped`: one CTA per
// multiprocessor walks over (distinct expert, tile), so a weight is read once (up_walk.cuh).
#include "up_walk.cuh"

// ---- a CTA per pair and tile: grid (tiles, rows * slots) -----------------------------------------------------------

struct Pair {
    uint4 gate, up;  // this lane's 16 bytes of a block of 32 columns (tile.cuh)
};

template <int BLOCKS>
__device__ __forceinline__ void load_slice(Pair (&weights)[BLOCKS], const Up& up, int expert) {
    const uint16_t* gate = up.tile(expert, static_cast<int>(blockIdx.x)) + 2LL * pair_of_lane() * up.dim +
                           warp_id() * BLOCKS * BLOCK_COLUMNS + lane_id() % 4 * LANE_COLUMNS;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block, gate += BLOCK_COLUMNS)
        weights[block] = {load_stream16(gate), load_stream16(gate + up.dim)};
}

template <int SLICES, int BLOCKS>
__global__ void __launch_bounds__(SLICES* WARP, 1024 / (SLICES * WARP)) up_each_kernel(Up up) {
    __shared__ __align__(16) float sums[SLICES * TILE_SUMS];
    __shared__ __align__(16) uint16_t staged[SLICES * BLOCKS * BLOCK_COLUMNS];
    const int pair = static_cast<int>(blockIdx.y), row = pair / up.slots(), slot = pair % up.slots();
    const bool shared = slot == up.top;
    const int thread = static_cast<int>(threadIdx.x);
    Pair weights[BLOCKS];
    if (shared) load_slice(weights, up, -1);
    pdl_wait();
    pdl_trigger();
    if (!shared) {
        const long long expert = up.ids[row * up.top + slot];
        if (expert < 0 || expert >= up.experts) return;
        load_slice(weights, up, static_cast<int>(expert));
    }
    for (int at = thread * LANE_COLUMNS; at < up.dim; at += SLICES * WARP * LANE_COLUMNS)
        cp_async16(staged + at, up.x + row * up.stride_x + at);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float d[4] = {0, 0, 0, 0};
    const uint4* x = reinterpret_cast<const uint4*>(staged) + warp_id() * BLOCKS * 4 + lane_id() % 4;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
        multiply_block(d, weights[block].gate, weights[block].up, lane_id() < 4 ? x[block * 4] : zero16());
    keep_slice(sums, d);
    __syncthreads();
    if (warp_id() != 0 || lane_id() % 4 != 0) return;  // token 0 is with these
    uint16_t* hidden = up.hidden + static_cast<long long>(pair) * up.width + blockIdx.x * TILE_PAIRS;
    finish_pair<SLICES>(hidden, sums, 0, shared ? up.shared_limit : up.limit);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// ctas 0: a CTA per pair and tile; else that many CTAs walk over the distinct experts.
template <int SLICES, int BLOCKS>
static int launch_up(const Up& up, unsigned pairs, unsigned ctas, int pdl, void* stream) {
    if (ctas == 0) {
        const dim3 grid(static_cast<unsigned>(up.width / TILE_PAIRS), pairs);
        return SGLING_LAUNCH((up_each_kernel<SLICES, BLOCKS>), grid, SLICES * WARP, 0, stream, pdl, up);
    }
    const unsigned threads = (SLICES + HELPERS) * WARP;
    return SGLING_LAUNCH((up_grouped_kernel<SLICES, BLOCKS>), ctas, threads, (Ring<SLICES, BLOCKS>::BYTES), stream, pdl,
                         up);
}

// hidden bf16 [rows, slots, width] from x bf16 [rows, dim], w13 bf16 [experts, 2 width, dim], shared_w13 bf16
// [2 width, dim] or null, ids int64 [rows, top]; slots = top, one more with a shared expert (the last slot). Values of
// pairs whose id names no expert are left as they are. dim is 256, 1536 or 2560, width a multiple of 8, rows * top <=
// MAX_PAIRS. Limits: 0 means none. Returns 1 (invalid value) for other sizes.
extern "C" int experts_up(void* hidden, const void* x, const void* w13, const void* shared_w13, const void* ids,
                          long long stride_x, long long rows, long long top, long long experts, long long dim,
                          long long width, float limit, float shared_limit, long long ctas, int pdl, void* stream) {
    if (rows * top > MAX_PAIRS || width % TILE_PAIRS != 0) return 1;
    if (ctas > 0 && !walkable(experts, width / TILE_PAIRS, ctas)) return 1;
    const Up up{static_cast<uint16_t*>(hidden), static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(w13),
                static_cast<const uint16_t*>(shared_w13), static_cast<const long long*>(ids), stride_x,
                static_cast<int>(rows), static_cast<int>(top), static_cast<int>(experts), static_cast<int>(dim),
                static_cast<int>(width), limit, shared_limit, Tiles(width / TILE_PAIRS, shared_w13 != nullptr, ctas)};
    const unsigned pairs = static_cast<unsigned>(rows * (top + (shared_w13 != nullptr)));
    const unsigned grid = static_cast<unsigned>(ctas);
    switch (dim) {
        case 256: return launch_up<8, 1>(up, pairs, grid, pdl, stream);
        case 1536: return launch_up<16, 3>(up, pairs, grid, pdl, stream);
        case 2560: return launch_up<16, 5>(up, pairs, grid, pdl, stream);
        default: return 1;
    }
}
