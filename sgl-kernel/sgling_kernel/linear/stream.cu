// out [M, O] = x [M, K] times w [O, K] transposed for weights that one multiprocessor after the other could hold only
// in parts: one CTA per multiprocessor streams its share of the rows through a ring in shared memory. K = 512 BLOCKS is
// cut into sixteen slices, one warp each, whose x stays in registers. Reference: linear/reference.py.
//
// Bulk copies fill the ring in units of four rows, from before the wait on, and again as soon as a tile of 16 rows has
// been read. A share that fits stays for all passes over groups of tokens. Numerics as in small_m.cuh with sixteen
// slices: the share of a CTA changes no bit.
//
// With best_score, the best score of the CTA's rows and its row go to [M, CTAs]: lowest row wins ties, NaN never.
#include "bulk.cuh"
#include "small_m.cuh"

namespace {

constexpr int SLICES = 16, THREADS = SLICES * WARP, UNIT_ROWS = 4, TILE_UNITS = TILE_ROWS / UNIT_ROWS;
constexpr int PAD = 32;  // columns between rows of the ring: rows g and g + 1 lie in different banks
constexpr size_t SHARED_BYTES = 226 * 1024;

struct Stream {
    void* out;          // [count, outputs], fp32 or bf16, or null
    const uint16_t* x;  // [count, K], rows `stride_x` elements apart
    const uint16_t* w;  // [outputs, K]
    float* best_score;  // [count, CTAs], or null
    int64_t* best_row;
    long long stride_x;
    int count, outputs, share;  // share: weight rows of a CTA
    int fp32;                   // whether out is fp32
};

template <int BLOCKS, int TOKENS>
struct Layout {
    static constexpr int WIDTH = SLICES * BLOCKS * BLOCK_COLUMNS, PITCH = WIDTH + PAD;
    static constexpr int TILES = static_cast<int>(ceil_div(TOKENS, TILE_TOKENS));
    static constexpr int PARTIALS = TOKENS <= 9 ? 2 : 1;  // buffers of partial sums
    // With one buffer a tile has two barriers. The ring is filled again behind the first of them where the weights of
    // the last LATER blocks can be in registers by then.
    static constexpr int LATER = PARTIALS == 1 && BLOCKS <= 5 ? 2 : 0;
    static constexpr size_t PARTIAL_BYTES = partial_bytes(SLICES, TOKENS), UNIT_BYTES = UNIT_ROWS * PITCH * 2;
    static constexpr int DEPTH = static_cast<int>((SHARED_BYTES - PARTIALS * PARTIAL_BYTES) / UNIT_BYTES);
    static constexpr size_t BYTES = DEPTH * UNIT_BYTES + PARTIALS * PARTIAL_BYTES;
    static_assert(DEPTH >= TILE_UNITS);
};

// The CTA's rows on their way through shared memory; units are counted through all passes that copy them again.
template <int WIDTH, int PITCH, int DEPTH>
struct Ring {
    uint16_t* slots;
    Landing* landed;
    const uint16_t* w;
    int rows, units, total;  // of the share; units of one pass and of all

    // By one whole warp; a unit that does not exist is none.
    __device__ __forceinline__ void request(int unit) const {
        if (unit >= total) return;
        const int row = unit % units * UNIT_ROWS, count = min(UNIT_ROWS, rows - row), slot = unit % DEPTH;
        constexpr int BYTES = WIDTH * static_cast<int>(sizeof(uint16_t));
        if (lane_id() == 0) landing_expect(&landed[slot], count * BYTES);
        __syncwarp();
        if (lane_id() < count)
            bulk_copy(slots + (slot * UNIT_ROWS + lane_id()) * PITCH,
                      w + static_cast<long long>(row + lane_id()) * WIDTH, BYTES, &landed[slot]);
        __syncwarp();  // the warp waits for no copy that it has not asked for
    }

    __device__ __forceinline__ void wait(int unit) const { landing_wait(&landed[unit % DEPTH], unit / DEPTH % 2); }

