// Behind split.cu: the splits of a row combined, its latents projected to values, the head gate (see reference.py).
//
// A head of ROWS rows belongs to PARTS CTAs, a part of the latent each: four in a cluster, or one. The parts' values meet
// in the last CTA. Rows share the projection's weights and nothing else. Splits are summed by four groups of threads,
// group g over splits g, g + 4, ..; the projection by 32 slices of the latent, two of them at a time. Both orders are
// constants (no bit depends on PARTS or ROWS), and a split that does not exist adds nothing.
// Lengths and gate were written before split.cu's node waited, two hops ago: they are read before the wait, past L1.
#include "cluster.cuh"

namespace {

constexpr int SPLIT = 128, LATENT = 512, V = 128, GROUPS = 4, MAX_PROGRAMS = 128;
constexpr int DEPTH = 16, PAIRS = LATENT / (2 * DEPTH);  // latents of a slice of the projection; pairs of slices
constexpr int LOAD = 4, COLUMNS = 4;                     // latents of one load, values of a thread

struct Finish {
    const float *part_out, *part_ml;
    const int64_t *rows, *seq_lens;
    const uint16_t *w_vc, *gate;
    long long stride_gate;
    uint16_t* out;
    int width, heads, programs, rows_total;  // rows_total: of all requests
};

template <int PARTS, int ROWS>
struct Shape {
    static constexpr int OWN = LATENT / PARTS, ROW_THREADS = OWN / LOAD * GROUPS;
    static constexpr int OWN_PAIRS = PAIRS / PARTS, HALVES = V / (COLUMNS * WARP / 2), TASKS = OWN_PAIRS * HALVES;
    static constexpr int PROJECTING = TASKS < 16 ? TASKS : 16;  // warps
    static constexpr int TURNS = TASKS / PROJECTING;
    static constexpr int THREADS = ROWS * ROW_THREADS > PROJECTING * WARP ? ROWS * ROW_THREADS : PROJECTING * WARP;
    static constexpr int RING = PARTS == 1 ? 8 : ROWS == 2 ? 18 : 12;  // copies of a thread on their way
    static_assert(ROW_THREADS == OWN && OWN >= MAX_PROGRAMS && TASKS % PROJECTING == 0 && ROWS * V <= THREADS);
};

// What a CTA keeps of one row.
template <int PARTS, int ROWS>
struct RowMemory {
    uint4 ring[Shape<PARTS, ROWS>::RING][Shape<PARTS, ROWS>::ROW_THREADS];
    float part[GROUPS][Shape<PARTS, ROWS>::OWN], latent[Shape<PARTS, ROWS>::OWN];
    float weight[MAX_PROGRAMS], peak[4], mass[4];
};

// Weight of every split of the row into shared memory, 0 for those that do not exist; returns the row's mass. `thread` is
// the number within the row's threads; the whole CTA calls this, with inactive threads beyond the last row.
template <class Memory>
__device__ __forceinline__ float weigh(Memory& row, float2 peak_and_mass, int thread, int used, bool active) {
    const int split = thread, warp = thread / WARP;
    const bool weighs = active && split < MAX_PROGRAMS;
    const float highest = warp_max(peak_and_mass.x);
    if (weighs && lane_id() == 0) row.peak[warp] = highest;
    __syncthreads();
    const float anchor = fmaxf(fmaxf(row.peak[0], row.peak[1]), fmaxf(row.peak[2], row.peak[3]));
    const float weight = split < used ? exp2f(__fsub_rn(peak_and_mass.x, anchor)) : 0.0f;
    const float part = warp_sum(__fmul_rn(peak_and_mass.y, weight));
    if (weighs) {
        row.weight[split] = weight;
        if (lane_id() == 0) row.mass[warp] = part;
    }
    __syncthreads();
    return __fadd_rn(__fadd_rn(row.mass[0], row.mass[1]), __fadd_rn(row.mass[2], row.mass[3]));
}

// This thread's four latents of the splits of its group; every thread reads back what it copied itself.
template <int RING, int THREADS>
struct Splits {
    uint4* ring;        // of this thread, THREADS apart
    const float* next;  // this thread's latents of the split to be copied next
    size_t step;        // floats between two splits of the group
    int split, used;    // number of that split

