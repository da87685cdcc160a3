// KDA commit: makes the working state that of the accepted prefix, all layers in one node.
//
// Replay folds the accepted rows of the ring into the state with the arithmetic of chain.cu; staged copies the snapshot
// behind the last accepted row. A request that accepted nothing keeps its slot.
#include "chain.cuh"

struct Fold {
    uint16_t* conv_pool;             // [layers, slots, 3, 3 heads K]
    float* state_pool;               // [layers, slots, heads, K, K]
    const uint16_t *x, *k, *v;       // ring [layers, slots, depth, ...]
    const float *g, *beta;
    const long long *slots, *seq_lens, *accept_lens;
    long long num_slots, depth;
    int heads, requests, width, value_rows;
};

constexpr int HELD_ROWS = 2;  // value rows of a lane: what it reads of a row in shared memory serves both

// This thread's channel of the conv window behind `accept` rows: the CTAs of a head share its 3 K channels.
template <int K>
struct Window {
    uint16_t* at;  // oldest entry, or null
    long long channels;
    uint16_t row[3];

    __device__ __forceinline__ void load(const Fold& p, long long base, long long start, int accept) {
        const int share = 3 * K / static_cast<int>(gridDim.x), thread = static_cast<int>(threadIdx.x);
        at = nullptr;
        if (thread >= share) return;
        const int head = static_cast<int>(blockIdx.y), mine = static_cast<int>(blockIdx.x) * share + thread;
        channels = 3LL * p.heads * K;
        const long long c = (static_cast<long long>(mine / K) * p.heads + head) * K + mine % K;
        at = p.conv_pool + base * 3 * channels + c;
#pragma unroll
        for (int j = 0; j < 3; ++j) {
            const int from = accept + j;  // index into the stored window followed by the accepted rows
            const long long entry = base * p.depth + ((start + from - 3) & (p.depth - 1));
            row[j] = from < 3 ? at[from * channels] : p.x[entry * channels + c];
        }
    }

    __device__ __forceinline__ void store() const {
        if (at == nullptr) return;
#pragma unroll
        for (int j = 0; j < 3; ++j) at[j * channels] = row[j];
    }
};

// Accepted rows of the ring as they enter the recurrence, in shared memory.
template <int K>
struct AcceptedRows {
    float *key, *decay, *value, *beta;

    __device__ __forceinline__ AcceptedRows(const Fold& p, float* shared)
        : key(shared), decay(key + p.width * K), value(decay + p.width * K), beta(value + p.width * p.value_rows) {}

    __device__ __forceinline__ void load(const Fold& p, long long base, long long start, int accept) const {
        constexpr int PER = K / 32;
        const int head = static_cast<int>(blockIdx.y), first_value = static_cast<int>(blockIdx.x) * p.value_rows;
        for (int row = warp_id(); row < accept; row += static_cast<int>(blockDim.x) / WARP) {
            const long long entry = base * p.depth + ((start + row) & (p.depth - 1));
            const long long mine = entry * (p.heads * K) + head * K + lane_id() * PER;
            const Channels<PER> rounded = load_channels<PER, true>(p.k + mine);
            const Values<PER> g = *reinterpret_cast<const Values<PER>*>(p.g + mine);
            float k[PER];
#pragma unroll
            for (int i = 0; i < PER; ++i) k[i] = rounded[i];
            const uint16_t* v = p.v + entry * (p.heads * K) + head * K + first_value;
            if (lane_id() < p.value_rows) value[row * p.value_rows + lane_id()] = to_float(v[lane_id()]);
            if (lane_id() == 0) beta[row] = p.beta[entry * p.heads + head];
            const float norm = inverse_norm(warp_sum(partial_dot(k, k)));
#pragma unroll
            for (int i = 0; i < PER; ++i) {
                const int at = row * K + lane_id() * PER + i;
                key[at] = __fmul_rn(k[i], norm), decay[at] = expf(g.at[i]);
            }
        }
    }
};

template <int K>
__global__ void __launch_bounds__(128) fold_kernel(Fold p) {
    constexpr int N = K / SHARERS;
    SGLING_DYNAMIC_SHARED(float, shared);
    const int head = static_cast<int>(blockIdx.y), request = static_cast<int>(blockIdx.z) % p.requests;
    const long long layer = static_cast<int>(blockIdx.z) / p.requests;
    // Slots are gathered at the head of the step, many waiting nodes ago: they are final.
    const long long base = layer * p.num_slots + p.slots[request];
    const int local = static_cast<int>(threadIdx.x) / SHARERS, apart = p.value_rows / HELD_ROWS;
    float* tile_state =
        p.state_pool + ((base * p.heads + head) * K + static_cast<int>(blockIdx.x) * p.value_rows) * K;
    prefetch(tile_state, p.value_rows * K * static_cast<int>(sizeof(float)));
    pdl_wait();
    pdl_trigger();
    float state[HELD_ROWS][N];
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i) load_part(state[i], tile_state + (local + i * apart) * K);
    const int accept = min(static_cast<int>(p.accept_lens[request]), p.width);
    const long long start = p.seq_lens[request];
    if (accept <= 0) return;
    Window<K> window;
    window.load(p, base, start, accept);
    const AcceptedRows<K> rows(p, shared);
    rows.load(p, base, start, accept);
    __syncthreads();
    for (int row = 0; row < accept; ++row) {
        float key[N], decay[N], decayed_key[N];
        load_part(key, rows.key + row * K);
        load_part(decay, rows.decay + row * K);
#pragma unroll
        for (int i = 0; i < N; ++i) decayed_key[i] = __fmul_rn(decay[i], key[i]);
#pragma unroll
        for (int i = 0; i < HELD_ROWS; ++i) {
            const float predicted = sum_of_sharers(part_of_dot(state[i], decayed_key));
            decay_state(state[i], decay);
            const float value = rows.value[row * p.value_rows + local + i * apart];
            add_update(state[i], update_of(rows.beta[row], value, predicted), key);
        }
    }
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i) store_part(tile_state + (local + i * apart) * K, state[i]);
    window.store();
}

