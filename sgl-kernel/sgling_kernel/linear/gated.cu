// The output projection of KDA with the gated norm folded in: out [M, O] = gated norm of o and z [M, K] times w [O, K]
// transposed, bf16.
//
// x' = round(o w sigmoid(z)) is multiplied as it is; the head's 1 / rms(o), a number per token and head, scales the
// head's fp32 sum. Compared with the two-node form the rounding sits before the scaling and not behind it.
// Reference: linear/reference.py, gated_linear_folded.
//
// A CTA owns one or two tiles of weight rows; a warp multiplies one slice of K, which is one or two heads, with one
// tile. Before that all warps gate the tokens that exist together, every value once: four lanes half a head of a
// token, the four beside them the other half. The gated tokens and the heads' scales lie in shared memory. Numerics as
// in small_m.cuh, heads instead of blocks: the scaled sums of a slice in order, then the slices in order.
#include "small_m.cuh"

namespace {

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

// round(o · norm · σ(z)) of a pair of columns.
__device__ __forceinline__ uint32_t gate_pair(uint32_t o, uint32_t z, uint32_t norm) {
    return pack_bf16(__fmul_rn(__fmul_rn(bf16_lo(o), bf16_lo(norm)), sigmoid(bf16_lo(z))),
                     __fmul_rn(__fmul_rn(bf16_hi(o), bf16_hi(norm)), sigmoid(bf16_hi(z))));
}

__device__ __forceinline__ uint4 gate16(const uint4& o, const uint4& z, const uint4& norm) {
    return make_uint4(gate_pair(o.x, z.x, norm.x), gate_pair(o.y, z.y, norm.y), gate_pair(o.z, z.z, norm.z),
                      gate_pair(o.w, z.w, norm.w));
}

// sum + o² of eight columns, in order.
__device__ __forceinline__ float add_squares(const uint4& o, float sum) {
    const uint32_t pairs[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(bf16_lo(pairs[i]), bf16_lo(pairs[i]), sum);
        sum = fmaf(bf16_hi(pairs[i]), bf16_hi(pairs[i]), sum);
    }
    return sum;
}

// 1 / rms(o) of a head; `squares` is the lane's share of its token's sum of o².
__device__ __forceinline__ float head_scale(float squares, float eps) {
    squares = __fadd_rn(squares, shfl_xor(squares, 1));
    squares = __fadd_rn(squares, shfl_xor(squares, 2));
    return rsqrtf(fmaf(squares, 1.0f / HEAD_COLUMNS, eps));
}

// Half a head of one token as this lane loads it.
struct HalfHead {
    uint4 o[HALF], z[HALF];

    __device__ __forceinline__ void request(const GatedProduct& p, int token, int column) {
#pragma unroll
        for (int b = 0; b < HALF; ++b) {
            o[b] = load16(p.o + token * p.stride_o + column + b * BLOCK_COLUMNS);
            z[b] = load_gate(p.z + token * p.stride_z + column + b * BLOCK_COLUMNS, p.z_aligned);
        }
    }
};

// A CTA for one pass over TOKENS tokens. Up to eight heads it has two tiles of weight rows, so that fewer CTAs gate.
template <int HEADS, int TOKENS_>
struct Layout {
    static constexpr int TOKENS = TOKENS_, TILES = static_cast<int>(ceil_div(TOKENS, TILE_TOKENS));
    static constexpr int SLICES = HEADS < 16 ? HEADS : 16, SLICE_HEADS = HEADS / SLICES, ROW_TILES = HEADS <= 8 ? 2 : 1;
    static constexpr int WARPS = ROW_TILES * SLICES, THREADS = WARPS * WARP, BLOCKS = SLICE_HEADS * HEAD_BLOCKS;
    static constexpr int TOKENS_AT_ONCE = WARPS * TILE_TOKENS / (2 * HEADS);  // that the lanes gate
    static constexpr int ROUNDS = static_cast<int>(ceil_div(TOKENS, TOKENS_AT_ONCE));
    static constexpr int FIT = SLICE_HEADS == 1 ? 3 : 1;  // rounds whose operands registers can take beside the weights
    static constexpr int AHEAD = ROUNDS < FIT ? ROUNDS : FIT;
    static constexpr int GATED = HEADS * HEAD_BLOCKS * TOKENS * 4;  // 16-byte parts of the gated tokens
    static constexpr size_t BYTES =
        GATED * sizeof(uint4) + HEADS * TOKENS * sizeof(float) + ROW_TILES * partial_bytes(SLICES, TOKENS);

