// Up product and clamped SwiGLU of routed and shared experts: x [N, d] -> hidden [N, slots, I], bf16.
//
// Two forms with the same bits, so a row does not notice which one served it. In both, a CTA holds 16 interleaved rows
// of one expert's w13 (eight gate/up pairs) with K cut into SLICES slices, one warp each; the slices' sums are added in
// slice order. `up_each`: a CTA per pair and tile, weights in registers: best for one row. `up_grouped`: one CTA per
// multiprocessor walks over (distinct expert, tile) with a two-stage ring in shared memory, so a weight is read once
// (bulk copies: compute capability 9.0 and up).
#include "bulk.cuh"
#include "grouping.cuh"
#include "swiglu.cuh"
#include "weights.cuh"

constexpr int STAGES = 2;                           // of the ring
constexpr int MAX_SLICES = 16;
constexpr int TILE_SUMS = TILE_ROWS * TILE_TOKENS;  // sums of one tile; element 4 * lane + i is d[i] of that lane
constexpr int FINISHERS = TILE_SUMS / WARP;         // warps that finish a tile

struct Up {
    uint16_t* hidden;
    const uint16_t *x, *w13, *shared_w13;  // shared_w13 null: no shared expert
    const long long* ids;
    long long stride_x;
    int rows, top, experts, dim, width;
    float limit, shared_limit;

    __device__ __forceinline__ int slots() const { return top + (shared_w13 != nullptr); }
    __device__ __forceinline__ int tiles() const { return 2 * width / TILE_ROWS; }
    // Row 0 of a tile; expert < 0 is the shared one.
    __device__ __forceinline__ const uint16_t* tile(int expert, int tile) const {
        const uint16_t* weights = expert < 0 ? shared_w13 : w13 + static_cast<long long>(expert) * 2 * width * dim;
        return weights + static_cast<long long>(tile) * TILE_ROWS * dim;
    }
};

// A lane's four sums of this warp's slice, and the sum over slices of element `element`, in slice order.
__device__ __forceinline__ void keep_slice(float* sums, const float (&d)[4]) {
    reinterpret_cast<float4*>(sums)[threadIdx.x] = make_float4(d[0], d[1], d[2], d[3]);
}
template <int SLICES>
__device__ __forceinline__ float sum_slices(const float* sums, int element) {
    float total = sums[element];
#pragma unroll
    for (int slice = 1; slice < SLICES; ++slice) total = __fadd_rn(total, sums[slice * TILE_SUMS + element]);
    return total;
}

// Finishes the gate/up pair of one element: both rounded, SwiGLU in fp32, one rounding. Gate rows are even, and the up
// row of a pair is the next one: lane + 4, so element + 16. `hidden` is where the token's value of pair 0 of the tile
// goes, null for a token that does not exist. A whole warp calls it.
__device__ __forceinline__ void finish_pair(uint16_t* hidden, float sum, int element, float limit) {
    const float up = shfl_xor(sum, 16);
    const int row = element / 16 + (element % 4) / 2 * 8;
    if (hidden == nullptr || row % 2 != 0) return;
    hidden[row / 2] = to_bf16(clamped_swiglu(to_float(to_bf16(sum)), to_float(to_bf16(up)), limit));
}
__device__ __forceinline__ int token_of(int element) { return element / 4 % 4 * 2 + element % 2; }

// ---- a CTA per pair and tile: grid (tiles, rows * slots) -----------------------------------------------------------

template <int BLOCKS>
__device__ __forceinline__ void load_slice(WeightBlock (&weights)[BLOCKS], const Up& up, int expert) {
    const uint16_t* part =
        lane_part(up.tile(expert, static_cast<int>(blockIdx.x)) + warp_id() * BLOCKS * BLOCK_COLUMNS, up.dim);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) weights[block] = load_block(part, up.dim, block);
}

