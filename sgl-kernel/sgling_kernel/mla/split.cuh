// What split.cu's programs do: copies, scores, softmax, outputs.
//
// Transposed products: scores are [positions x rows], outputs are [latent columns x rows]. Eight rows, one token's heads
// at TP 4, are one n8 tile, so nothing is padded and a row's bits depend on that row alone: a row is a column of the
// mma, and every sum runs over k slots, the same lanes and blocks of 16 positions 0 .. 7 in turn, whatever tiles ride
// along.
//
// Shared memory is what the products wait for, so fragments are shared by as many products as registers hold: for the
// scores a warp takes 32 positions, all rows and every other step of 16 columns; two warps then exchange halves of
// their sums, and each goes on with 16 positions. For the outputs a warp takes an eighth of the columns and all rows.
// Columns of the cache rows arrive in STAGES parts, and the scores begin with the first.
#pragma once

#include "matrix.cuh"

constexpr int SPLIT = 128, WARPS = 8, THREADS = WARPS * WARP, MAX_TILES = 5;
constexpr int BLOCKS = SPLIT / 16, QUARTERS = WARPS / 2, P_PITCH = SPLIT + 8, STAGES = 3;
static_assert(SPLIT == 32 * QUARTERS && BLOCKS == WARPS, "two blocks of 16 positions per pair of warps");

struct Split {
    const uint16_t *q_lat, *q_pe, *kv_pool;
    const long long *req_to_token, *rows, *seq_lens;
    long long table_width;
    float *part_out, *part_ml;
    float scale_log2;
    int width, heads, programs, group_tiles, early;
    const char* next_weights;  // of finish.cu's node, asked for ahead of it
    int next_bytes;
};

// Peaks and masses of a row are kept by block of positions, and of all splits so far as its state; where the queries lie,
// warps exchange halves of their sums.
template <int LATENT, int ROPE, int TILES>
struct Memory {
    static constexpr int PITCH = LATENT + ROPE + 8;
    static constexpr size_t KV = 0, QUERY = KV + sizeof(uint16_t) * SPLIT * PITCH;
    static constexpr size_t PROB = QUERY + sizeof(uint16_t) * TILES * 8 * PITCH;
    static constexpr size_t PEAK = PROB + sizeof(uint16_t) * TILES * 8 * P_PITCH;
    static constexpr size_t MASS = PEAK + sizeof(float) * BLOCKS * TILES * 8;
    static constexpr size_t STATE = MASS + sizeof(float) * BLOCKS * TILES * 8;
    static constexpr size_t BYTES = STATE + sizeof(float2) * TILES * 8;
    static_assert(sizeof(float4) * THREADS <= sizeof(uint16_t) * 8 * PITCH, "one float4 per thread and tile");
};

__device__ __forceinline__ void wait_for_stage(int stage) {
    static_assert(STAGES == 3, "one wait per stage");
    if (stage == 0) cp_async_wait<2>();
    if (stage == 1) cp_async_wait<1>();
    if (stage == 2) cp_async_wait<0>();
}

// One program: the running softmax of TILES tiles of eight rows over its splits.
template <int LATENT, int ROPE, int TILES>
struct Program {
    using M = Memory<LATENT, ROPE, TILES>;
    static constexpr int PITCH = M::PITCH, WIDTH = LATENT + ROPE, STAGE = WIDTH / STAGES;
    static constexpr int COLUMN_TILES = LATENT / (16 * WARPS);
    static_assert(STAGE % 64 == 0 && COLUMN_TILES == 4 && LATENT == 16 * WARP && ROPE == 64 && WARPS == 8);

    const Split& p;
    unsigned char* shared;
    int request, row, seq, total, slot, rows_total, lane, g, t;
    int quarter, parity, block;  // of the positions: 32 for the scores' sums, 16 behind the exchange
    float out[COLUMN_TILES][TILES][4];

    __device__ __forceinline__ Program(const Split& split, unsigned char* memory) : p(split), shared(memory) {
        request = static_cast<int>(blockIdx.z);
        rows_total = p.width * p.heads;
        lane = lane_id();
        g = lane / 4;
        t = lane % 4;
        quarter = warp_id() % QUARTERS;
        parity = warp_id() / QUARTERS;
        block = 2 * quarter + parity;
    }

    __device__ __forceinline__ void read_lengths() {
        const long long length = __ldcg(p.seq_lens + request);
        row = static_cast<int>(__ldcg(p.rows + request));
        seq = row > 0 ? static_cast<int>(length) : 0;
        total = seq + p.width;
    }

