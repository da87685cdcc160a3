// Absorbed attention over the paged latent cache, one split of SPLIT positions per program (see kernel.py and
// reference.py): partial outputs, peaks and masses that finish.cu combines.
//
// Transposed products: scores are [positions x rows] (a warp holds 16 positions of all rows), outputs are
// [latent columns x rows] (a warp holds an eighth of the columns). Eight rows, one token's heads at TP 4, are one
// n8 tile, so nothing is padded and a row's bits depend on that row alone: a row is a column of the mma, and every sum
// runs over k slots, the same lanes and warps 0 .. 7 in turn, whatever tiles ride along.
//
// With `early` set, lengths, page table and cache rows below the committed length are two hops old: they are read before
// the wait, past L1, which may still hold a line of an earlier step. Rows of the window itself come from the node before
// and are fetched behind the wait.
#include "matrix.cuh"

namespace {

constexpr int SPLIT = 128, WARPS = 8, THREADS = WARPS * WARP, MAX_TILES = 5;
constexpr int P_PITCH = SPLIT + 8;

struct Split {
    const uint16_t *q_lat, *q_pe, *kv_pool;
    const long long *req_to_token, *rows, *seq_lens;
    long long table_width;
    float *part_out, *part_ml;
    float scale_log2;
    int width, heads, programs, early;
};

template <int LATENT, int ROPE, int TILES>
struct Memory {
    static constexpr int PITCH = LATENT + ROPE + 8;
    static constexpr size_t KV = 0, QUERY = KV + sizeof(uint16_t) * SPLIT * PITCH;
    static constexpr size_t PROB = QUERY + sizeof(uint16_t) * TILES * 8 * PITCH;
    static constexpr size_t PEAK = PROB + sizeof(uint16_t) * TILES * 8 * P_PITCH;
    static constexpr size_t MASS = PEAK + sizeof(float) * WARPS * TILES * 8;
    static constexpr size_t SLOT = MASS + sizeof(float) * WARPS * TILES * 8;
    static constexpr size_t BYTES = SLOT + sizeof(int) * SPLIT;
};

// One program: the running softmax of TILES tiles of eight rows over its splits.
template <int LATENT, int ROPE, int TILES>
struct Program {
    using M = Memory<LATENT, ROPE, TILES>;
    static constexpr int PITCH = M::PITCH, CHUNKS = (LATENT + ROPE) / 8, COLUMN_TILES = LATENT / (16 * WARPS);

    const Split& p;
    unsigned char* shared;
    int request, row, seq, total, rows_total, lane, g, t;
    float peak[TILES][2], mass[TILES][2], out[COLUMN_TILES][TILES][4];

    __device__ __forceinline__ Program(const Split& split, unsigned char* memory) : p(split), shared(memory) {
        request = static_cast<int>(blockIdx.z);
        rows_total = p.width * p.heads;
        lane = lane_id();
        g = lane / 4;
        t = lane % 4;
    }

    __device__ __forceinline__ void read_lengths() {
        row = static_cast<int>(__ldcg(p.rows + request));
        seq = row > 0 ? static_cast<int>(__ldcg(p.seq_lens + request)) : 0;
        total = seq + p.width;
    }

    __device__ __forceinline__ uint16_t* half_at(size_t offset) { return reinterpret_cast<uint16_t*>(shared + offset); }
    __device__ __forceinline__ float* float_at(size_t offset) { return reinterpret_cast<float*>(shared + offset); }

    __device__ __forceinline__ void find_slots(int split) {
        int* slots = reinterpret_cast<int*>(shared + M::SLOT);
        if (threadIdx.x < SPLIT) {
            const int position = split * SPLIT + threadIdx.x;
            const long long* entry = p.req_to_token + row * p.table_width + position;
            slots[threadIdx.x] = position < total ? static_cast<int>(__ldcg(entry)) : -1;
        }
        __syncthreads();
    }

