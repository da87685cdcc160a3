// KDA decode and verify: convolution, gates, normalisation and the chain recurrence of W rows in one node.
//
// A CTA owns a tile of value rows of one head of one request. Its warps first prepare all W rows at once, into shared
// memory; then eight lanes per value row walk the rows with the state in registers. Both sums over the state of a row
// run together and start from the state as the row before left it: S (e^g k), S (e^g q), then o = S (e^g q) + u (k q).
// Nothing a row computes depends on W, on the tile or on the number of warps, so W passes of one row equal one pass of
// W rows bit for bit.
#include "chain.cuh"

enum Mode { DECODE = 0, STAGED = 1, REPLAY = 2 };

struct Chain {
    uint16_t* out;                 // [requests * width, heads, K]
    const uint16_t *qkv, *f, *b;   // rows of [3 heads K], [heads K], [heads]; strides in elements
    long long qkv_stride, f_stride, b_stride;
    const float *conv_weight, *a_log, *dt_bias;
    uint16_t* conv_pool;           // [slots, 3, 3 heads K]
    float* state_pool;             // [slots, heads, K, K]
    const long long *slots, *seq_lens;
    uint16_t *x, *k, *v;           // ring [slots, depth, ...]; staged: x = windows [slots, depth, 3, 3 heads K]
    float *g, *beta;               // ring; staged: g = states [slots, depth, heads, K, K]
    unsigned* arrivals;            // [requests, heads] zeros, left as zeros (decode)
    long long depth;
    int heads, width, value_rows;
    float lower_bound, scale;      // scale of q: 1 / sqrt(K)
};

// Where a CTA works and what its shared memory holds.
template <int K>
struct Tile {
    long long slot, first, start;  // state slot; first row of the window in qkv; position of that row
    int tile, tiles, head, request, channels;
    float *key, *decay, *decayed_key, *decayed_query, *v, *beta, *key_query;

    __device__ Tile(const Chain& p, float* shared) {
        tile = static_cast<int>(blockIdx.x), tiles = static_cast<int>(gridDim.x);
        head = static_cast<int>(blockIdx.y), request = static_cast<int>(blockIdx.z);
        channels = 3 * p.heads * K;
        first = static_cast<long long>(request) * p.width, start = 0;
        key = shared, decay = key + p.width * K, decayed_key = decay + p.width * K;
        decayed_query = decayed_key + p.width * K, v = decayed_query + p.width * K;
        beta = v + p.width * p.value_rows, key_query = beta + p.width;
    }

    __device__ int value_row(const Chain& p) const { return tile * p.value_rows; }
    __device__ long long entry(const Chain& p, int row) const {
        return slot * p.depth + ((start + row) & (p.depth - 1));
    }
    // The row whose stores this CTA does among those that prepare it.
    __device__ bool owns(int row) const { return row % tiles == tile; }
};

// Pre-conv row `row` of the window, from channel `c` on; rows -3 .. -1 are the stored ones.
template <int K>
__device__ __forceinline__ const uint16_t* input_row(const Chain& p, const Tile<K>& at, int row, int c) {
    if (row < 0) return p.conv_pool + (at.slot * 3 + 3 + row) * at.channels + c;
    return p.qkv + (at.first + row) * p.qkv_stride + c;
}

// ---- preparation: one row per warp ---------------------------------------------------------------------------------

// Constants of this lane: taps of its q and k channels, biases of its decays, e^a_log of the head.
template <int PER>
struct RowConstants {
    float4 taps[2][PER];
    float bias[PER], rate;

    __device__ RowConstants(const Chain& p, int head, int mine) {
        const float4* from = reinterpret_cast<const float4*>(p.conv_weight) + mine;
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            taps[0][i] = from[i], taps[1][i] = from[p.heads * 32 * PER + i];
            bias[i] = p.dt_bias[mine + i];
        }
        rate = expf(p.a_log[head]);
    }
};

// What one lane holds of a row: pre-conv q and k with their history, rounded q and k, log-decays, and the head's beta.
template <int PER>
struct Row {
    Channels<PER> x[2][4], rounded[2];
    float g[PER], beta;

    // Loads of row j: `mine` is the lane's first channel of q, `window` its place in the slot's oldest stored row.
    template <bool ALIGNED>
    __device__ __forceinline__ void load(const Chain& p, const uint16_t* window, long long first, int j, int mine) {
        const int part = p.heads * 32 * PER;
        const uint16_t* from = p.qkv + (first + j) * p.qkv_stride + mine;
#pragma unroll
        for (int tap = 3; tap >= 0; --tap, from -= p.qkv_stride) {
            const uint16_t* row = j + tap < 3 ? window + (j + tap) * 3 * part : from;
            x[0][tap] = load_channels<PER, ALIGNED>(row);
            x[1][tap] = load_channels<PER, ALIGNED>(row + part);
        }
    }
};