    // Row `row` of the tile that begins with `unit`. Rows behind the share are what the ring holds there; their sums
    // are not used.
    __device__ __forceinline__ const uint16_t* at(int unit, int row) const {
        return slots + ((unit + row / UNIT_ROWS) % DEPTH * UNIT_ROWS + row % UNIT_ROWS) * PITCH;
    }
};

struct Best {
    float score;
    int row;

    __device__ __forceinline__ void offer(float other, int other_row) {
        if (other > score || (other == score && other_row < row)) score = other, row = other_row;
    }
};

// The slices of this thread's output added in order; one thread per token and row of the tile.
template <int TOKENS>
__device__ __forceinline__ float sum_of_slices(const float* partial, int token, int row) {
    const float* from = partial + token * TOKEN_PITCH + row;
    float sum = from[0];
#pragma unroll
    for (int s = 1; s < SLICES; ++s) sum = __fadd_rn(sum, from[partial_at<TOKENS>(s)]);
    return sum;
}

// A tile of weight rows, rows g and g + 8 at `top` and `bottom`, times the tokens. `all_read()` is called once the
// tile lies in registers, LATER blocks before the end.
template <int LATER, int BLOCKS, int TILES, class AllRead>
__device__ __forceinline__ void multiply_tile(float (&acc)[TILES][4], const uint16_t* top, const uint16_t* bottom,
                                              const uint4 (&tokens)[BLOCKS][TILES], const AllRead& all_read) {
    uint4 upper[BLOCKS], lower[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        upper[b] = *reinterpret_cast<const uint4*>(top + b * BLOCK_COLUMNS);
        lower[b] = *reinterpret_cast<const uint4*>(bottom + b * BLOCK_COLUMNS);
        if (b >= BLOCKS - LATER) continue;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) multiply_block(acc[tile], upper[b], lower[b], tokens[b][tile]);
    }
    if (LATER > 0) all_read();
#pragma unroll
    for (int b = BLOCKS - LATER; b < BLOCKS; ++b)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) multiply_block(acc[tile], upper[b], lower[b], tokens[b][tile]);
}

// The best of this CTA's rows among the threads of a token, from its first thread.
__device__ __forceinline__ void store_best(const Stream& p, Best best, int token, bool exists) {
#pragma unroll
    for (int distance = TILE_ROWS / 2; distance > 0; distance >>= 1)
        best.offer(shfl_xor(best.score, distance), shfl_xor(best.row, distance));
    if (!exists || threadIdx.x % TILE_ROWS != 0) return;
    const long long at = static_cast<long long>(token) * gridDim.x + blockIdx.x;
    p.best_score[at] = best.score;
    p.best_row[at] = best.row;
}