template <int SLICES, int BLOCKS>
__global__ void __launch_bounds__(SLICES* WARP, 1024 / (SLICES * WARP)) up_each_kernel(Up up) {
    __shared__ __align__(16) float sums[SLICES * TILE_SUMS];
    __shared__ __align__(16) uint16_t staged[SLICES * BLOCKS * BLOCK_COLUMNS];
    const int pair = static_cast<int>(blockIdx.y), row = pair / up.slots(), slot = pair % up.slots();
    const bool shared = slot == up.top;
    const int thread = static_cast<int>(threadIdx.x);
    WeightBlock weights[BLOCKS];
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
        multiply_block(d, weights[block].top, weights[block].bottom, lane_id() < 4 ? x[block * 4] : zero16());
    keep_slice(sums, d);
    __syncthreads();
    if (warp_id() >= FINISHERS) return;
    uint16_t* hidden = up.hidden + static_cast<long long>(pair) * up.width + blockIdx.x * (TILE_ROWS / 2);
    finish_pair(token_of(thread) == 0 ? hidden : nullptr, sum_slices<SLICES>(sums, thread), thread,
                shared ? up.shared_limit : up.limit);
}

// ---- one CTA per multiprocessor over (distinct expert, tile) -------------------------------------------------------

// The tiles of a CTA: first its part of the shared expert's, then its part of the routed ones, in order of the experts.
// Which shared tiles are its own does not depend on the routing, so they are requested before it is known.
struct Walk {
    int tiles, shared, shared_count, routed, count;  // tiles of an expert; the first shared and routed tile; numbers

    __device__ __forceinline__ static int cut(int total, int cta) { return total * cta / static_cast<int>(gridDim.x); }
    __device__ __forceinline__ explicit Walk(const Up& up) : tiles(up.tiles()), routed(0), count(0) {
        const int all = up.shared_w13 ? tiles : 0, cta = static_cast<int>(blockIdx.x);
        shared = cut(all, cta);
        shared_count = cut(all, cta + 1) - shared;
    }
    // A CTA with a shared tile more gets a routed one less, where there are enough of them.
    __device__ __forceinline__ int routed_cut(int total, int all, int cta) const {
        return total < static_cast<int>(gridDim.x) ? cut(total, cta) : cut(total + all, cta) - cut(all, cta);
    }
    __device__ __forceinline__ void deal(const Up& up, int experts) {
        const int all = up.shared_w13 ? tiles : 0, cta = static_cast<int>(blockIdx.x);
        routed = routed_cut(experts * tiles, all, cta);
        count = shared_count + routed_cut(experts * tiles, all, cta + 1) - routed;
    }
    __device__ __forceinline__ bool is_shared(int step) const { return step < shared_count; }
    // Of a routed step: number of the expert among the chosen ones. Of any step: the tile within its expert.
    __device__ __forceinline__ int group(int step) const { return (routed + step - shared_count) / tiles; }
    __device__ __forceinline__ int tile(int step) const {
        return is_shared(step) ? shared + step : (routed + step - shared_count) % tiles;
    }
};

// STAGES tiles in shared memory, rows padded by 64 bytes so that eight lanes' loads meet no bank twice.
template <int SLICES, int BLOCKS>
struct Ring {
    static constexpr int DIM = SLICES * BLOCKS * BLOCK_COLUMNS, PITCH = DIM + 32, STAGE = TILE_ROWS * PITCH;
    static constexpr int BYTES = STAGES * STAGE * 2;
    uint16_t* memory;
    Landing* landed;  // of each stage