    __device__ __forceinline__ uint16_t* half_at(size_t offset) { return reinterpret_cast<uint16_t*>(shared + offset); }
    __device__ __forceinline__ float* float_at(size_t offset) { return reinterpret_cast<float*>(shared + offset); }

    // Cache slots of the 16 tokens that this warp copies, one per lane, twice; -1 behind the last written position.
    __device__ __forceinline__ void find_slots(int split) {
        const int position = split * SPLIT + 16 * warp_id() + lane % 16;
        const long long* entry = p.req_to_token + row * p.table_width + position;
        slot = position < total ? static_cast<int>(__ldcg(entry)) : -1;
    }

    // Whether this warp's tokens of the split were all committed before the step.
    __device__ __forceinline__ bool committed(int split) const { return split * SPLIT + 16 * (warp_id() + 1) <= seq; }

    // Cache rows of this warp's tokens, STAGES groups of copies; zeros for a slot of -1. Of four tokens a lane has LOADS
    // pieces of a stage, the same of every four.
    __device__ __forceinline__ void fetch() {
        constexpr int PIECES = STAGE / 8, LOADS = 4 * PIECES / WARP, FOURS = 16 / 4;
        static_assert(4 * PIECES % WARP == 0);
        const uint16_t* source[LOADS];
        uint16_t* target[LOADS];
        int own[FOURS][LOADS];
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const int token = (lane + n * WARP) / PIECES, c = (lane + n * WARP) % PIECES * 8;
            source[n] = p.kv_pool + c;
            target[n] = half_at(M::KV) + (16 * warp_id() + token) * PITCH + c;
#pragma unroll
            for (int i = 0; i < FOURS; ++i) own[i][n] = shfl(slot, 4 * i + token);
        }
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
#pragma unroll
            for (int i = 0; i < FOURS; ++i)
#pragma unroll
                for (int n = 0; n < LOADS; ++n) {
                    const uint16_t* from = source[n] + static_cast<long long>(own[i][n]) * WIDTH + stage * STAGE;
                    cp_async16(target[n] + 4 * i * PITCH + stage * STAGE, from, own[i][n] >= 0);
                }
            cp_async_commit();
        }
    }

    // Calls visit(number, place in shared memory, source, whether such a row exists) for this thread's 16-byte pieces of
    // the queries: a warp takes row warp_id() of every tile, then the rotated parts of four tiles at once.
    template <class Visit>
    __device__ __forceinline__ void each_query_piece(int first_row, const Visit& visit) {
        uint16_t* query = half_at(M::QUERY) + warp_id() * PITCH;
        const int mine = first_row + warp_id();
        const size_t at = static_cast<size_t>(request) * rows_total + mine;
        const uint16_t *latent = p.q_lat + at * LATENT + 8 * lane, *rope = p.q_pe + at * ROPE + lane % 8 * 8;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int c = 8 * WARP * half;
                visit(2 * j + half, query + 8 * j * PITCH + 8 * lane + c, latent + 8 * j * LATENT + c,
                      mine + 8 * j < rows_total);
            }