    // Cache rows of tokens [from, to) of the split; behind the last written position zeros.
    __device__ __forceinline__ void fetch(int from, int to) {
        const int* slots = reinterpret_cast<const int*>(shared + M::SLOT);
        uint16_t* kv = half_at(M::KV);
        for (int i = from * CHUNKS + threadIdx.x; i < to * CHUNKS; i += THREADS) {
            const int token = i / CHUNKS, c = i % CHUNKS * 8, slot = slots[token];
            const uint16_t* source = p.kv_pool + static_cast<size_t>(max(slot, 0)) * (LATENT + ROPE) + c;
            cp_async16(kv + token * PITCH + c, source, slot >= 0);
        }
        cp_async_commit();
    }

    __device__ __forceinline__ void fetch_queries(int first_row) {
        uint16_t* query = half_at(M::QUERY);
        for (int i = threadIdx.x; i < TILES * 8 * CHUNKS; i += THREADS) {
            const int r = i / CHUNKS, c = i % CHUNKS * 8;
            const bool valid = first_row + r < rows_total;
            const size_t at = static_cast<size_t>(request) * rows_total + (valid ? first_row + r : 0);
            const uint16_t* source = c < LATENT ? p.q_lat + at * LATENT + c : p.q_pe + at * ROPE + c - LATENT;
            cp_async16(query + r * PITCH + c, source, valid);
        }
        cp_async_commit();
    }

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            peak[j][0] = peak[j][1] = -CUDART_INF_F;
            mass[j][0] = mass[j][1] = 0.0f;
#pragma unroll
            for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][j][e] = 0.0f;
        }
    }

    // Scores of this warp's 16 positions: score[j][e] at position g + e / 2 * 8 and row 2 t + e % 2 of tile j, in two
    // chains of even and odd k steps.
    __device__ __forceinline__ void multiply_keys(float (&score)[TILES][4]) {
        const uint16_t* keys = half_at(M::KV) + (16 * warp_id() + lane % 16) * PITCH + lane / 16 * 8;
        const uint16_t* query = half_at(M::QUERY) + lane % 8 * PITCH + lane / 8 * 8;
        float odd[TILES][4];
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) score[j][e] = odd[j][e] = 0.0f;
#pragma unroll 2
        for (int k = 0; k < LATENT + ROPE; k += 32) {
            uint32_t a[2][4];
            load_matrices(a[0], keys + k);
            load_matrices(a[1], keys + k + 16);
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                uint32_t b[4];
                load_matrices(b, query + j * 8 * PITCH + k);
                const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
                mma_bf16_16816(score[j], a[0], low);
                mma_bf16_16816(odd[j], a[1], high);
            }
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) score[j][e] = __fadd_rn(score[j][e], odd[j][e]);
    }

    // Scales and masks the scores, leaves each warp's largest in shared memory.
    __device__ __forceinline__ void mask(float (&score)[TILES][4], int split, int first_row) {
        float* peaks = float_at(M::PEAK) + warp_id() * TILES * 8;
        const int position = split * SPLIT + 16 * warp_id() + g;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int last = seq + (first_row + 8 * j + 2 * t + c) / p.heads;
                score[j][c] = position <= last ? __fmul_rn(score[j][c], p.scale_log2) : -CUDART_INF_F;
                score[j][c + 2] = position + 8 <= last ? __fmul_rn(score[j][c + 2], p.scale_log2) : -CUDART_INF_F;
                float highest = fmaxf(score[j][c], score[j][c + 2]);
#pragma unroll
                for (int distance = 4; distance < WARP; distance *= 2)
                    highest = fmaxf(highest, shfl_xor(highest, distance));
                if (g == 0) peaks[8 * j + 2 * t + c] = highest;
            }
    }

    // Probabilities into shared memory as [row][position], their sums per warp; the running state is rescaled.
    __device__ __forceinline__ void soften(float (&score)[TILES][4]) {
        const float* peaks = float_at(M::PEAK);
        float* masses = float_at(M::MASS) + warp_id() * TILES * 8;
        uint16_t* probs = half_at(M::PROB) + 16 * warp_id() + g;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int r = 8 * j + 2 * t + c;
                float highest = peak[j][c];
#pragma unroll
                for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, peaks[w * TILES * 8 + r]);
                const float anchor = highest == -CUDART_INF_F ? 0.0f : highest;
                const float factor = exp2f(__fsub_rn(peak[j][c], anchor));
                const float low = exp2f(__fsub_rn(score[j][c], anchor));
                const float high = exp2f(__fsub_rn(score[j][c + 2], anchor));
                probs[r * P_PITCH] = to_bf16(low);
                probs[r * P_PITCH + 8] = to_bf16(high);
                float sum = __fadd_rn(low, high);