template <int K>
static int launch_fold(const Fold& p, long long layers, int pdl, void* stream) {
    const size_t shared = sizeof(float) * p.width * (2 * K + p.value_rows + 1);
    const dim3 grid(K / p.value_rows, p.heads, static_cast<unsigned>(layers * p.requests));
    return SGLING_LAUNCH(fold_kernel<K>, grid, p.value_rows / HELD_ROWS * SHARERS, shared, stream, pdl, p);
}

// value_rows in {8, 16, 32}; head_dim in {32, 64, 128}; width >= every accept length.
extern "C" int kda_fold(void* conv_pool, float* state_pool, const void* x, const void* k, const void* v, const float* g,
                        const float* beta, const long long* slots, const long long* seq_lens,
                        const long long* accept_lens, long long layers, long long num_slots, long long depth, int heads,
                        int head_dim, int requests, int width, int value_rows, int pdl, void* stream) {
    auto bits = [](const void* at) { return static_cast<const uint16_t*>(at); };
    const Fold p{static_cast<uint16_t*>(conv_pool), state_pool, bits(x), bits(k), bits(v), g, beta, slots, seq_lens,
                 accept_lens, num_slots, depth, heads, requests, width, value_rows};
    if (head_dim == 32) return launch_fold<32>(p, layers, pdl, stream);
    if (head_dim == 64) return launch_fold<64>(p, layers, pdl, stream);
    return launch_fold<128>(p, layers, pdl, stream);
}

// ---- staged --------------------------------------------------------------------------------------------------------

constexpr int COPY_THREADS = 256, COPY_LOADS = 4;

struct Snapshot {
    uint4 *conv_pool, *state_pool;             // [layers, slots, units]
    const uint4 *conv_stage, *state_stage;     // [layers, slots, depth, units]
    const long long *slots, *accept_lens;
    long long num_slots, depth, conv_units, state_units;
    int requests;
};

__global__ void __launch_bounds__(COPY_THREADS) snapshot_kernel(Snapshot p) {
    const int request = static_cast<int>(blockIdx.y) % p.requests;
    const long long layer = static_cast<int>(blockIdx.y) / p.requests;
    pdl_wait();
    pdl_trigger();
    const long long accept = p.accept_lens[request];
    if (accept <= 0) return;
    const long long slot = layer * p.num_slots + p.slots[request], source = slot * p.depth + accept - 1;
    uint4 value[COPY_LOADS];
    const long long first = static_cast<long long>(blockIdx.x) * COPY_THREADS * COPY_LOADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < COPY_LOADS; ++i) {
        const long long unit = first + i * COPY_THREADS, conv = unit - p.state_units;
        if (conv < 0) value[i] = p.state_stage[source * p.state_units + unit];
        else if (conv < p.conv_units) value[i] = p.conv_stage[source * p.conv_units + conv];
    }
#pragma unroll
    for (int i = 0; i < COPY_LOADS; ++i) {
        const long long unit = first + i * COPY_THREADS, conv = unit - p.state_units;
        if (conv < 0) p.state_pool[slot * p.state_units + unit] = value[i];
        else if (conv < p.conv_units) p.conv_pool[slot * p.conv_units + conv] = value[i];
    }
}

// Units are 16 bytes: what one layer keeps of one slot, conv window and state. Any element type.
extern "C" int kda_snapshot(void* conv_pool, void* state_pool, const void* conv_stage, const void* state_stage,
                            const long long* slots, const long long* accept_lens, long long layers, long long num_slots,
                            long long depth, long long conv_units, long long state_units, int requests, int pdl,
                            void* stream) {
    const Snapshot p{static_cast<uint4*>(conv_pool), static_cast<uint4*>(state_pool),
                     static_cast<const uint4*>(conv_stage), static_cast<const uint4*>(state_stage), slots, accept_lens,
                     num_slots, depth, conv_units, state_units, requests};
    const long long blocks = ceil_div(conv_units + state_units, COPY_THREADS * COPY_LOADS);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(layers * requests));
    return SGLING_LAUNCH(snapshot_kernel, grid, COPY_THREADS, 0, stream, pdl, p);
}