// Leaves a row for a commit: its pre-conv q and k, k, g and beta; or the window as it stands behind the row.
template <int K, int MODE>
__device__ __forceinline__ void keep_row(const Chain& p, const Tile<K>& at, const Row<K / 32>& row, int j) {
    constexpr int PER = K / 32;
    const int mine = at.head * K + lane_id() * PER;
    if constexpr (MODE == REPLAY) {
        const long long entry = at.entry(p, j), own = entry * (p.heads * K) + mine;
        uint16_t* x = p.x + entry * at.channels + mine;
        store_channels<PER>(x, row.x[0][3]);
        store_channels<PER>(x + p.heads * K, row.x[1][3]);
        store_channels<PER>(p.k + own, row.rounded[1]);
        store_values<PER>(p.g + own, row.g);
        if (lane_id() == 0) p.beta[entry * p.heads + at.head] = row.beta;
    } else {
        uint16_t* window = p.x + (at.slot * p.depth + j) * 3 * at.channels + mine;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            store_channels<PER>(window + i * at.channels, row.x[0][i + 1]);
            store_channels<PER>(window + i * at.channels + p.heads * K, row.x[1][i + 1]);
        }
    }
}

// Everything of row j but v: loads first, then gates, conv, SiLU, rounding, norms and the products with the decay.
template <int K, int MODE, bool ALIGNED>
__device__ __forceinline__ void prepare_row(const Chain& p, const Tile<K>& at, const RowConstants<K / 32>& constant,
                                            int j) {
    constexpr int PER = K / 32;
    const int mine = at.head * K + lane_id() * PER, first = j * K + lane_id() * PER;
    const long long n = at.first + j;
    Row<PER> row;
    row.template load<ALIGNED>(p, p.conv_pool + at.slot * 3 * at.channels + mine, at.first, j, mine);
    const Channels<PER> f = load_channels<PER, ALIGNED>(p.f + n * p.f_stride + mine);
    row.beta = fast_sigmoid(to_float(p.b[n * p.b_stride + at.head]));
    float decay[PER], value[2][PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const float gate = fast_sigmoid(__fmul_rn(constant.rate, __fadd_rn(f[i], constant.bias[i])));
        row.g[i] = __fmul_rn(p.lower_bound, gate);
        decay[i] = expf(row.g[i]);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const auto& x = row.x[part];
#pragma unroll
        for (int i = 0; i < PER; ++i)
            value[part][i] = convolve(constant.taps[part][i], x[0][i], x[1][i], x[2][i], x[3][i]);
        row.rounded[part] = Channels<PER>::round(value[part]);
#pragma unroll
        for (int i = 0; i < PER; ++i) value[part][i] = row.rounded[part][i];
    }
    const float norm_q = __fmul_rn(inverse_norm(warp_sum(partial_dot(value[0], value[0]))), p.scale);
    const float norm_k = inverse_norm(warp_sum(partial_dot(value[1], value[1])));
    const float product = warp_sum(partial_dot(value[0], value[1]));
    float key[PER], decayed_key[PER], decayed_query[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        key[i] = __fmul_rn(value[1][i], norm_k);
        decayed_key[i] = __fmul_rn(decay[i], key[i]);
        decayed_query[i] = __fmul_rn(decay[i], __fmul_rn(value[0][i], norm_q));
    }
    store_values<PER>(at.key + first, key);
    store_values<PER>(at.decay + first, decay);
    store_values<PER>(at.decayed_key + first, decayed_key);
    store_values<PER>(at.decayed_query + first, decayed_query);
    if (lane_id() == 0) at.beta[j] = row.beta, at.key_query[j] = __fmul_rn(__fmul_rn(product, norm_q), norm_k);
    if constexpr (MODE != DECODE)
        if (at.owns(j)) keep_row<K, MODE>(p, at, row, j);
}

// v of a row at one channel of the tile; decode rolls that channel's window, which no other thread reads.
template <int K, int MODE>
__device__ __forceinline__ void prepare_value(const Chain& p, const Tile<K>& at, const float4& taps, int row, int i) {
    const int mine = at.head * K + at.value_row(p) + i, c = 2 * p.heads * K + mine;
    uint16_t x[4];
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) x[tap] = *input_row(p, at, row + tap - 3, c);
    const uint16_t rounded = to_bf16(convolve(taps, to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])));
    at.v[row * p.value_rows + i] = to_float(rounded);
    if (MODE == REPLAY) {
        p.x[at.entry(p, row) * at.channels + c] = x[3];
        p.v[at.entry(p, row) * (p.heads * K) + mine] = rounded;
        return;
    }
    uint16_t* window = (MODE == DECODE ? p.conv_pool + at.slot * 3 * at.channels
                                       : p.x + (at.slot * p.depth + row) * 3 * at.channels) + c;