    // A whole warp asks for the tile of a step: a copy per row.
    __device__ __forceinline__ void request(int step, const uint16_t* tile) const {
        Landing* bar = landed + step % STAGES;
        if (lane_id() == 0) landing_expect(bar, TILE_ROWS * DIM * 2);
        __syncwarp();
        if (lane_id() < TILE_ROWS)
            bulk_copy(memory + step % STAGES * STAGE + lane_id() * PITCH, tile + lane_id() * DIM, DIM * 2, bar);
    }
    __device__ __forceinline__ void wait(int step) const { landing_wait(landed + step % STAGES, step / STAGES % 2); }
    // What a lane reads of a step: rows g and g + 8 of a block of this warp's slice.
    __device__ __forceinline__ const uint4* block(int step, int block, int half) const {
        const int row = lane_id() / 4 + 8 * half, column = (warp_id() * BLOCKS + block) * BLOCK_COLUMNS;
        const uint16_t* stage = memory + step % STAGES * STAGE;
        return reinterpret_cast<const uint4*>(stage + row * PITCH + column + lane_id() % 4 * LANE_COLUMNS);
    }
};

// Eight tokens of an expert from number `base` on. `row` and `place` (row * slots + slot) belong to token lane / 4; -1:
// there is none.
struct Tokens {
    int row, place, count;

    __device__ __forceinline__ Tokens(const Up& up, const int* experts, int expert, int base) {
        if (expert < 0) {
            const int token = base + lane_id() / 4;
            count = up.rows;
            row = token < count ? token : -1;
            place = row < 0 ? -1 : row * up.slots() + up.top;
        } else {
            const auto expert_of = [&](int pair) { return experts[pair]; };
            const Members members = find_members(expert_of, up.rows * up.top, expert, base);
            count = members.count;
            row = members.mine < 0 ? -1 : members.mine / up.top;
            place = row < 0 ? -1 : row * up.slots() + members.mine % up.top;
        }
    }
};

template <int BLOCKS>
__device__ __forceinline__ void load_tokens(uint4 (&x)[BLOCKS], const Up& up, int row) {
    const int column = warp_id() * BLOCKS * BLOCK_COLUMNS + lane_id() % 4 * LANE_COLUMNS;
    const uint16_t* part = row < 0 ? nullptr : up.x + row * up.stride_x + column;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) x[block] = row < 0 ? zero16() : load16(part + block * BLOCK_COLUMNS);
}

// Warps take turns at finishing a tile of tokens. A whole warp calls it.
template <int SLICES>
__device__ __forceinline__ void finish_tile(const Up& up, const float* sums, int turn, int place, int tile,
                                            float limit) {
    const int finisher = (warp_id() + FINISHERS * turn) % SLICES;
    if (finisher >= FINISHERS) return;
    const int element = finisher * WARP + lane_id();
    const int to = shfl(place, 4 * token_of(element));
    uint16_t* hidden = up.hidden + static_cast<long long>(to) * up.width + tile * (TILE_ROWS / 2);
    finish_pair(to < 0 ? nullptr : hidden, sum_slices<SLICES>(sums, element), element, limit);
}

struct Workplace {
    alignas(16) float sums[2][MAX_SLICES * TILE_SUMS];
    int experts[MAX_PAIRS];
    unsigned bits[WARP];  // the chosen experts
    Landing landed[STAGES];
};

