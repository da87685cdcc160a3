// Down product of routed and shared experts: hidden [N, slots, I] -> slots fp32 [N, slots, d], neither weighed nor
// summed.
//
// Two forms with the same bits, so a row does not notice which one served it. In both, a warp has a tile of 16 rows of
// one expert's w2 to itself, sums all of K in one order and serves the rows that chose the expert, eight at a time, so
// a weight is read once. `down`: a CTA of four warps per member (the shared expert, or a routed pair, of which only the
// first of an expert works) with its weights in registers. `down_walk`: one CTA per multiprocessor, whose warps go
// through its tiles each at its own pace, each with a ring of its own in shared memory (bulk copies: compute capability
// 9.0 and up).
//
// Both read the ids before pdl_wait(), so weights are on their way by then: the ids are two nodes old, and the up
// product between waits before it triggers. They are read past L1, which may still hold a line of an earlier layer.
#include "down_walk.cuh"

// Tiles of 16 rows that a warp of `down` holds; the rows of a CTA. Both are free: they change no bit.
constexpr int WARPS = 4, WARP_TILES = 1, CTA_ROWS = WARPS * WARP_TILES * TILE_ROWS;

// ---- a CTA per member and 64 rows ----------------------------------------------------------------------------------

template <int BATCH>
__device__ __forceinline__ void load_weights(WeightBlock (&weights)[WARP_TILES][BATCH], const Down& down,
                                             const uint16_t* part, int batch) {
#pragma unroll
    for (int tile = 0; tile < WARP_TILES; ++tile, part += TILE_ROWS * down.width)
#pragma unroll
        for (int block = 0; block < BATCH; ++block)
            weights[tile][block] = load_block(part, down.width, batch * BATCH + block);
}

// BATCH blocks of 32 columns of K are held at once. Grid (dim / CTA_ROWS, members); a shared expert comes first.
template <int BATCH>
__global__ void __launch_bounds__(WARPS* WARP, 5) down_kernel(Down down) {
    const bool has_shared = down.shared_w2 != nullptr, shared = has_shared && blockIdx.y == 0;
    const int member = static_cast<int>(blockIdx.y) - has_shared;
    const int row0 = static_cast<int>(blockIdx.x) * CTA_ROWS + warp_id() * WARP_TILES * TILE_ROWS;
    const auto id_of = [&](int pair) {
        const long long id = __ldcg(down.ids + pair);
        return id >= 0 && id < down.experts ? static_cast<int>(id) : -1;
    };
    int expert = 0;
    Members members{-1, down.rows, -1};
    if (!shared) {
        expert = id_of(member);
        members = find_members(id_of, down.pairs(), expert, 0);
    }
    const bool named = expert >= 0, works = shared || (named && members.first == member);

    WeightBlock weights[WARP_TILES][BATCH];
    const uint16_t* part = lane_part(down.weights(shared ? -1 : max(expert, 0), row0), down.width);
    if (works) load_weights(weights, down, part, 0);
    pdl_wait();
    pdl_trigger();
    if (!named) {  // an unchosen slot adds nothing
        if (lane_id() < WARP_TILES * TILE_ROWS)
            down.slots[static_cast<long long>(down.slot_of(member)) * down.dim + row0 + lane_id()] = 0.0f;
        return;
    }
    if (!works) return;
    int held = 0;  // the batch in `weights`
    for (int base = 0; base < members.count; base += TILE_TOKENS) {
        int place;
        if (shared)
            place = down.shared_slot_of(base + lane_id() / 4);
        else
            place = down.slot_of(base == 0 ? members.mine : find_members(id_of, down.pairs(), expert, base).mine);
        float d[WARP_TILES][4] = {};
        for (int batch = 0; batch < down.width / (BATCH * BLOCK_COLUMNS); ++batch) {
            if (batch != held) load_weights(weights, down, part, batch);
            held = batch;
            uint4 hidden[BATCH];
            load_hidden(hidden, down, place, batch);
#pragma unroll
            for (int block = 0; block < BATCH; ++block)
#pragma unroll
                for (int tile = 0; tile < WARP_TILES; ++tile)
                    multiply_block(d[tile], weights[tile][block].top, weights[tile][block].bottom, hidden[block]);
        }
#pragma unroll
        for (int tile = 0; tile < WARP_TILES; ++tile) store_tokens(down, d[tile], place, row0 + tile * TILE_ROWS);
    }
}

// ---- one CTA per multiprocessor over (distinct expert, tile) -------------------------------------------------------

