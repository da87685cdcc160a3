// Residual add, RMSNorm and the router's product in one node: normed = norm(x + residual) and the new residual [M, K],
// logits [M, E] = normed times w [E, K] transposed. Bits are those of norm/norm.cu and linear/small_m.cu behind it.
// Reference: router/reference.py.
//
// A CTA owns 16 experts and a share of up to six tokens. Its weights, all of K, are on their way before pdl_wait(): into
// registers, and as many into shared memory as it takes for two CTAs to fit on a multiprocessor, because the projection
// before it leaves few of them free. Behind the wait the CTA norms its tokens itself, part by part: 256 columns of a
// token, one warp, as norm.cu has them. The rounded rows go through shared memory into the product. Every CTA of a token
// norms it again, and each writes some of its parts.
//
// The residual is asked for before pdl_wait() as well, so it must be two hops old. It is: in a layer the attention's
// first node starts from that stream, and attention has at least two nodes, which wait before they trigger. The copies
// pass by L1, which may still hold a line of an earlier layer.
#include "../linear/small_m.cuh"
#include "../norm/rms.cuh"

constexpr int SLICES = 8, THREADS = SLICES * WARP, COLUMNS = 8, PART_COLUMNS = WARP * COLUMNS;
constexpr int MAX_BLOCKS = 10;     // blocks of 32 columns in a slice, which are as many parts in a row
constexpr int MAX_SHARE = 6;       // tokens of a CTA: what registers hold
constexpr int SQUARES_PITCH = 12;  // floats between tokens' sums: eight lanes that read one token each do not conflict

struct Operands {
    uint16_t *normed, *new_residual;  // [count, width]
    float* logits;                    // [count, experts]
    const uint16_t *x, *residual;     // [count, width], rows `stride_...` elements apart
    const uint16_t *norm, *w;         // [width], [experts, width]
    long long stride_x, stride_residual;
    int count, width, experts;
    int share;  // tokens of a CTA
    float eps;
};

struct Board {
    alignas(16) float squares[TILE_TOKENS * SQUARES_PITCH + WARP];  // of a token's parts; what lies behind is padding
    alignas(16) float partial[SLICES * TILE_TOKENS * TOKEN_PITCH];  // sums of the product's slices
};

// 16-byte words between two normed rows in shared memory, four more than a multiple of eight: no bank conflicts when
// eight lanes read two rows.
__host__ __device__ constexpr int row_pitch(int width) { return width / 8 + (width / 8 % 8 == 0 ? 4 : 0); }

// K: the compiler knows the largest one.
template <int BLOCKS>
__device__ __forceinline__ int width_of(const Operands& p) {
    return BLOCKS == MAX_BLOCKS ? MAX_BLOCKS * PART_COLUMNS : p.width;
}

// Part number `turn` of a warp, `number` of the CTA: BLOCKS of them make a token.
template <int BLOCKS>
struct Part {
    static constexpr int PERIOD = BLOCKS / (BLOCKS & -BLOCKS);  // turns after which the columns are the same again
    int number, token, index, column;                           // index: of the part in its token
    bool inside;

    __device__ __forceinline__ Part(int turn, int tokens, int width) {
        const int like = warp_id() + turn % PERIOD * SLICES;
        number = warp_id() + turn * SLICES;
        token = like / BLOCKS + turn / PERIOD * (SLICES * PERIOD / BLOCKS);
        index = like % BLOCKS;
        column = index * PART_COLUMNS + lane_id() * COLUMNS;
        inside = token < tokens && (BLOCKS == MAX_BLOCKS || column < width);
    }

    __device__ __forceinline__ int place(int width) const { return token * row_pitch(width) + column / COLUMNS; }
};

// This warp's parts of a CTA's tokens: PARTS of them, eight columns to a lane.
template <int BLOCKS, int TOKENS>
struct Rows {
    static constexpr int PARTS = static_cast<int>(ceil_div(TOKENS * BLOCKS, SLICES));
    float value[PARTS][COLUMNS];
    unsigned kept;  // bits of the parts that this CTA writes