    // This lane's place in block `block` of a token: [head and block][token][4 lanes].
    __device__ __forceinline__ static int place(int block, int token) {
        return (block * TOKENS + token) * 4 + lane_id() % 4;
    }
};

// The lanes' part in gating: half a head, the same in every round, of a token of each round.
template <int HEADS, class L>
struct Gate {
    const uint4* norm;  // of this lane, in shared memory
    int head, half, token;

    __device__ __forceinline__ void start(const GatedProduct& p, uint4* shared_norm) {
        const int quad = warp_id() * TILE_TOKENS + lane_id() / 4;
        head = quad / 2 % HEADS;
        half = quad % 2;
        token = quad / (2 * HEADS);
        norm = shared_norm + column() / LANE_COLUMNS;
        if (threadIdx.x < HEAD_COLUMNS / LANE_COLUMNS)
            shared_norm[threadIdx.x] = load_stream16(p.norm + LANE_COLUMNS * threadIdx.x);
    }

    // Gates the tokens from `first` on, those of a pass that exist. What other tokens leave is not used.
    __device__ __forceinline__ void run(const GatedProduct& p, int first, uint4* gated, float* scales) const {
        for (int round = 0; round < L::ROUNDS; round += L::AHEAD) {
            HalfHead waiting[L::AHEAD];
#pragma unroll
            for (int r = 0; r < L::AHEAD; ++r) {
                const int at = (round + r) * L::TOKENS_AT_ONCE + token;
                if (exists(p, first, at))
                    waiting[r].request(p, first + at, head * HEAD_COLUMNS + column());
                else
                    waiting[r] = {};
            }
#pragma unroll
            for (int r = 0; r < L::AHEAD; ++r) {
                const int at = (round + r) * L::TOKENS_AT_ONCE + token;
                const bool here = exists(p, first, at);
                if (ballot(here) == 0) return;
                finish(p, waiting[r], here, at, gated, scales);
            }
        }
    }

private:
    // This lane's first column within the head.
    __device__ __forceinline__ int column() const {
        return half * HALF * BLOCK_COLUMNS + lane_id() % 4 * LANE_COLUMNS;
    }

    __device__ __forceinline__ static bool exists(const GatedProduct& p, int first, int at) {
        return at < L::TOKENS && first + at < p.count;
    }