// The first tiles of a warp are fixed, so that all are on their way at once; then it takes the next one that is left.
template <int BATCH>
__global__ void __launch_bounds__(WALK_WARPS* WARP, 1024 / (WALK_WARPS * WARP)) down_walk_kernel(Down down) {
    __shared__ Workplace place;
    SGLING_DYNAMIC_SHARED(uint16_t, memory);
    prepare(place, down);
    const Share share(down.tiles, place.bits);
    const int first = warp_id() * WALK_STAGES;
    Ring ring{memory + first * TILE_ROWS * down.width, place.landed + first, Ring::NO_TILE, 0};
#pragma unroll 1
    for (int stage = 0; stage < WALK_STAGES; ++stage)
        ring.request(share, down, stage, stage * WALK_WARPS + warp_id());
    Tokens tokens{Ring::NO_TILE, 0, 0, -1};
    tokens.find(down, place.experts, shfl(ring.expert, 0), 0);
    pdl_wait();
    pdl_trigger();
    clear_unchosen(down, place.experts);

    const int batches = down.width / (BATCH * BLOCK_COLUMNS);
    uint4 hidden[BATCH];
    bool held = false;  // all of the tokens' hidden values are there
    for (int turn = 0;; ++turn) {
        const int stage = turn % WALK_STAGES, expert = shfl(ring.expert, stage), row0 = shfl(ring.row0, stage);
        if (expert == Ring::NO_TILE) break;
        for (int base = 0, count = 1; base < count; base += TILE_TOKENS) {
            if (!tokens.are(expert, base)) {
                tokens.find(down, place.experts, expert, base);
                held = false;
            }
            count = tokens.count;
            float d[4] = {0, 0, 0, 0};
#pragma unroll 1
            for (int batch = 0; batch < batches; ++batch) {
                if (!held) load_hidden(hidden, down, tokens.place, batch);
                held = batches == 1;
                landing_wait(ring.landed + stage, turn / WALK_STAGES % 2);
                ring.multiply(d, down, stage, batch, hidden);
            }
            if (base + TILE_TOKENS >= count) {
                __syncwarp();  // every lane has read the stage
                const int next = lane_id() == 0 ? atomicAdd(&place.next, 1) : 0;
                ring.request(share, down, stage, shfl(next, 0));
            }
            store_tokens(down, d, tokens.place, row0);
        }
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// ctas 0: a CTA per member and 64 rows; else that many walk over the distinct experts.
template <int BATCH>
static int launch_down(const Down& down, unsigned ctas, int pdl, void* stream) {
    if (ctas == 0) {
        const unsigned members = static_cast<unsigned>(down.rows * down.top + (down.shared_w2 != nullptr));
        const dim3 grid(static_cast<unsigned>(down.dim / CTA_ROWS), members);
        return SGLING_LAUNCH(down_kernel<BATCH>, grid, WARPS * WARP, 0, stream, pdl, down);
    }
    const size_t rings = sizeof(uint16_t) * WALK_TILES * TILE_ROWS * down.width;
    return SGLING_LAUNCH(down_walk_kernel<BATCH>, ctas, WALK_WARPS * WARP, rings, stream, pdl, down);
}

// slots fp32 [rows, n, dim] from hidden bf16 [rows, n, width], w2 bf16 [experts, dim, width], shared_w2 bf16
// [dim, width] or null, ids int64 [rows, top]; n = top, one more with a shared expert (the last). A pair whose id names
// no expert gives zeros. rows * top <= MAX_PAIRS, dim is a multiple of 64, width of 32. Returns 1 (invalid value) for
// other sizes.
extern "C" int experts_down(float* slots, const void* hidden, const void* w2, const void* shared_w2, const void* ids,
                            long long rows, long long top, long long experts, long long dim, long long width,
                            long long ctas, int pdl, void* stream) {
    if (rows * top > MAX_PAIRS || dim % CTA_ROWS != 0 || width % BLOCK_COLUMNS != 0) return 1;
    if (ctas > 0 && !walkable(experts, dim / TILE_ROWS, ctas)) return 1;
    const Down down{slots,
                    static_cast<const uint16_t*>(hidden),
                    static_cast<const uint16_t*>(w2),
                    static_cast<const uint16_t*>(shared_w2),
                    static_cast<const long long*>(ids),
                    static_cast<int>(rows),
                    static_cast<int>(top),
                    static_cast<int>(experts),
                    static_cast<int>(dim),
                    static_cast<int>(width),
                    Tiles(dim / TILE_ROWS, shared_w2 != nullptr, ctas)};
    const long long blocks = width / BLOCK_COLUMNS;
    const unsigned grid = static_cast<unsigned>(ctas);
    if (blocks % 6 == 0) return launch_down<6>(down, grid, pdl, stream);
    if (blocks % 4 == 0) return launch_down<4>(down, grid, pdl, stream);
    return launch_down<1>(down, grid, pdl, stream);
}