#pragma unroll
                for (int distance = 4; distance < WARP; distance *= 2) sum = __fadd_rn(sum, shfl_xor(sum, distance));
                if (g == 0) masses[r] = sum;
                peak[j][c] = highest;
                mass[j][c] = __fmul_rn(mass[j][c], factor);
#pragma unroll
                for (int m = 0; m < COLUMN_TILES; ++m) {
                    out[m][j][c] = __fmul_rn(out[m][j][c], factor);
                    out[m][j][c + 2] = __fmul_rn(out[m][j][c + 2], factor);
                }
            }
    }

    __device__ __forceinline__ void multiply_values() {
        const float* masses = float_at(M::MASS);
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int w = 0; w < WARPS; ++w)
                    mass[j][c] = __fadd_rn(mass[j][c], masses[w * TILES * 8 + 8 * j + 2 * t + c]);
        const uint16_t* probs = half_at(M::PROB) + lane % 8 * P_PITCH + lane / 8 * 8;
        const uint16_t* values =
            half_at(M::KV) + (lane / 16 * 8 + lane % 8) * PITCH + warp_id() * 16 * COLUMN_TILES + lane / 8 % 2 * 8;
#pragma unroll 2
        for (int k = 0; k < SPLIT; k += 32) {
            uint32_t b[TILES][4];
#pragma unroll
            for (int j = 0; j < TILES; ++j) load_matrices(b[j], probs + j * 8 * P_PITCH + k);
#pragma unroll
            for (int m = 0; m < COLUMN_TILES; ++m) {
                uint32_t a[2][4];
                load_matrices_transposed(a[0], values + k * PITCH + 16 * m);
                load_matrices_transposed(a[1], values + (k + 16) * PITCH + 16 * m);
#pragma unroll
                for (int j = 0; j < TILES; ++j) {
                    const uint32_t low[2] = {b[j][0], b[j][1]}, high[2] = {b[j][2], b[j][3]};
                    mma_bf16_16816(out[m][j], a[0], low);
                    mma_bf16_16816(out[m][j], a[1], high);
                }
            }
        }
    }

    __device__ __forceinline__ void store(int first_row) {
        const size_t part = (static_cast<size_t>(request) * p.programs + blockIdx.y) * rows_total;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int r = first_row + 8 * j + 2 * t + c;
                if (r >= rows_total) continue;
                float* to = p.part_out + (part + r) * LATENT + warp_id() * 16 * COLUMN_TILES + g;
#pragma unroll
                for (int m = 0; m < COLUMN_TILES; ++m) {
                    to[16 * m] = out[m][j][c];
                    to[16 * m + 8] = out[m][j][c + 2];
                }
                if (warp_id() == 0 && g == 0)
                    *reinterpret_cast<float2*>(p.part_ml + (part + r) * 2) = make_float2(peak[j][c], mass[j][c]);
            }
    }
};

