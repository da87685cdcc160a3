// out [M, O] = x [M, K] times w [O, K] transposed for K = 2560, where tokens wait in shared memory: one trip to L2 for
// all of them (or for as many as fit) instead of one for every few blocks that registers can take.
//
// Three shapes of a CTA: 16 weight rows and eight warps, one for each slice of K; 16 rows and four warps of two slices,
// which take turns, so that three CTAs fit on a multiprocessor; or eight warps with all rows of a multiprocessor, which
// reads the tokens once. Every lane copies just those 16 bytes of a token that it will multiply, so no barrier stands
// between copies and products. Copies pass through L1, where CTAs on one multiprocessor share them. Tokens that do not
// exist are neither read nor kept. Numerics as in small_m.cuh; reference: linear/reference.py.
#include "small_m.cuh"

namespace {

constexpr int SLICES = 8, BLOCKS = 10, WIDTH = SLICES * BLOCKS * BLOCK_COLUMNS;
constexpr int SM_SHARED_BYTES = 228 * 1024, CTA_RESERVED_BYTES = 1024;  // from compute capability 9.0 on

struct StagedProduct {
    void* out;          // [count, outputs], fp32 or bf16
    const uint16_t* x;  // [count, WIDTH], rows `stride_x` elements apart
    const uint16_t* w;  // [outputs, WIDTH]
    long long stride_x;
    int count, outputs;
    int share;  // weight rows of a CTA
    int fp32;   // whether out is fp32
};

// A CTA: warps of FOLD slices and ROWS tiles of weight rows, TOKENS tokens at a time. A step is a block of one slice,
// and slices take turns; a unit is one tile of weight rows in one step. The last HELD units are in registers.
template <int FOLD_, int ROWS_, int HELD_, int TOKENS_, int CTAS_>
struct Plan {
    static constexpr int FOLD = FOLD_, ROWS = ROWS_, HELD = HELD_, TOKENS = TOKENS_, CTAS = CTAS_;
    static constexpr int WARPS = SLICES / FOLD, THREADS = WARPS * WARP, STEPS = FOLD * BLOCKS;
    static constexpr int UNITS = STEPS * ROWS, PARKED = UNITS - HELD;
    static constexpr int TILES = static_cast<int>(ceil_div(TOKENS, TILE_TOKENS));
    static constexpr int STAGE_BYTES = TOKENS * BLOCK_COLUMNS * static_cast<int>(sizeof(uint16_t));  // of a warp
    static constexpr int PARKED_BYTES = PARKED * 2 * static_cast<int>(sizeof(uint4)) * THREADS;
    static constexpr int FIT = (SM_SHARED_BYTES / CTAS - CTA_RESERVED_BYTES - PARKED_BYTES) / (WARPS * STAGE_BYTES);
    static constexpr int STAGES = FIT < STEPS ? FIT : STEPS;  // steps whose tokens are under way or wait
    static constexpr int BYTES = PARKED_BYTES + WARPS * STAGES * STAGE_BYTES;
    // A warp's partial sums overwrite its tokens.
    using Places = Partials<TOKENS, ROWS, FOLD, STAGES * STAGE_BYTES / static_cast<int>(sizeof(float))>;

    // First column of a step, from that of the warp.
    __device__ __forceinline__ static constexpr int column(int step) {
        return (step % FOLD * BLOCKS + step / FOLD) * BLOCK_COLUMNS;
    }
};

template <class P>
struct StagedWeights {
    uint4 held[P::HELD][2];
    uint4* parked;  // of this thread: [PARKED][2] with a stride of the CTA's threads

    // Requests the warp's units, parked ones first: they are multiplied first. Rows from `end` on are replaced by the
    // last one; their results are never used.
    __device__ __forceinline__ void request(const uint16_t* w, int row, int end, int column, uint4* park) {
        const uint16_t* from[P::ROWS][2];
#pragma unroll
        for (int i = 0; i < 2 * P::ROWS; ++i)
            from[i / 2][i % 2] = w + static_cast<long long>(min(row + 8 * i, end - 1)) * WIDTH + column;
        parked = park + threadIdx.x;
#pragma unroll
        for (int unit = 0; unit < P::UNITS; ++unit)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint16_t* at = from[unit % P::ROWS][half] + P::column(unit / P::ROWS);
                if (unit < P::PARKED)
                    cp_async16(&parked[(unit * 2 + half) * P::THREADS], at);
                else
                    held[unit < P::PARKED ? 0 : unit - P::PARKED][half] = load_stream16(at);
            }
        cp_async_commit();
    }