#pragma unroll
    for (int tap = 1; tap < 4; ++tap) window[(tap - 1) * at.channels] = x[tap];
}

// ---- recurrence ----------------------------------------------------------------------------------------------------

// Walks the rows with one value row of the state in eight lanes; `state` is this lane's part of it.
template <int K, int MODE>
__device__ __forceinline__ void walk(const Chain& p, const Tile<K>& at, float (&state)[K / SHARERS], int local) {
    constexpr int N = K / SHARERS;
    const long long value_row = at.head * K + at.value_row(p) + local;
    float key[N], decay[N], decayed_key[N], decayed_query[N], next_decayed_key[N];
    load_part(decayed_key, at.decayed_key);
    load_part(decayed_query, at.decayed_query);
    load_part(decay, at.decay);
    load_part(key, at.key);
#pragma unroll 2
    for (int row = 0; row < p.width; ++row) {
        const int next = min(row + 1, p.width - 1) * K;  // its operands are requested as this row's are used up
        const float v = at.v[row * p.value_rows + local], beta = at.beta[row], key_query = at.key_query[row];
        load_part(next_decayed_key, at.decayed_key + next);
        float predicted = part_of_dot(state, decayed_key);
        float read = part_of_dot(state, decayed_query);
        load_part(decayed_query, at.decayed_query + next);
        decay_state(state, decay);
        load_part(decay, at.decay + next);
#pragma unroll
        for (int distance = SHARERS / 2; distance > 0; distance >>= 1) {
            predicted = __fadd_rn(predicted, shfl_xor(predicted, distance));
            read = __fadd_rn(read, shfl_xor(read, distance));
        }
        const float update = update_of(beta, v, predicted);
        add_update(state, update, key);
        load_part(key, at.key + next);
#pragma unroll
        for (int i = 0; i < N; ++i) decayed_key[i] = next_decayed_key[i];
        if (lane_id() % SHARERS == 0)
            p.out[(at.first + row) * (p.heads * K) + value_row] = to_bf16(fmaf(update, key_query, read));
        if constexpr (MODE == STAGED)
            store_part(p.g + ((at.slot * p.depth + row) * p.heads * K + value_row) * K, state);
    }
}

// What q's and k's window of a head holds behind the step, one warp's: two of its rows move up, the step's own follows.
template <int K>
struct Rolled {
    static constexpr int PER = K / 32;
    Channels<PER> x[2][3];

    template <bool ALIGNED>
    __device__ __forceinline__ void load(const Chain& p, const Tile<K>& at) {
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int i = 0; i < 3; ++i)
                x[part][i] = load_channels<PER, ALIGNED>(
                    input_row(p, at, i - 2, (part * p.heads + at.head) * K + lane_id() * PER));
    }

    // Every tile of the head reads the window, so the CTA that arrives last writes it. Behind the CTA's barrier what it
    // read has arrived, so counting needs no fence: what another CTA writes afterwards cannot come back from a read that
    // is over.
    __device__ __forceinline__ void store(const Chain& p, const Tile<K>& at) const {
        unsigned* count = p.arrivals + at.request * p.heads + at.head;
        int before = 0;
        if (lane_id() == 0) before = static_cast<int>(atomicAdd(count, 1u));
        if (shfl(before, 0) != at.tiles - 1) return;
        uint16_t* window = p.conv_pool + at.slot * 3 * at.channels + at.head * K + lane_id() * PER;
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int i = 0; i < 3; ++i) store_channels<PER>(window + i * at.channels + part * p.heads * K, x[part][i]);
        if (lane_id() == 0) *count = 0;
    }
};

// ---- kernel --------------------------------------------------------------------------------------------------------