    // Asks for the residual, each lane for what it will add; `rows` is where its normed values go later.
    __device__ __forceinline__ void request(const Operands& p, int first, int tokens, uint4* rows) {
        kept = 0;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const Part<BLOCKS> part(i, tokens, width_of<BLOCKS>(p));
            const uint16_t* from = p.residual + (first + part.token) * p.stride_residual + part.column;
            if (part.inside) cp_async16(rows + part.place(width_of<BLOCKS>(p)), from);
            kept |= static_cast<unsigned>(part.number % gridDim.x == blockIdx.x) << i;
        }
    }

    // x + residual, unrounded, across the wait; leaves every part's sum of squares on the board.
    __device__ __forceinline__ void add(const Operands& p, int first, int tokens, const uint4* rows, float* squares) {
        uint4 x[PARTS];
        pdl_wait();
        pdl_trigger();
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const Part<BLOCKS> part(i, tokens, width_of<BLOCKS>(p));
            x[i] = part.inside ? load16(p.x + (first + part.token) * p.stride_x + part.column) : zero16();
        }
        pdl_trigger();  // again, without effect: ptxas moves no load across it, and would wait for one before the next
        cp_async_wait<0>();
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const Part<BLOCKS> part(i, tokens, width_of<BLOCKS>(p));
            float other[COLUMNS], sum = 0.0f;
            widen8(value[i], x[i]);
            widen8(other, part.inside ? rows[part.place(width_of<BLOCKS>(p))] : zero16());
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                value[i][c] = __fadd_rn(value[i][c], other[c]);
                sum = fmaf(value[i][c], value[i][c], sum);
            }
            sum = warp_sum(sum);
            if (lane_id() == 0 && part.token < tokens)
                squares[part.token * SQUARES_PITCH + part.index] = sum;
        }
    }

    // Normed rows into shared memory, and this CTA's parts of both outputs. Lane t has the inverse rms of token t % 8.
    __device__ __forceinline__ void norm(const Operands& p, int first, int tokens, float inverse, const uint4* scale,
                                         uint4* rows) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const Part<BLOCKS> part(i, tokens, width_of<BLOCKS>(p));
            const float factor = shfl(inverse, part.token % TILE_TOKENS);
            if (!part.inside) continue;
            float weight[COLUMNS], scaled[COLUMNS];
            widen8(weight, scale[part.column / COLUMNS]);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) scaled[c] = __fmul_rn(__fmul_rn(value[i][c], factor), weight[c]);
            const uint4 rounded = round8(scaled);
            rows[part.place(width_of<BLOCKS>(p))] = rounded;
            if (kept >> i & 1) {
                const long long at = static_cast<long long>(first + part.token) * width_of<BLOCKS>(p) + part.column;
                store16(p.normed + at, rounded);
                store16(p.new_residual + at, round8(value[i]));
            }
        }
    }
};