    // Weight row g (half 0) or g + 8 (half 1) of a unit.
    __device__ __forceinline__ uint4 block(int unit, int half) const {
        return unit < P::PARKED ? parked[(unit * 2 + half) * P::THREADS]
                                : held[unit < P::PARKED ? 0 : unit - P::PARKED][half];
    }
};

// 16 bytes into shared memory through L1.
__device__ __forceinline__ void copy_token16(void* shared, const void* global) {
#ifdef SGLING_EMULATE
    emulated::cp_async16(shared, global, true);
#else
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#endif
}

// The warp's tokens: [STAGES][TOKENS][32 columns], where each lane finds its own copies again.
template <class P>
struct StagedTokens {
    unsigned char* mine;
    const uint16_t* from[P::TILES];
    int real;  // tokens from this lane's first on that exist

    __device__ __forceinline__ void request(int step) const {
#pragma unroll
        for (int tile = 0; tile < P::TILES; ++tile)
            if (tile * TILE_TOKENS < real) copy_token16(place(step, tile), from[tile] + P::column(step));
        cp_async_commit();
    }

    __device__ __forceinline__ void start(const StagedProduct& p, int token, int column) {
        real = p.count - token;
#pragma unroll
        for (int tile = 0; tile < P::TILES; ++tile) {
            if (tile * TILE_TOKENS + lane_id() / 4 >= P::TOKENS) real = min(real, tile * TILE_TOKENS);
            from[tile] = p.x + (token + tile * TILE_TOKENS) * p.stride_x + column;
        }
#pragma unroll
        for (int step = 0; step < P::STAGES; ++step) request(step);
    }

    __device__ __forceinline__ unsigned char* place(int step, int tile) const {
        return mine + step % P::STAGES * P::STAGE_BYTES + tile * WARP * static_cast<int>(sizeof(uint4));
    }

    // A token that does not exist is whatever lies there; its sums are not stored.
    __device__ __forceinline__ uint4 at(int step, int tile) const {
        if ((tile + 1) * TILE_TOKENS > P::TOKENS && tile * TILE_TOKENS + lane_id() / 4 >= P::TOKENS) return zero16();
        return *reinterpret_cast<const uint4*>(place(step, tile));
    }
};

// Steps STEP and on, each behind the wait for its copies.
template <class P, int STEP = 0>
__device__ __forceinline__ void multiply_steps(float (&acc)[P::FOLD][P::ROWS][P::TILES][4],
                                               const StagedWeights<P>& weights, const StagedTokens<P>& tokens) {
    if constexpr (STEP < P::STEPS) {
        cp_async_wait<(P::STAGES < P::STEPS - STEP ? P::STAGES : P::STEPS - STEP) - 1>();
        uint4 x[P::TILES];
#pragma unroll
        for (int tile = 0; tile < P::TILES; ++tile) x[tile] = tokens.at(STEP, tile);
#pragma unroll
        for (int row = 0; row < P::ROWS; ++row) {
            const uint4 top = weights.block(STEP * P::ROWS + row, 0), bottom = weights.block(STEP * P::ROWS + row, 1);
#pragma unroll
            for (int tile = 0; tile < P::TILES; ++tile)
                multiply_block(acc[STEP % P::FOLD][row][tile], top, bottom, x[tile]);
        }
        if constexpr (STEP + P::STAGES < P::STEPS) {
            __syncwarp();  // the step's tokens have been read
            tokens.request(STEP + P::STAGES);
        }
        multiply_steps<P, STEP + 1>(acc, weights, tokens);
    }
}