template <int SLICES, int BLOCKS>
__global__ void __launch_bounds__(SLICES* WARP, 1024 / (SLICES * WARP)) up_grouped_kernel(Up up) {
    __shared__ Workplace place;
    SGLING_DYNAMIC_SHARED(uint16_t, memory);
    const Ring<SLICES, BLOCKS> ring{memory, place.landed};
    Walk walk(up);
    if (threadIdx.x < WARP) {
        place.bits[threadIdx.x] = 0;
        if (threadIdx.x < STAGES) landing_init(place.landed + threadIdx.x);
        __syncwarp();
        for (int step = 0; step < min(walk.shared_count, STAGES); ++step) ring.request(step, up.tile(-1, walk.tile(step)));
    }
    __syncthreads();
    pdl_wait();
    pdl_trigger();
    stage_experts(place.experts, place.bits, up.ids, up.rows * up.top, up.experts);
    const Distinct chosen(place.bits);
    walk.deal(up, chosen.count());
    const auto expert_of = [&](int step) { return walk.is_shared(step) ? -1 : chosen.expert(walk.group(step)); };
    const auto request = [&](int step) {
        if (warp_id() == 0 && step < walk.count) ring.request(step, up.tile(expert_of(step), walk.tile(step)));
    };
    for (int step = min(walk.shared_count, STAGES); step < STAGES; ++step) request(step);

    uint4 x[BLOCKS];
    for (int step = 0, turn = 0; step < walk.count; ++step) {
        const int expert = expert_of(step);
        for (int base = 0, count = 1; base < count; base += TILE_TOKENS, ++turn) {
            const Tokens tokens(up, place.experts, expert, base);
            count = tokens.count;
            load_tokens(x, up, tokens.row);
            ring.wait(step);
            float d[4] = {0, 0, 0, 0};
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
                multiply_block(d, *ring.block(step, block, 0), *ring.block(step, block, 1), x[block]);
            float* sums = place.sums[turn % 2];
            keep_slice(sums, d);
            __syncthreads();  // the stage has been read; the other half of `sums` is free again behind the next one
            if (base + TILE_TOKENS >= count) request(step + STAGES);
            finish_tile<SLICES>(up, sums, turn, tokens.place, walk.tile(step),
                                expert < 0 ? up.shared_limit : up.limit);
        }
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// ctas 0: a CTA per pair and tile; else that many CTAs walk over the distinct experts (at most MAX_EXPERTS in all).
template <int SLICES, int BLOCKS>
static int launch_up(const Up& up, unsigned pairs, unsigned ctas, int pdl, void* stream) {
    if (ctas == 0) {
        const dim3 grid(static_cast<unsigned>(2 * up.width / TILE_ROWS), pairs);
        return SGLING_LAUNCH((up_each_kernel<SLICES, BLOCKS>), grid, SLICES * WARP, 0, stream, pdl, up);
    }
    return SGLING_LAUNCH((up_grouped_kernel<SLICES, BLOCKS>), ctas, SLICES * WARP, (Ring<SLICES, BLOCKS>::BYTES),
                         stream, pdl, up);
}

// hidden bf16 [rows, slots, width] from x bf16 [rows, dim], w13 bf16 [experts, 2 width, dim], shared_w13 bf16
// [2 width, dim] or null, ids int64 [rows, top]; slots = top, one more with a shared expert (the last slot). Values of
// pairs whose id names no expert are left as they are. dim is 256, 1536 or 2560, width a multiple of 8, rows * top <=
// MAX_PAIRS. Limits: 0 means none. Returns 1 (invalid value) for other sizes.
extern "C" int experts_up(void* hidden, const void* x, const void* w13, const void* shared_w13, const void* ids,
                          long long stride_x, long long rows, long long top, long long experts, long long dim,
                          long long width, float limit, float shared_limit, long long ctas, int pdl, void* stream) {
    if (rows * top > MAX_PAIRS || width % (TILE_ROWS / 2) != 0 || (ctas > 0 && experts > MAX_EXPERTS)) return 1;
    const Up up{static_cast<uint16_t*>(hidden), static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(w13),
                static_cast<const uint16_t*>(shared_w13), static_cast<const long long*>(ids), stride_x,
                static_cast<int>(rows), static_cast<int>(top), static_cast<int>(experts), static_cast<int>(dim),
                static_cast<int>(width), limit, shared_limit};
    const unsigned pairs = static_cast<unsigned>(rows * (top + (shared_w13 != nullptr)));
    const unsigned grid = static_cast<unsigned>(ctas);
    switch (dim) {
        case 256: return launch_up<8, 1>(up, pairs, grid, pdl, stream);
        case 1536: return launch_up<16, 3>(up, pairs, grid, pdl, stream);
        case 2560: return launch_up<16, 5>(up, pairs, grid, pdl, stream);
        default: return 1;
    }
}