    __device__ __forceinline__ void request(int place) {
        if (split < used) cp_async16(ring + place * THREADS, next);
        cp_async_commit();
        next += step, split += GROUPS;
    }

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int i = 0; i < RING; ++i) request(i);
    }

    // `weights` of the group's splits, GROUPS apart.
    __device__ __forceinline__ float4 sum(const float* weights, int count) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int i = 0, place = 0; i < count; ++i) {
            cp_async_wait<RING - 1>();
            const float4 value = *reinterpret_cast<const float4*>(ring + place * THREADS);
            const float weight = weights[i * GROUPS];
            sum.x = fmaf(weight, value.x, sum.x);
            sum.y = fmaf(weight, value.y, sum.y);
            sum.z = fmaf(weight, value.z, sum.z);
            sum.w = fmaf(weight, value.w, sum.w);
            request(place);
            place = place + 1 < RING ? place + 1 : 0;
        }
        return sum;
    }
};

// Values of one row from a pair of slices, this warp's half of the columns; lanes 0 .. 15 have the sums of both slices.
__device__ __forceinline__ float4 project(const float* latents, const uint2 (&w)[DEPTH]) {
    float o[COLUMNS] = {};
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        const float latent = latents[i];
        o[0] = fmaf(latent, bf16_lo(w[i].x), o[0]);
        o[1] = fmaf(latent, bf16_hi(w[i].x), o[1]);
        o[2] = fmaf(latent, bf16_lo(w[i].y), o[2]);
        o[3] = fmaf(latent, bf16_hi(w[i].y), o[3]);
    }
#pragma unroll
    for (int e = 0; e < COLUMNS; ++e) o[e] = __fadd_rn(o[e], shfl_xor(o[e], WARP / 2));
    return make_float4(o[0], o[1], o[2], o[3]);
}

template <int PARTS, int ROWS>
__global__ void __launch_bounds__(Shape<PARTS, ROWS>::THREADS) finish_kernel(Finish p) {
    using S = Shape<PARTS, ROWS>;
    using Memory = RowMemory<PARTS, ROWS>;
    SGLING_DYNAMIC_SHARED(Memory, memory);
    __shared__ __align__(16) float value[ROWS][PAIRS][V];  // of all parts, in the last CTA
    if (PARTS > 1) cluster_arrive();
    const int head = static_cast<int>(blockIdx.x) / PARTS, part = static_cast<int>(blockIdx.x) % PARTS;
    const int first_row = static_cast<int>(blockIdx.y) * ROWS, thread = static_cast<int>(threadIdx.x);
    // Sums: threads of one row. Threads beyond the last row repeat it without a trace.
    const int own_row = thread / S::ROW_THREADS, own = thread % S::ROW_THREADS;
    const bool active = own_row < ROWS && first_row + own_row < p.rows_total;
    const int n = min(first_row + own_row, p.rows_total - 1);
    const int request = n / p.width, rows = p.width * p.heads, r = n % p.width * p.heads + head;
    const int64_t slot = __ldcg(p.rows + request), length = __ldcg(p.seq_lens + request);
    // Projection: a warp has half of the columns of a pair of slices, half a warp each slice.
    const int slice = lane_id() / (WARP / 2) * DEPTH, column = lane_id() % (WARP / 2) * COLUMNS;
    uint2 w[S::TURNS][DEPTH];
    if (warp_id() < S::PROJECTING) {
#pragma unroll
        for (int turn = 0; turn < S::TURNS; ++turn) {
            const int task = warp_id() + turn * S::PROJECTING, c = task % S::HALVES * (V / S::HALVES) + column;
            const int latent = part * S::OWN + task / S::HALVES * 2 * DEPTH + slice;
            const uint16_t* from = p.w_vc + (static_cast<size_t>(head) * LATENT + latent) * V + c;
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) w[turn][i] = *reinterpret_cast<const uint2*>(from + i * V);
        }
    }
    // Result: one value of one row.
    const int out_row = first_row + thread / V;
    const bool stores = part == PARTS - 1 && thread < ROWS * V && out_row < p.rows_total;
    const uint16_t logit = stores ? __ldcg(p.gate + out_row * p.stride_gate + head) : 0;
    const int total = (slot > 0 ? static_cast<int>(length) : 0) + p.width;
    const int used = active ? min(p.programs, (total + SPLIT - 1) / SPLIT) : 0;
    const size_t first = static_cast<size_t>(request) * p.programs * rows + r;
    const int group = own / (S::OWN / LOAD), at = own % (S::OWN / LOAD) * LOAD;
    Memory& row = memory[min(own_row, ROWS - 1)];
    const size_t stride = static_cast<size_t>(rows) * LATENT;  // of splits
    const float* from = p.part_out + first * LATENT + group * stride + part * S::OWN + at;
    Splits<S::RING, S::ROW_THREADS> splits{&row.ring[0][own], from, GROUPS * stride, group, used};
    pdl_wait();
    pdl_trigger();
    float2 peak_and_mass = make_float2(-CUDART_INF_F, 0.0f);
    if (own < used)
        peak_and_mass = *reinterpret_cast<const float2*>(p.part_ml + (first + static_cast<size_t>(own) * rows) * 2);
    splits.start();
    const float mass = weigh(row, peak_and_mass, own, used, own_row < ROWS);
    const float4 sum = splits.sum(row.weight + group, used > group ? (used - group + GROUPS - 1) / GROUPS : 0);
    if (own_row < ROWS) *reinterpret_cast<float4*>(&row.part[group][at]) = sum;
    __syncthreads();
    if (own_row < ROWS) {
        const float low = __fadd_rn(row.part[0][own], row.part[1][own]);
        const float high = __fadd_rn(row.part[2][own], row.part[3][own]);
        row.latent[own] = to_float(to_bf16(__fdiv_rn(__fadd_rn(low, high), mass)));
    }
    __syncthreads();
    if (PARTS > 1) cluster_wait();
    if (warp_id() < S::PROJECTING) {
#pragma unroll
        for (int turn = 0; turn < S::TURNS; ++turn) {
            const int task = warp_id() + turn * S::PROJECTING, pair = task / S::HALVES;
            float* to = &value[0][part * S::OWN_PAIRS + pair][task % S::HALVES * (V / S::HALVES) + column];
            if (PARTS > 1) to = cluster_at(to, PARTS - 1);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const float4 four = project(memory[i].latent + pair * 2 * DEPTH + slice, w[turn]);
                if (slice == 0) *reinterpret_cast<float4*>(to + i * PAIRS * V) = four;
            }
        }
    }
    __syncwarp();
    if (PARTS > 1) cluster_arrive();
    if (part != PARTS - 1) return;
    if (PARTS > 1) cluster_wait();
    __syncthreads();
    if (!stores) return;
    float latents = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) latents = __fadd_rn(latents, value[thread / V][i][thread % V]);
    const float gate = to_float(to_bf16(__fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-to_float(logit))))));
    p.out[(static_cast<size_t>(out_row) * p.heads + head) * V + thread % V] =
        to_bf16(__fmul_rn(to_float(to_bf16(latents)), gate));
}