template <class P>
__global__ void __launch_bounds__(P::THREADS, P::CTAS) staged_kernel(StagedProduct p) {
    SGLING_DYNAMIC_SHARED(unsigned char, shared);
    const int slice = warp_id() * P::FOLD, column = slice * BLOCKS * BLOCK_COLUMNS + lane_id() % 4 * LANE_COLUMNS;
    const int first_row = static_cast<int>(blockIdx.x) * p.share, end = min(first_row + p.share, p.outputs);
    float* partial = reinterpret_cast<float*>(shared + P::PARKED_BYTES);

    StagedWeights<P> weights;
    weights.request(p.w, first_row + lane_id() / 4, end, column, reinterpret_cast<uint4*>(shared));
    pdl_wait();
    pdl_trigger();

    StagedTokens<P> tokens;
    tokens.mine = reinterpret_cast<unsigned char*>(partial + P::Places::at(slice)) + lane_id() * sizeof(uint4);
    for (int first = 0; first < p.count; first += P::TOKENS) {
        float acc[P::FOLD][P::ROWS][P::TILES][4] = {};
        tokens.start(p, first + lane_id() / 4, column);
        multiply_steps<P>(acc, weights, tokens);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < P::FOLD * P::ROWS; ++i)
            store_partial<P::TOKENS>(partial + P::Places::at(slice + i / P::ROWS, i % P::ROWS),
                                     acc[i / P::ROWS][i % P::ROWS]);
        __syncthreads();
        add_slices<SLICES, P::TOKENS, P::ROWS, typename P::Places>({p.out, p.count, p.outputs, end, p.fp32}, partial,
                                                                   first, first_row);
        __syncthreads();
    }
}

template <int FOLD, int ROWS, int HELD, int TOKENS, int CTAS>
int start(const StagedProduct& p, int pdl, void* stream) {
    using P = Plan<FOLD, ROWS, HELD, TOKENS, CTAS>;
    return SGLING_LAUNCH((staged_kernel<P>), static_cast<unsigned>(ceil_div(p.outputs, p.share)), P::THREADS, P::BYTES,
                         stream, pdl, p);
}

// HELD1 to HELD3: units held in registers for one to three tiles of tokens. One token more than whole tiles (drafts of
// eight or sixteen and their root) takes less room than another tile.
template <int FOLD, int ROWS, int HELD1, int HELD2, int HELD3, int CTAS>
int start_tokens(const StagedProduct& p, int pdl, void* stream) {
    if (p.count <= 8) return start<FOLD, ROWS, HELD1, 8, CTAS>(p, pdl, stream);
    if (p.count == 9) return start<FOLD, ROWS, HELD2, 9, CTAS>(p, pdl, stream);
    if (p.count <= 16) return start<FOLD, ROWS, HELD2, 16, CTAS>(p, pdl, stream);
    if (p.count == 17) return start<FOLD, ROWS, HELD3, 17, CTAS>(p, pdl, stream);
    return start<FOLD, ROWS, HELD3, 24, CTAS>(p, pdl, stream);
}

}  // namespace

// share: weight rows of a CTA; `folded` nonzero: with up to 16 of them, four warps of two slices, three CTAs to a
// multiprocessor, instead of eight warps and two CTAs.
extern "C" int staged(void* out, const void* x, const void* w, long long count, long long stride_x, long long outputs,
                      long long width, long long share, int folded, int fp32, int pdl, void* stream) {
    const StagedProduct p{out,
                          static_cast<const uint16_t*>(x),
                          static_cast<const uint16_t*>(w),
                          stride_x,
                          static_cast<int>(count),
                          static_cast<int>(outputs),
                          static_cast<int>(share),
                          fp32};
    if (width != WIDTH || share > 3 * TILE_ROWS) return 1;  // cudaErrorInvalidValue: the binding's caller is told
    if (share <= TILE_ROWS && folded) return start_tokens<2, 1, 14, 12, 12, 3>(p, pdl, stream);
    if (share <= TILE_ROWS) return start_tokens<1, 1, 10, 10, 10, 2>(p, pdl, stream);
    if (share <= 2 * TILE_ROWS) return start_tokens<1, 2, 20, 20, 20, 1>(p, pdl, stream);
    return start_tokens<1, 3, 22, 21, 19, 1>(p, pdl, stream);
}
