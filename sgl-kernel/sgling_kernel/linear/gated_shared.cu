// The output projection of KDA with the gated norm folded in (gated.cuh), a CTA's warps gating all tokens together:
// every value of a token that exists once, whatever the heads and tiles. Bits are those of gated.cu.
//
// A CTA owns two tiles of weight rows; a warp multiplies one head of one tile. Four lanes gate half a head of a token,
// and the four beside them the other half; the gated tokens and the heads' scales lie in shared memory.
#include "gated.cuh"

namespace {

constexpr int ROW_TILES = 2;

template <int HEADS, int TOKENS>
struct Layout {
    static constexpr int WARPS = ROW_TILES * HEADS, THREADS = WARPS * WARP;
    static constexpr int TILES = static_cast<int>(ceil_div(TOKENS, TILE_TOKENS));
    static constexpr int TOKENS_AT_ONCE = WARPS * TILE_TOKENS / (2 * HEADS);  // of the CTA's lanes
    static constexpr int ROUNDS = static_cast<int>(ceil_div(TOKENS, TOKENS_AT_ONCE));
    static constexpr int GATED = HEADS * HEAD_BLOCKS * TOKENS * 4;  // 16-byte parts of the gated tokens
    static constexpr size_t BYTES =
        GATED * sizeof(uint4) + HEADS * TOKENS * sizeof(float) + ROW_TILES * partial_bytes(HEADS, TOKENS);
    using Places = Partials<TOKENS, ROW_TILES>;

    // This lane's place in block `block` of a token: [head and block][token][4 lanes].
    __device__ __forceinline__ static int place(int block, int token) {
        return (block * TOKENS + token) * 4 + lane_id() % 4;
    }
};

// The lanes' part in gating: half a head, the same in every round, of a token of each round.
template <class L>
struct Gate {
    const uint4* norm;  // in shared memory
    int head, half, token;

    __device__ __forceinline__ void start(const GatedProduct& p, int heads, uint4* shared_norm) {
        const int quad = warp_id() * TILE_TOKENS + lane_id() / 4;
        head = quad / 2 % heads;
        half = quad % 2;
        token = quad / (2 * heads);
        norm = shared_norm + column(0) / LANE_COLUMNS;
        if (threadIdx.x < HEAD_COLUMNS / LANE_COLUMNS)
            shared_norm[threadIdx.x] = load_stream16(p.norm + LANE_COLUMNS * threadIdx.x);
    }

    // Of this lane, within the head.
    __device__ __forceinline__ int column(int b) const {
        return (half * HALF + b) * BLOCK_COLUMNS + lane_id() % 4 * LANE_COLUMNS;
    }

    // Gates tokens [first, first + TOKENS) of those that exist. What other tokens leave is not used.
    template <int TOKENS>
    __device__ __forceinline__ void run(const GatedProduct& p, int first, uint4* gated, float* scales) const {
        HalfHead waiting[L::ROUNDS];
#pragma unroll
        for (int r = 0; r < L::ROUNDS; ++r)
            if (exists<TOKENS>(p, first, r))
                waiting[r].request(p, first + r * L::TOKENS_AT_ONCE + token, head * HEAD_COLUMNS + column(0));
            else
                waiting[r] = {};
#pragma unroll
        for (int r = 0; r < L::ROUNDS; ++r) {
            if (ballot(exists<TOKENS>(p, first, r)) == 0) return;
            const HalfHead& now = waiting[r];
            float squares = add_squares(now.o[1], add_squares(now.o[0], 0.0f));
            const float before = shfl_xor(squares, 4);  // of the other half
            if (half == 1) squares = add_squares(now.o[1], add_squares(now.o[0], before));
            const float scale = head_scale(squares, p.eps);
            const uint4 x[HALF] = {gate16(now.o[0], now.z[0], norm[0]), gate16(now.o[1], now.z[1], norm[4])};
            if (!exists<TOKENS>(p, first, r)) continue;
            const int at = r * L::TOKENS_AT_ONCE + token;
#pragma unroll
            for (int b = 0; b < HALF; ++b) gated[L::place(head * HEAD_BLOCKS + half * HALF + b, at)] = x[b];
            if (half == 1 && lane_id() % 4 == 0) scales[head * TOKENS + at] = scale;
        }
    }

