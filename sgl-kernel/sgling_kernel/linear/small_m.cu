// out [M, O] = x [M, K] times w [O, K] transposed; bf16 operands, fp32 accumulation, bf16 or fp32 output.
// See small_m.cuh for the layout and the order of every sum. Reference: linear/reference.py.
#include "small_m.cuh"

struct Product {
    void* out;          // [count, outputs], fp32 or bf16
    const uint16_t* x;  // [count, width], rows `stride_x` elements apart
    const uint16_t* w;  // [outputs, width]
    long long stride_x;
    int count, outputs, width;
    int blocks;  // blocks of 32 columns in a slice
    int fp32;    // whether out is fp32
};

// Blocks of x a lane has requested ahead: what the registers beside weights, sums and addresses can take.
constexpr int blocks_ahead(int blocks, int held, int tiles, int registers) {
    const int left = registers - 20 - 2 * tiles - 8 * held - (held < blocks ? 8 : 0) - 4 * tiles;
    const int fit = left / (4 * tiles);
    return fit < 1 ? 1 : fit < blocks ? fit : blocks;
}

// x of this lane for a group of tokens: AHEAD blocks are under way while an earlier one is multiplied.
template <int AHEAD, int TILES>
struct TokenBlocks {
    const uint16_t* from[TILES];
    uint4 waiting[AHEAD][TILES];
    int real_blocks;  // blocks from here on lie behind K and are zero

    // Tokens that do not exist repeat the last one, which reads nothing twice; their sums are not stored.
    __device__ __forceinline__ void start(const Product& p, int token, int column) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            from[tile] = p.x + min(token + tile * TILE_TOKENS, p.count - 1) * p.stride_x + column;
#pragma unroll
        for (int b = 0; b < AHEAD; ++b) request(b);
    }

    __device__ __forceinline__ void request(int b) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            waiting[b % AHEAD][tile] = b < real_blocks ? load16(from[tile] + b * BLOCK_COLUMNS) : zero16();
    }
};

template <int BLOCKS, int HELD, int TILES, int THREADS, int PER_SM>
__global__ void __launch_bounds__(THREADS, PER_SM) small_m_kernel(Product p) {
    constexpr int TOKENS = TILES * TILE_TOKENS, SLICES = THREADS / WARP;
    constexpr int AHEAD = blocks_ahead(BLOCKS, HELD, TILES, 65536 / (THREADS * PER_SM) / 8 * 8);
    SGLING_DYNAMIC_SHARED(unsigned char, shared);
    float* partial = reinterpret_cast<float*>(shared + WeightSlice<BLOCKS, HELD>::parked_bytes(THREADS));
    const int g = lane_id() / 4, t = lane_id() % 4, slice = warp_id();
    const int first_row = blockIdx.x * TILE_ROWS;
    const int column = slice * p.blocks * BLOCK_COLUMNS + 8 * t;

    WeightSlice<BLOCKS, HELD> weights;
    weights.request(p.w, first_row + g, p.outputs, p.width, column, p.width - BLOCK_COLUMNS + 8 * t,
                    reinterpret_cast<uint4*>(shared));
    pdl_wait();
    pdl_trigger();

    TokenBlocks<AHEAD, TILES> tokens;
    tokens.real_blocks = min(p.blocks, p.width / BLOCK_COLUMNS - slice * p.blocks);
    for (int first = 0; first < p.count; first += TOKENS) {
        float acc[TILES][4] = {};
        tokens.start(p, first + g, column);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            if (HELD < BLOCKS && b == HELD) cp_async_wait<0>();
            const uint4 top = weights.block(b, 0), bottom = weights.block(b, 1);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                multiply_block(acc[tile], top, bottom, tokens.waiting[b % AHEAD][tile]);
            if (b + AHEAD < BLOCKS) {
                __syncwarp();  // keeps the compiler from requesting more than the registers hold
                tokens.request(b + AHEAD);
            }
        }
        store_partial<TOKENS>(partial + partial_at<TOKENS>(slice), acc);
        __syncthreads();
        add_slices<SLICES, TOKENS>({p.out, p.count, p.outputs, p.fp32}, partial, first, first_row);
        __syncthreads();
    }
}

template <int BLOCKS, int HELD, int TILES, int SLICES, int PER_SM>
static int start(const Product& p, int pdl, void* stream) {
    constexpr int THREADS = SLICES * WARP;
    const size_t shared = WeightSlice<BLOCKS, HELD>::parked_bytes(THREADS) + partial_bytes(SLICES, TILES * TILE_TOKENS);
    return SGLING_LAUNCH((small_m_kernel<BLOCKS, HELD, TILES, THREADS, PER_SM>),
                         static_cast<unsigned>(ceil_div(p.outputs, TILE_ROWS)), THREADS, shared, stream, pdl, p);
}

// HELD1 to HELD3: blocks held in registers for one to three tiles of tokens.
template <int BLOCKS, int HELD1, int HELD2, int HELD3, int SLICES, int PER_SM>
static int start_tiles(const Product& p, int pdl, void* stream) {
    if (p.count <= TILE_TOKENS) return start<BLOCKS, HELD1, 1, SLICES, PER_SM>(p, pdl, stream);
    if (p.count <= 2 * TILE_TOKENS) return start<BLOCKS, HELD2, 2, SLICES, PER_SM>(p, pdl, stream);
    return start<BLOCKS, HELD3, 3, SLICES, PER_SM>(p, pdl, stream);
}

// slices (8 or 16) and blocks cut K: slice s holds columns [32 blocks s, 32 blocks (s + 1)). `parked` nonzero keeps
// part of a ten-block slice in shared memory, so that three CTAs fit on a multiprocessor; it changes no bit.
extern "C" int small_m(void* out, const void* x, const void* w, long long count, long long stride_x, long long outputs,
                       long long width, long long slices, long long blocks, int parked, int fp32, int pdl,
                       void* stream) {
    const Product p{out,
                    static_cast<const uint16_t*>(x),
                    static_cast<const uint16_t*>(w),
                    stride_x,
                    static_cast<int>(count),
                    static_cast<int>(outputs),
                    static_cast<int>(width),
                    static_cast<int>(blocks),
                    fp32};
    if (slices == 8) {
        if (blocks <= 2) return start_tiles<2, 2, 2, 2, 8, 3>(p, pdl, stream);
        if (blocks <= 4) return start_tiles<4, 4, 4, 4, 8, 2>(p, pdl, stream);
        if (blocks <= 6) return start_tiles<6, 6, 6, 6, 8, 2>(p, pdl, stream);
        if (blocks <= 10 && parked) return start_tiles<10, 4, 3, 2, 8, 3>(p, pdl, stream);
        if (blocks <= 10) return start_tiles<10, 10, 10, 7, 8, 2>(p, pdl, stream);
    }
    if (slices == 16 && blocks <= 10) return start_tiles<10, 10, 10, 7, 16, 1>(p, pdl, stream);
    if (slices == 16 && blocks <= 16) return start_tiles<16, 8, 8, 8, 16, 1>(p, pdl, stream);
    return 1;  // cudaErrorInvalidValue: the binding refuses such shapes
}