// Grid (tiles of 16 experts, shares of tokens).
template <int BLOCKS, int HELD, int TOKENS>
__global__ void __launch_bounds__(THREADS, 2) norm_product_kernel(Operands p) {
    SGLING_DYNAMIC_SHARED(unsigned char, shared);
    const int width = width_of<BLOCKS>(p);
    Board& board = *reinterpret_cast<Board*>(shared);
    uint4* rows = reinterpret_cast<uint4*>(shared + sizeof(Board));
    uint4* scale = rows + TOKENS * row_pitch(width);
    uint4* parked = scale + row_pitch(width);
    const int g = lane_id() / 4, t = lane_id() % 4, slice = warp_id();
    const int first_row = static_cast<int>(blockIdx.x) * TILE_ROWS, first = static_cast<int>(blockIdx.y) * p.share;
    const int tokens = min(p.share, p.count - first), column = slice * BLOCKS * BLOCK_COLUMNS + LANE_COLUMNS * t;

    WeightSlice<BLOCKS, HELD> weights;
    weights.request(p.w, first_row + g, p.experts, width, column, width - BLOCK_COLUMNS + LANE_COLUMNS * t, parked);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < width / COLUMNS; i += THREADS)
        cp_async16(scale + i, p.norm + i * COLUMNS);
    Rows<BLOCKS, TOKENS> mine;
    mine.request(p, first, tokens, rows);
    cp_async_commit();
    mine.add(p, first, tokens, rows, board.squares);
    __syncthreads();
    const float squares = sum_in_order(board.squares + lane_id() % TILE_TOKENS * SQUARES_PITCH, BLOCKS);
    mine.norm(p, first, tokens, inverse_rms(squares, width, p.eps), scale, rows);
    __syncthreads();

    // Tokens that do not exist repeat the last one; their sums are not stored.
    const uint4* row = rows + min(g, tokens - 1) * row_pitch(width) + column / COLUMNS;
    const int real_blocks = width / BLOCK_COLUMNS - slice * BLOCKS;  // blocks from here on lie behind K and are zero
    float acc[1][4] = {};
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const uint4 token = b < real_blocks ? row[b * BLOCK_COLUMNS / COLUMNS] : zero16();
        multiply_block(acc[0], weights.block(b, 0), weights.block(b, 1), token);
    }
    store_partial<TILE_TOKENS>(board.partial + partial_at<TILE_TOKENS>(slice), acc);
    __syncthreads();
    add_slices<SLICES, TILE_TOKENS>({p.logits, first + tokens, p.experts, 1}, board.partial, first, first_row);
}

// HELD: blocks of a slice that registers hold beside up to TOKENS tokens.
template <int BLOCKS, int HELD, int TOKENS>
static int start(const Operands& p, int pdl, void* stream) {
    const dim3 grid(static_cast<unsigned>(ceil_div(p.experts, TILE_ROWS)),
                    static_cast<unsigned>(ceil_div(p.count, p.share)));
    const size_t shared = sizeof(Board) + sizeof(uint4) * (TOKENS + 1) * row_pitch(p.width) +
                          WeightSlice<BLOCKS, HELD>::parked_bytes(THREADS);
    return SGLING_LAUNCH((norm_product_kernel<BLOCKS, HELD, TOKENS>), grid, THREADS, shared, stream, pdl, p);
}

// normed and new_residual bf16 [rows, width], logits fp32 [rows, experts]; `share` is the number of tokens of a CTA, one
// to six, and changes no bit. width is a multiple of 32 up to 512, or 2,560. Returns 1 (invalid value) for others.
extern "C" int norm_product(void* normed, void* new_residual, float* logits, const void* x, const void* residual,
                            const void* norm, const void* w, long long stride_x, long long stride_residual,
                            long long rows, long long width, long long experts, long long share, float eps, int pdl,
                            void* stream) {
    const Operands p{static_cast<uint16_t*>(normed),
                     static_cast<uint16_t*>(new_residual),
                     logits,
                     static_cast<const uint16_t*>(x),
                     static_cast<const uint16_t*>(residual),
                     static_cast<const uint16_t*>(norm),
                     static_cast<const uint16_t*>(w),
                     stride_x,
                     stride_residual,
                     static_cast<int>(rows),
                     static_cast<int>(width),
                     static_cast<int>(experts),
                     static_cast<int>(share),
                     eps};
    const long long blocks = ceil_div(width, PART_COLUMNS);
    if (share < 1 || share > MAX_SHARE || width % BLOCK_COLUMNS != 0) return 1;
    if (blocks == 1) return start<1, 1, MAX_SHARE>(p, pdl, stream);
    if (blocks == 2) return start<2, 2, MAX_SHARE>(p, pdl, stream);
    if (width != MAX_BLOCKS * PART_COLUMNS) return 1;
    if (share <= 1) return start<MAX_BLOCKS, 10, 1>(p, pdl, stream);
    if (share <= 2) return start<MAX_BLOCKS, 9, 2>(p, pdl, stream);
    if (share <= 3) return start<MAX_BLOCKS, 8, 3>(p, pdl, stream);
    if (share <= 4) return start<MAX_BLOCKS, 6, 4>(p, pdl, stream);
    return start<MAX_BLOCKS, 3, MAX_SHARE>(p, pdl, stream);
}