template <int K, int MODE, bool ALIGNED>
__global__ void __launch_bounds__(384, 1) chain_kernel(Chain p) {
    constexpr int N = K / SHARERS, PER = K / 32;
    SGLING_DYNAMIC_SHARED(float, shared);
    Tile<K> at(p, shared);
    // Of n warps n / 8 (at least one) prepare v, the others the rest of the rows, one row each at a time.
    const int warps = static_cast<int>(blockDim.x) / WARP, row_warps = warps - max(1, warps / 8);
    const bool takes_rows = warp_id() < row_warps;
    const RowConstants<PER> constant(p, at.head, at.head * K + lane_id() * PER);
    const int v_channel = (2 * p.heads + at.head) * K + at.value_row(p) + lane_id() % p.value_rows;
    const float4 v_taps = reinterpret_cast<const float4*>(p.conv_weight)[v_channel];
    // Slots are gathered at the head of the step, the norm and the input projection wait in between: they are final.
    at.slot = p.slots[at.request];
    const int local = warp_id() * (WARP / SHARERS) + lane_id() / SHARERS;
    float* tile_state = p.state_pool + ((at.slot * p.heads + at.head) * K + at.value_row(p)) * K;
    prefetch(tile_state, p.value_rows * K * static_cast<int>(sizeof(float)));
    for (int i = static_cast<int>(threadIdx.x) / (K / 16); i < 6; i += static_cast<int>(blockDim.x) / (K / 16))
        prefetch32(input_row(p, at, i % 3 - 3, i / 3 * p.heads * K + at.head * K + threadIdx.x % (K / 16) * 16));
    pdl_wait();
    pdl_trigger();
    if (MODE == REPLAY) at.start = p.seq_lens[at.request];
    float state[N];
    const bool walks = local < p.value_rows;
    if (walks) load_part(state, tile_state + local * K);
    const bool rolls = MODE == DECODE && warp_id() == warps - 1;  // it takes no rows
    Rolled<K> rolled;
    if (takes_rows) {
        for (int j = warp_id(); j < p.width; j += row_warps) prepare_row<K, MODE, ALIGNED>(p, at, constant, j);
    } else {
        if (rolls) rolled.template load<ALIGNED>(p, at);
        const int pairs = p.width * p.value_rows, step = (warps - row_warps) * WARP;
        for (int i = static_cast<int>(threadIdx.x) - row_warps * WARP; i < pairs; i += step)
            prepare_value<K, MODE>(p, at, v_taps, i / p.value_rows, i % p.value_rows);
    }
    __syncthreads();
    if (walks) {
        walk<K, MODE>(p, at, state, local);
        if (MODE == DECODE) store_part(tile_state + local * K, state);
    }
    if (rolls) rolled.store(p, at);
}

template <int K, bool ALIGNED>
static int launch_chain(const Chain& p, int mode, dim3 grid, int threads, int pdl, void* stream) {
    const size_t shared = sizeof(float) * p.width * (4 * K + p.value_rows + 2);
    if (mode == DECODE) return SGLING_LAUNCH((chain_kernel<K, DECODE, ALIGNED>), grid, threads, shared, stream, pdl, p);
    if (mode == STAGED) return SGLING_LAUNCH((chain_kernel<K, STAGED, ALIGNED>), grid, threads, shared, stream, pdl, p);
    return SGLING_LAUNCH((chain_kernel<K, REPLAY, ALIGNED>), grid, threads, shared, stream, pdl, p);
}

template <int K>
static int launch_chain(const Chain& p, int mode, dim3 grid, int threads, int aligned, int pdl, void* stream) {
    return aligned ? launch_chain<K, true>(p, mode, grid, threads, pdl, stream)
                   : launch_chain<K, false>(p, mode, grid, threads, pdl, stream);
}

// value_rows in {4, 8, 16, 32} and <= 4 warps; warps in 2 .. 12; head_dim in {32, 64, 128}.
extern "C" int kda_chain(void* out, const void* qkv, const void* f, const void* b, long long qkv_stride,
                         long long f_stride, long long b_stride, const float* conv_weight, const float* a_log,
                         const float* dt_bias, void* conv_pool, float* state_pool, const long long* slots,
                         const long long* seq_lens, void* store_x, void* store_k, void* store_v, float* store_g,
                         float* store_beta, void* arrivals, long long depth, int heads, int head_dim, int requests,
                         int width, int mode, int value_rows, int warps, int aligned, float lower_bound, float scale,
                         int pdl, void* stream) {
    auto bits = [](const void* at) { return static_cast<uint16_t*>(const_cast<void*>(at)); };
    const Chain p{bits(out), bits(qkv), bits(f), bits(b), qkv_stride, f_stride, b_stride, conv_weight, a_log, dt_bias,
                  bits(conv_pool), state_pool, slots, seq_lens, bits(store_x), bits(store_k), bits(store_v), store_g,
                  store_beta, static_cast<unsigned*>(arrivals), depth, heads, width, value_rows, lower_bound, scale};
    const dim3 grid(head_dim / value_rows, heads, requests);
    if (head_dim == 32) return launch_chain<32>(p, mode, grid, warps * WARP, aligned, pdl, stream);
    if (head_dim == 64) return launch_chain<64>(p, mode, grid, warps * WARP, aligned, pdl, stream);
    return launch_chain<128>(p, mode, grid, warps * WARP, aligned, pdl, stream);
}