    // By whole warps; only lanes whose token is `here` leave something.
    __device__ __forceinline__ void finish(const GatedProduct& p, const HalfHead& x, bool here, int at, uint4* gated,
                                           float* scales) const {
        float squares = add_squares(x.o[1], add_squares(x.o[0], 0.0f));
        const float before = shfl_xor(squares, 4);  // of the other half
        if (half == 1) squares = add_squares(x.o[1], add_squares(x.o[0], before));
        const float scale = head_scale(squares, p.eps);
        const uint4 values[HALF] = {gate16(x.o[0], x.z[0], norm[0]), gate16(x.o[1], x.z[1], norm[4])};
        if (!here) return;
#pragma unroll
        for (int b = 0; b < HALF; ++b) gated[L::place(head * HEAD_BLOCKS + half * HALF + b, at)] = values[b];
        if (half == 1 && lane_id() % 4 == 0) scales[head * L::TOKENS + at] = scale;
    }
};

// A slice's scaled sums, those of a lane: weight rows g and g + 8, tokens 2 t and 2 t + 1 of every tile.
template <class L>
__device__ __forceinline__ void multiply_slice(float (&acc)[L::TILES][4],
                                               const WeightSlice<L::BLOCKS, L::BLOCKS>& weights, int first_head,
                                               const uint4* gated, const float* scales) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < L::TILES * L::SLICE_HEADS; ++i) {
        const int tile = i / L::SLICE_HEADS, of_slice = i % L::SLICE_HEADS, head = first_head + of_slice;
        const bool inside = (tile + 1) * TILE_TOKENS <= L::TOKENS || tile * TILE_TOKENS + g < L::TOKENS;
        float sum[4] = {};
#pragma unroll
        for (int b = 0; b < HEAD_BLOCKS; ++b) {
            const int block = of_slice * HEAD_BLOCKS + b;
            const uint4 x = inside ? gated[L::place(head * HEAD_BLOCKS + b, tile * TILE_TOKENS + g)] : zero16();
            multiply_block(sum, weights.block(block, 0), weights.block(block, 1), x);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = min(tile * TILE_TOKENS + 2 * t + e % 2, L::TOKENS - 1);
            acc[tile][e] = fmaf(sum[e], scales[head * L::TOKENS + token], acc[tile][e]);
        }
    }
}

template <int HEADS, int TOKENS>
__global__ void __launch_bounds__(Layout<HEADS, TOKENS>::THREADS, 1) gated_kernel(GatedProduct p) {
    using L = Layout<HEADS, TOKENS>;
    SGLING_DYNAMIC_SHARED(uint4, gated);
    __shared__ uint4 norm[HEAD_COLUMNS / LANE_COLUMNS];
    float* scales = reinterpret_cast<float*>(gated + L::GATED);
    float* partial = scales + HEADS * TOKENS;
    const int slice = warp_id() % L::SLICES, row_tile = warp_id() / L::SLICES;
    const int first_row = blockIdx.x * L::ROW_TILES * TILE_ROWS, g = lane_id() / 4, t = lane_id() % 4;

    WeightSlice<L::BLOCKS, L::BLOCKS> weights;
    weights.request(p.w, first_row + row_tile * TILE_ROWS + g, p.outputs, p.width,
                    slice * L::BLOCKS * BLOCK_COLUMNS + LANE_COLUMNS * t, p.width, nullptr);
    Gate<HEADS, L> gate;
    gate.start(p, norm);
    __syncthreads();
    pdl_wait();
    pdl_trigger();

    for (int first = 0; first < p.count; first += TOKENS) {
        gate.run(p, first, gated, scales);
        __syncthreads();
        float acc[L::TILES][4] = {};
        multiply_slice<L>(acc, weights, slice * L::SLICE_HEADS, gated, scales);
        store_partial<TOKENS>(partial + partial_at<TOKENS, L::ROW_TILES>(slice, row_tile), acc);
        __syncthreads();
        add_slices<L::SLICES, TOKENS, L::ROW_TILES>({p.out, p.count, p.outputs, 0}, partial, first, first_row);
    }
}

template <int HEADS, int TOKENS>
int start(const GatedProduct& p, int pdl, void* stream) {
    using L = Layout<HEADS, TOKENS>;
    const unsigned ctas = static_cast<unsigned>(ceil_div(p.outputs, L::ROW_TILES * TILE_ROWS));
    return SGLING_LAUNCH((gated_kernel<HEADS, TOKENS>), ctas, L::THREADS, L::BYTES, stream, pdl, p);
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

// 2, 4, 8, 16 or 32 heads of 128 columns.
extern "C" int gated(void* out, const void* o, const void* z, const void* norm, const void* w, long long count,
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
    if (heads == 16) return start_tokens<16>(p, pdl, stream);
    if (heads == 32) return start<32, 8>(p, pdl, stream);
    return 1;  // cudaErrorInvalidValue: the binding refuses other counts
}