#pragma unroll
        for (int j0 = 0; j0 < TILES; j0 += 4) {
            const int j = j0 + lane / 8;
            if (j < TILES)
                visit(2 * TILES + j0 / 4, query + 8 * j * PITCH + LATENT + lane % 8 * 8, rope + 8 * j * ROPE,
                      mine + 8 * j < rows_total);
        }
    }

    // The first tiles' queries pass through registers: they may come before the cache rows, which were asked for first.
    __device__ __forceinline__ void load_queries(int first_row) {
        uint4 piece[2 * TILES + (TILES + 3) / 4];
        each_query_piece(first_row, [&](int number, uint16_t*, const uint16_t* from, bool exists) {
            piece[number] = exists ? load16(from) : make_uint4(0, 0, 0, 0);
        });
        each_query_piece(first_row, [&](int number, uint16_t* to, const uint16_t*, bool) { store16(to, piece[number]); });
    }

    __device__ __forceinline__ void request_queries(int first_row) {
        each_query_piece(first_row, [&](int, uint16_t* to, const uint16_t* from, bool exists) {
            cp_async16(to, exists ? from : p.q_lat, exists);
        });
        cp_async_commit();
    }

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][j][e] = 0.0f;
    }

    // Sums of this warp's 32 positions and every other k step, in columns `from` .. `from` + STAGE.
    __device__ __forceinline__ void multiply_keys(float (&sum)[2][TILES][4], int from) {
        const uint16_t* keys = half_at(M::KV) + (32 * quarter + lane % 16) * PITCH + lane / 16 * 8 + 16 * parity + from;
        const uint16_t* query =
            half_at(M::QUERY) + lane % 8 * PITCH + lane / 8 % 2 * 8 + lane / 16 * 32 + 16 * parity + from;
#pragma unroll
        for (int k = 0; k < STAGE; k += 64) {
            uint32_t a[2][2][4], b[TILES][4];
#pragma unroll
            for (int u = 0; u < 2; ++u)
#pragma unroll
                for (int m = 0; m < 2; ++m) load_matrices(a[u][m], keys + 16 * m * PITCH + k + 32 * u);
#pragma unroll
            for (int j = 0; j < TILES; ++j) load_matrices(b[j], query + j * 8 * PITCH + k);
#pragma unroll
            for (int u = 0; u < 2; ++u)
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int j = 0; j < TILES; ++j) {
                        const uint32_t step[2] = {b[j][2 * u], b[j][2 * u + 1]};
                        mma_bf16_16816(sum[m][j], a[u][m], step);
                    }
        }
    }

    // Scores of this warp's block: score[j][e] at position g + e / 2 * 8 and row 2 t + e % 2 of tile j.
    __device__ __forceinline__ void compute_scores(float (&score)[TILES][4]) {
        float sum[2][TILES][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[m][j][e] = 0.0f;
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            wait_for_stage(stage);
            __syncthreads();
            multiply_keys(sum, stage * STAGE);
        }
        float4* exchange = reinterpret_cast<float4*>(shared + M::QUERY);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            float send[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                send[e] = parity ? sum[0][j][e] : sum[1][j][e];
                score[j][e] = parity ? sum[1][j][e] : sum[0][j][e];
            }
            const int to = static_cast<int>(threadIdx.x) ^ (QUARTERS * WARP);
            exchange[j * THREADS + to] = make_float4(send[0], send[1], send[2], send[3]);
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const float4 other = exchange[j * THREADS + threadIdx.x];
            score[j][0] = __fadd_rn(score[j][0], other.x);
            score[j][1] = __fadd_rn(score[j][1], other.y);
            score[j][2] = __fadd_rn(score[j][2], other.z);
            score[j][3] = __fadd_rn(score[j][3], other.w);
        }
    }

    // Scales the scores and leaves the largest of the block in shared memory; what a row does not see is minus infinity.
    __device__ __forceinline__ void mask(float (&score)[TILES][4], int split, int first_row) {
        float* peaks = float_at(M::PEAK) + block;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) score[j][e] = __fmul_rn(score[j][e], p.scale_log2);
        if ((split + 1) * SPLIT > seq + 1) hide(score, split * SPLIT + 16 * block + g, first_row);
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float highest = fmaxf(score[j][c], score[j][c + 2]);
#pragma unroll
                for (int distance = 4; distance < WARP; distance *= 2)
                    highest = fmaxf(highest, shfl_xor(highest, distance));
                if (g == 0) peaks[BLOCKS * (8 * j + 2 * t + c)] = highest;
            }
    }

    // A split with positions that some row does not see; `position` is this lane's first.
    __device__ __forceinline__ void hide(float (&score)[TILES][4], int position, int first_row) {
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int last = seq + (first_row + 8 * j + 2 * t + c) / p.heads;
                if (position > last) score[j][c] = -CUDART_INF_F;
                if (position + 8 > last) score[j][c + 2] = -CUDART_INF_F;
            }
    }

    // Peak of row r in this split and, unless it is the first, the ones before it.
    __device__ __forceinline__ float highest_of(int r, bool first) {
        const float4* peaks = reinterpret_cast<const float4*>(float_at(M::PEAK) + BLOCKS * r);
        const float4 low = peaks[0], high = peaks[1];
        const float left = fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w));
        const float right = fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w));
        return fmaxf(fmaxf(left, right), first ? -CUDART_INF_F : float_at(M::STATE)[2 * r]);
    }

    static __device__ __forceinline__ float anchor_of(float highest) { return highest == -CUDART_INF_F ? 0.0f : highest; }

    // Probabilities into shared memory as [row][position], their sums by block. Step by step for all rows, or the
    // stores of one row would hold up the loads of the next.
    __device__ __forceinline__ void soften(float (&score)[TILES][4], bool first) {
        float sum[TILES][2];
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) sum[j][c] = anchor_of(highest_of(8 * j + 2 * t + c, first));
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                score[j][c] = exp2f(__fsub_rn(score[j][c], sum[j][c]));
                score[j][c + 2] = exp2f(__fsub_rn(score[j][c + 2], sum[j][c]));
                sum[j][c] = __fadd_rn(score[j][c], score[j][c + 2]);
            }
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2)
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) sum[j][c] = __fadd_rn(sum[j][c], shfl_xor(sum[j][c], distance));
        float* masses = float_at(M::MASS) + block;
        uint16_t* probs = half_at(M::PROB) + 16 * block + g;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int r = 8 * j + 2 * t + c;
                probs[r * P_PITCH] = to_bf16(score[j][c]);
                probs[r * P_PITCH + 8] = to_bf16(score[j][c + 2]);
                if (g == 0) masses[BLOCKS * r] = sum[j][c];
            }
    }

    // The outputs of earlier splits, brought to the new peaks.
    __device__ __forceinline__ void rescale() {
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int r = 8 * j + 2 * t + c;
                const float factor = exp2f(__fsub_rn(float_at(M::STATE)[2 * r], anchor_of(highest_of(r, false))));
#pragma unroll
                for (int m = 0; m < COLUMN_TILES; ++m) {
                    out[m][j][c] = __fmul_rn(out[m][j][c], factor);
                    out[m][j][c + 2] = __fmul_rn(out[m][j][c + 2], factor);
                }
            }
    }

    // Peak and mass of every row up to this split, for the next split and for finish.cu: a warp per tile, a lane per row.
    __device__ __forceinline__ void account(int first_row, bool first) {
        if (warp_id() >= TILES || lane >= 8) return;
        const int r = 8 * warp_id() + lane;
        float2* state = reinterpret_cast<float2*>(shared + M::STATE) + r;
        const float highest = highest_of(r, first);
        float mass = 0.0f;
        if (!first) mass = __fmul_rn(state->y, exp2f(__fsub_rn(state->x, anchor_of(highest))));
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) mass = __fadd_rn(mass, float_at(M::MASS)[BLOCKS * r + b]);
        *state = make_float2(highest, mass);
        const size_t part = (static_cast<size_t>(request) * p.programs + blockIdx.y) * rows_total + first_row + r;
        if (first_row + r < rows_total)
            *reinterpret_cast<float2*>(p.part_ml + part * 2) = make_float2(highest, mass);
    }

    __device__ __forceinline__ void multiply_values() {
        const uint16_t* probs = half_at(M::PROB) + lane % 8 * P_PITCH + lane / 8 * 8;
        const uint16_t* values =
            half_at(M::KV) + (lane / 16 * 8 + lane % 8) * PITCH + warp_id() * 16 * COLUMN_TILES + lane / 8 % 2 * 8;
#pragma unroll 2
        for (int k = 0; k < SPLIT; k += 32) {
            uint32_t a[2][COLUMN_TILES][4], b[TILES][4];
#pragma unroll
            for (int j = 0; j < TILES; ++j) load_matrices(b[j], probs + j * 8 * P_PITCH + k);
#pragma unroll
            for (int u = 0; u < 2; ++u)
#pragma unroll
                for (int m = 0; m < COLUMN_TILES; ++m)
                    load_matrices_transposed(a[u][m], values + (k + 16 * u) * PITCH + 16 * m);
#pragma unroll
            for (int u = 0; u < 2; ++u)
#pragma unroll
                for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
                    for (int j = 0; j < TILES; ++j) {
                        const uint32_t step[2] = {b[j][2 * u], b[j][2 * u + 1]};
                        mma_bf16_16816(out[m][j], a[u][m], step);
                    }
        }
    }

    // A lane holds columns 8 i + g of its rows; four lanes swap so that each stores 16 bytes, eight lanes a whole line.
    __device__ __forceinline__ void store(int first_row) {
        const size_t part = (static_cast<size_t>(request) * p.programs + blockIdx.y) * rows_total;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int r = first_row + 8 * j + 2 * t + c;
                float* to = p.part_out + (part + r) * LATENT + warp_id() * 16 * COLUMN_TILES + g % 4 * 8 + g / 4 * 4;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const auto &low = out[2 * half][j], &high = out[2 * half + 1][j];
                    float value[4] = {low[c], low[c + 2], high[c], high[c + 2]};
                    transpose_quad(value, g % 4);
                    const float4 four = make_float4(value[0], value[1], value[2], value[3]);
                    if (r < rows_total) *reinterpret_cast<float4*>(to + 32 * half) = four;
                }
            }
    }
};