template <int PARTS, int ROWS>
int launch_finish(const Finish& p, int pdl, void* stream) {
    const dim3 grid(static_cast<unsigned>(PARTS * p.heads), static_cast<unsigned>(ceil_div(p.rows_total, ROWS)));
    return sgling_launch_cluster_shared(finish_kernel<PARTS, ROWS>, PARTS, grid, Shape<PARTS, ROWS>::THREADS,
                                        sizeof(RowMemory<PARTS, ROWS>) * ROWS, stream, pdl, p);
}

}  // namespace

// part_out fp32 [bs, programs, width * heads, latent], part_ml fp32 [.., 2]; w_vc [heads, latent, v], gate logits
// [bs * width, heads] with strided rows -> out [bs * width, heads * v]. Shapes: latent 512, v 128. parts: 1, or 4
// (clusters), of which each takes `together` rows: 2 or 3.
extern "C" int mla_finish(const void* part_out, const void* part_ml, const void* rows, const void* seq_lens,
                          const void* w_vc, const void* gate, long long stride_gate, void* out, long long batch,
                          long long width, long long heads, long long programs, int parts, int together, int pdl,
                          void* stream) {
    Finish p{};
    p.part_out = static_cast<const float*>(part_out);
    p.part_ml = static_cast<const float*>(part_ml);
    p.rows = static_cast<const int64_t*>(rows);
    p.seq_lens = static_cast<const int64_t*>(seq_lens);
    p.w_vc = static_cast<const uint16_t*>(w_vc);
    p.gate = static_cast<const uint16_t*>(gate);
    p.stride_gate = stride_gate;
    p.out = static_cast<uint16_t*>(out);
    p.width = static_cast<int>(width);
    p.heads = static_cast<int>(heads);
    p.programs = static_cast<int>(programs);
    p.rows_total = static_cast<int>(batch * width);
    if (parts == 1) return launch_finish<1, 1>(p, pdl, stream);
    return together == 2 ? launch_finish<4, 2>(p, pdl, stream) : launch_finish<4, 3>(p, pdl, stream);
}