template <int LATENT, int ROPE, int TILES>
__global__ void __launch_bounds__(THREADS, 1) split_kernel(Split p) {
    SGLING_DYNAMIC_SHARED(unsigned char, shared);
    Program<LATENT, ROPE, TILES> program(p, shared);
    const int tiles = static_cast<int>(ceil_div(program.rows_total, 8)), first = static_cast<int>(blockIdx.y);
    const int mine = static_cast<int>(ceil_div(tiles, gridDim.x)), start = mine * blockIdx.x;
    int loaded = -1, fetched = 0;
    if (p.early) {
        program.read_lengths();
        if (first * SPLIT < program.total) {
            program.find_slots(first);
            fetched = min(max(program.seq - first * SPLIT, 0), SPLIT);
            program.fetch(0, fetched);
        }
    }
    pdl_wait();
    pdl_trigger();
    if (!p.early) program.read_lengths();
    if (first * SPLIT >= program.total) return;
    for (int tile = start; tile < min(start + mine, tiles); tile += TILES) {
        if (tile != start) __syncthreads();
        program.fetch_queries(8 * tile);
        program.start();
        for (int split = first; split * SPLIT < program.total; split += p.programs) {
            if (loaded != split) {
                if (loaded >= 0) {
                    __syncthreads();
                    fetched = 0;
                }
                if (loaded >= 0 || !p.early) program.find_slots(split);
                program.fetch(fetched, SPLIT);
                loaded = split;
            }
            cp_async_wait<0>();
            __syncthreads();
            float score[TILES][4];
            program.multiply_keys(score);
            program.mask(score, split, 8 * tile);
            __syncthreads();
            program.soften(score);
            __syncthreads();
            program.multiply_values();
        }
        program.store(8 * tile);
    }
}

template <int LATENT, int ROPE, int TILES>
int launch_split(const Split& p, dim3 grid, int pdl, void* stream) {
    return SGLING_LAUNCH((split_kernel<LATENT, ROPE, TILES>), grid, dim3(THREADS),
                         (Memory<LATENT, ROPE, TILES>::BYTES), stream, pdl, p);
}

template <int LATENT, int ROPE>
int launch_tiles(const Split& p, dim3 grid, int tiles, int pdl, void* stream) {
    switch (tiles) {
        case 1: return launch_split<LATENT, ROPE, 1>(p, grid, pdl, stream);
        case 2: return launch_split<LATENT, ROPE, 2>(p, grid, pdl, stream);
        case 3: return launch_split<LATENT, ROPE, 3>(p, grid, pdl, stream);
        case 4: return launch_split<LATENT, ROPE, 4>(p, grid, pdl, stream);
        default: return launch_split<LATENT, ROPE, MAX_TILES>(p, grid, pdl, stream);
    }
}

}  // namespace

// q_lat [bs * width, heads, latent], q_pe [.., rope], part_out fp32 [bs, programs, width * heads, latent], part_ml
// fp32 [.., 2] (peak, mass). `groups` CTAs share a split's rows. Shapes: latent 512, rope 64.
extern "C" int mla_split(const void* q_lat, const void* q_pe, const void* kv_pool, const void* req_to_token,
                         long long table_width, const void* rows, const void* seq_lens, void* part_out, void* part_ml,
                         float scale_log2, long long batch, long long width, long long heads, long long programs,
                         long long groups, int early, int pdl, void* stream) {
    Split p{};
    p.q_lat = static_cast<const uint16_t*>(q_lat);
    p.q_pe = static_cast<const uint16_t*>(q_pe);
    p.kv_pool = static_cast<const uint16_t*>(kv_pool);
    p.req_to_token = static_cast<const long long*>(req_to_token);
    p.rows = static_cast<const long long*>(rows);
    p.seq_lens = static_cast<const long long*>(seq_lens);
    p.table_width = table_width;
    p.part_out = static_cast<float*>(part_out);
    p.part_ml = static_cast<float*>(part_ml);
    p.scale_log2 = scale_log2;
    p.width = static_cast<int>(width);
    p.heads = static_cast<int>(heads);
    p.programs = static_cast<int>(programs);
    p.early = early;
    const long long mine = ceil_div(ceil_div(width * heads, 8), groups);
    const long long passes = ceil_div(mine, MAX_TILES);
    const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(programs), static_cast<unsigned>(batch));
    return launch_tiles<512, 64>(p, grid, static_cast<int>(ceil_div(mine, passes)), pdl, stream);
}
