// Down product of routed and shared experts: hidden [N, slots, I] -> slots fp32 [N, slots, d], neither weighed nor
// summed.
//
// A warp holds 16 rows of one expert's w2 over all of K (in batches, where K is long) and walks over the rows that
// chose the expert, eight at a time. A CTA of four warps belongs to one member: the shared expert, or a routed pair;
// only the first pair of an expert works, for all of them, so a weight is read once.
//
// The ids are read before pdl_wait(): they are two nodes old, and the up product between waits before it triggers.
#include "grouping.cuh"
#include "weights.cuh"

// Tiles of 16 rows that a warp holds; the rows of a CTA. Both are free: they change no bit.
constexpr int WARPS = 4, WARP_TILES = 1, CTA_ROWS = WARPS * WARP_TILES * TILE_ROWS;

struct Down {
    float* slots;
    const uint16_t *hidden, *w2, *shared_w2;  // shared_w2 null: no shared expert
    const long long* ids;
    int rows, top, experts, dim, width;

    __device__ __forceinline__ int pairs() const { return rows * top; }
    __device__ __forceinline__ int slots_per_row() const { return top + (shared_w2 != nullptr); }
};

template <int BATCH>
__device__ __forceinline__ void load_weights(WeightBlock (&weights)[WARP_TILES][BATCH], const Down& down,
                                             const uint16_t* part, int batch) {
#pragma unroll
    for (int tile = 0; tile < WARP_TILES; ++tile, part += TILE_ROWS * down.width)
#pragma unroll
        for (int block = 0; block < BATCH; ++block)
            weights[tile][block] = load_block(part, down.width, batch * BATCH + block);
}

// Where a token's values lie: `place` = row * slots + slot of lane 4 * token (-1: there is no such token).
__device__ __forceinline__ void store_tokens(const Down& down, const float (&d)[4], int place, int row0) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int to = shfl(place, 4 * (2 * t + i));
        if (to < 0) continue;
        float* slot = down.slots + static_cast<long long>(to) * down.dim + row0;
        slot[g] = d[i];
        slot[g + 8] = d[2 + i];
    }
}

// BATCH blocks of 32 columns of K are held at once. Grid (dim / CTA_ROWS, members); a shared expert comes first.
template <int BATCH>
__global__ void __launch_bounds__(WARPS* WARP, 5) down_kernel(Down down) {
    const bool has_shared = down.shared_w2 != nullptr, shared = has_shared && blockIdx.y == 0;
    const int member = static_cast<int>(blockIdx.y) - has_shared;
    const int row0 = static_cast<int>(blockIdx.x) * CTA_ROWS + warp_id() * WARP_TILES * TILE_ROWS;
    // Past L1, which may still hold a line of an earlier layer.
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
    const uint16_t* w2 = shared ? down.shared_w2 : down.w2 + static_cast<long long>(expert) * down.dim * down.width;
    const uint16_t* part = lane_part(w2 + static_cast<long long>(row0) * down.width, down.width);
    if (works) load_weights(weights, down, part, 0);
    pdl_wait();
    pdl_trigger();
    if (!named) {  // an unchosen slot adds nothing
        if (lane_id() < WARP_TILES * TILE_ROWS)
            down.slots[static_cast<long long>(member / down.top * down.slots_per_row() + member % down.top) * down.dim +
                       row0 + lane_id()] = 0.0f;
        return;
    }
    if (!works) return;
    int held = 0;  // the batch in `weights`
    for (int base = 0; base < members.count; base += TILE_TOKENS) {
        const int token = base + lane_id() / 4;
        int place = -1;
        if (shared) {
            if (token < down.rows) place = token * down.slots_per_row() + down.top;
        } else {
            const int pair = base == 0 ? members.mine : find_members(id_of, down.pairs(), expert, base).mine;
            if (pair >= 0) place = pair / down.top * down.slots_per_row() + pair % down.top;
        }
        const uint16_t* x = down.hidden + static_cast<long long>(max(place, 0)) * down.width;
        x += lane_id() % 4 * LANE_COLUMNS;
        float d[WARP_TILES][4] = {};
        for (int batch = 0; batch < down.width / (BATCH * BLOCK_COLUMNS); ++batch) {
            if (batch != held) load_weights(weights, down, part, batch);
            held = batch;
            uint4 hidden[BATCH];
#pragma unroll
            for (int block = 0; block < BATCH; ++block)
                hidden[block] = place < 0 ? zero16() : load16(x + (batch * BATCH + block) * BLOCK_COLUMNS);
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

template <int BATCH>
static int launch_down(const Down& down, int pdl, void* stream) {
    const unsigned members = static_cast<unsigned>(down.rows * down.top + (down.shared_w2 != nullptr));
    const dim3 grid(static_cast<unsigned>(down.dim / CTA_ROWS), members);
    return SGLING_LAUNCH(down_kernel<BATCH>, grid, WARPS * WARP, 0, stream, pdl, down);
}

// slots fp32 [rows, n, dim] from hidden bf16 [rows, n, width], w2 bf16 [experts, dim, width], shared_w2 bf16
// [dim, width] or null, ids int64 [rows, top]; n = top, one more with a shared expert (the last). A pair whose id names
// no expert gives zeros. rows * top <= MAX_PAIRS, dim is a multiple of 64, width of 32. Returns 1 (invalid value) for
// other sizes.
extern "C" int experts_down(float* slots, const void* hidden, const void* w2, const void* shared_w2, const void* ids,
                            long long rows, long long top, long long experts, long long dim, long long width, int pdl,
                            void* stream) {
    if (rows * top > MAX_PAIRS || dim % CTA_ROWS != 0 || width % BLOCK_COLUMNS != 0) return 1;
    const Down down{slots,
                    static_cast<const uint16_t*>(hidden),
                    static_cast<const uint16_t*>(w2),
                    static_cast<const uint16_t*>(shared_w2),
                    static_cast<const long long*>(ids),
                    static_cast<int>(rows),
                    static_cast<int>(top),
                    static_cast<int>(experts),
                    static_cast<int>(dim),
                    static_cast<int>(width)};
    const long long blocks = width / BLOCK_COLUMNS;
    if (blocks % 6 == 0) return launch_down<6>(down, pdl, stream);
    if (blocks % 4 == 0) return launch_down<4>(down, pdl, stream);
    return launch_down<1>(down, pdl, stream);
}