template <int BLOCKS, int TOKENS>
__global__ void __launch_bounds__(THREADS, 1) stream_kernel(Stream p) {
    using Layout = Layout<BLOCKS, TOKENS>;
    constexpr int TILES = Layout::TILES, DEPTH = Layout::DEPTH, LATER = Layout::LATER;
    static_assert(TOKENS * TILE_ROWS <= THREADS);
    SGLING_DYNAMIC_SHARED(unsigned char, shared);
    __shared__ Landing landed[DEPTH];
    const int thread = static_cast<int>(threadIdx.x), g = lane_id() / 4, t = lane_id() % 4;
    const int column = warp_id() * BLOCKS * BLOCK_COLUMNS + LANE_COLUMNS * t;
    const int first_row = static_cast<int>(blockIdx.x) * p.share, rows = min(p.share, p.outputs - first_row);
    const int units = static_cast<int>(ceil_div(rows, UNIT_ROWS)), passes = static_cast<int>(ceil_div(p.count, TOKENS));
    const Ring<Layout::WIDTH, Layout::PITCH, DEPTH> ring{
        reinterpret_cast<uint16_t*>(shared), landed, p.w + static_cast<long long>(first_row) * Layout::WIDTH,
        rows, units, units <= DEPTH ? units : units * passes};
    if (thread < DEPTH) landing_init(&landed[thread]);
    __syncthreads();
    if (warp_id() == 0)
        for (int u = 0; u < DEPTH; ++u) ring.request(u);
    pdl_wait();
    pdl_trigger();

    const Output out{p.out, p.count, p.outputs, p.fp32};
    const int my_token = thread / TILE_ROWS, my_row = thread % TILE_ROWS;  // of the sum this thread finishes
    int unit = 0, buffer = 0;
    for (int first = 0; first < p.count; first += TOKENS) {
        if (ring.total == units) unit = 0;  // all units of the share stay where they are
        uint4 tokens[BLOCKS][TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)  // tokens that do not exist repeat the last one: nothing is read twice
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
                tokens[b][tile] = load16(p.x + min(first + g + tile * TILE_TOKENS, p.count - 1) * p.stride_x + column +
                                         b * BLOCK_COLUMNS);
        const bool finishes = my_token < TOKENS && first + my_token < p.count;
        Best best{-CUDART_INF_F, my_row < rows ? first_row + my_row : p.outputs};
        for (int row = 0; row < rows; row += TILE_ROWS) {
            const int here = min(TILE_UNITS, units - row / UNIT_ROWS);
            for (int i = 0; i < here; ++i) ring.wait(unit + i);
            const uint16_t *top = ring.at(unit, g) + column, *bottom = ring.at(unit, g + 8) + column;
            const auto refill = [&] {
                __syncthreads();  // every warp has read the tile
                if (warp_id() == 0)
                    for (int i = 0; i < here; ++i) ring.request(unit + DEPTH + i);
            };
            float acc[TILES][4] = {};
            multiply_tile<LATER>(acc, top, bottom, tokens, refill);
            float* partial = reinterpret_cast<float*>(shared + DEPTH * Layout::UNIT_BYTES) +
                             buffer * Layout::PARTIAL_BYTES / sizeof(float);
            store_partial<TOKENS>(partial + partial_at<TOKENS>(warp_id()), acc);
            if (LATER == 0)
                refill();
            else
                __syncthreads();
            if (finishes && row + my_row < rows) {
                const float sum = sum_of_slices<TOKENS>(partial, my_token, my_row);
                if (p.out != nullptr) out.store(sum, first + my_token, first_row + row + my_row);
                best.offer(sum, first_row + row + my_row);
            }
            if (Layout::PARTIALS == 1 && LATER == 0) __syncthreads();
            buffer = (buffer + 1) % Layout::PARTIALS;
            unit += here;
        }
        if (p.best_score != nullptr) store_best(p, best, first + my_token, finishes);
    }
}

template <int BLOCKS, int TOKENS>
int start(const Stream& p, int pdl, void* stream) {
    return SGLING_LAUNCH((stream_kernel<BLOCKS, TOKENS>), static_cast<unsigned>(ceil_div(p.outputs, p.share)), THREADS,
                         (Layout<BLOCKS, TOKENS>::BYTES), stream, pdl, p);
}

}  // namespace

// width 2560 or 5120; share = weight rows of a CTA; out may be null. best_score fp32 and best_row int64
// [count, ceil(outputs / share)], or null.
extern "C" int stream(void* out, const void* x, const void* w, float* best_score, void* best_row, long long count,
                      long long stride_x, long long outputs, long long width, long long share, int fp32, int pdl,
                      void* stream) {
    const Stream p{out,
                   static_cast<const uint16_t*>(x),
                   static_cast<const uint16_t*>(w),
                   best_score,
                   static_cast<int64_t*>(best_row),
                   stride_x,
                   static_cast<int>(count),
                   static_cast<int>(outputs),
                   static_cast<int>(share),
                   fp32};
    if (width == 5120) return count <= 8 ? start<10, 8>(p, pdl, stream) : start<10, 16>(p, pdl, stream);
    if (width != 2560) return 1;  // cudaErrorInvalidValue: the binding refuses such shapes
    if (count <= 8) return start<5, 8>(p, pdl, stream);
    if (count == 9) return start<5, 9>(p, pdl, stream);  // one token more than whole tiles takes little more room
    if (count <= 16) return start<5, 16>(p, pdl, stream);
    if (count == 17) return start<5, 17>(p, pdl, stream);
    return start<5, 24>(p, pdl, stream);
}