    template <int TOKENS>
    __device__ __forceinline__ bool exists(const GatedProduct& p, int first, int round) const {
        const int at = round * L::TOKENS_AT_ONCE + token;
        return at < TOKENS && first + at < p.count;
    }
};

// A head's scaled sums, those of a lane: weight rows g and g + 8, tokens 2 t and 2 t + 1 of every tile.
template <class L, int TOKENS, int TILES>
__device__ __forceinline__ void multiply_head(float (&acc)[TILES][4],
                                              const WeightSlice<HEAD_BLOCKS, HEAD_BLOCKS>& weights, int head,
                                              const uint4* gated, const float* scales) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const bool inside = (tile + 1) * TILE_TOKENS <= TOKENS || tile * TILE_TOKENS + g < TOKENS;
        float sum[4] = {};
#pragma unroll
        for (int b = 0; b < HEAD_BLOCKS; ++b) {
            const uint4 x = inside ? gated[L::place(head * HEAD_BLOCKS + b, tile * TILE_TOKENS + g)] : zero16();
            multiply_block(sum, weights.block(b, 0), weights.block(b, 1), x);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = min(tile * TILE_TOKENS + 2 * t + i % 2, TOKENS - 1);
            acc[tile][i] = fmaf(sum[i], scales[head * TOKENS + token], 0.0f);
        }
    }
}

template <int HEADS, int TOKENS>
__global__ void __launch_bounds__(Layout<HEADS, TOKENS>::THREADS, 1) gated_shared_kernel(GatedProduct p) {
    using L = Layout<HEADS, TOKENS>;
    SGLING_DYNAMIC_SHARED(uint4, gated);
    __shared__ uint4 norm[HEAD_COLUMNS / LANE_COLUMNS];
    float* scales = reinterpret_cast<float*>(gated + L::GATED);
    float* partial = scales + HEADS * TOKENS;
    const int head = warp_id() % HEADS, row_tile = warp_id() / HEADS;
    const int first_row = blockIdx.x * ROW_TILES * TILE_ROWS, g = lane_id() / 4, t = lane_id() % 4;

    WeightSlice<HEAD_BLOCKS, HEAD_BLOCKS> weights;
    weights.request(p.w, first_row + row_tile * TILE_ROWS + g, p.outputs, p.width,
                    head * HEAD_COLUMNS + LANE_COLUMNS * t, p.width, nullptr);
    Gate<L> gate;
    gate.start(p, HEADS, norm);
    __syncthreads();
    pdl_wait();
    pdl_trigger();

    for (int first = 0; first < p.count; first += TOKENS) {
        gate.template run<TOKENS>(p, first, gated, scales);
        __syncthreads();
        float acc[L::TILES][4];
        multiply_head<L, TOKENS>(acc, weights, head, gated, scales);
        store_partial<TOKENS>(partial + L::Places::at(head, row_tile), acc);
        __syncthreads();
        add_slices<HEADS, TOKENS, ROW_TILES, typename L::Places>(p.output(), partial, first, first_row);
    }
}

template <int HEADS, int TOKENS>
int start(const GatedProduct& p, int pdl, void* stream) {
    using L = Layout<HEADS, TOKENS>;
    const unsigned ctas = static_cast<unsigned>(ceil_div(p.outputs, ROW_TILES * TILE_ROWS));
    return SGLING_LAUNCH((gated_shared_kernel<HEADS, TOKENS>), ctas, L::THREADS, L::BYTES, stream, pdl, p);
}

// One token more than whole tiles takes less work than another tile.
template <int HEADS>
int start_tokens(const GatedProduct& p, int pdl, void* stream) {
    if (p.count <= 8) return start<HEADS, 8>(p, pdl, stream);
    if (p.count == 9) return start<HEADS, 9>(p, pdl, stream);
    if (p.count <= 16) return start<HEADS, 16>(p, pdl, stream);
    if (p.count == 17) return start<HEADS, 17>(p, pdl, stream);
    return start<HEADS, 24>(p, pdl, stream);
}

}  // namespace

// 2, 4 or 8 heads of 128 columns.
extern "C" int gated_shared(void* out, const void* o, const void* z, const void* norm, const void* w, long long count,
                            long long stride_o, long long stride_z, long long outputs, long long heads, int z_aligned,
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
    if (heads == 2) return start_tokens<2>(p, pdl, stream);
    if (heads == 4) return start_tokens<4>(p, pdl, stream);
    if (heads == 8) return start_tokens<8>(p, pdl, stream);
    return 1;  // cudaErrorInvalidValue: the binding refuses other counts
}
