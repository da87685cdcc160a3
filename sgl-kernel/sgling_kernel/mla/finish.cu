// Behind split.cu: the splits of a row combined, its latents projected to values, the head gate (see reference.py).
//
// Each head of a row belongs to PARTS CTAs, a part of the latent each: four in a cluster, or one. The parts' values meet
// in the last CTA. Splits are summed by four groups of threads, group g over splits g, g + 4, ..; the projection by 32
// slices of the latent. Both orders are constants (no bit depends on PARTS), and a split that does not exist adds nothing.
// Lengths and gate were written before split.cu's node waited, two hops ago: they are read before the wait, past L1.
#include "cluster.cuh"

namespace {

constexpr int SPLIT = 128, LATENT = 512, V = 128, GROUPS = 4, MAX_PROGRAMS = 128;
constexpr int SLICES = 32, DEPTH = LATENT / SLICES;  // of the projection: latents of a slice
constexpr int LOAD = 4, COLUMNS = 8;                 // latents of one load, values of a thread

struct Finish {
    const float *part_out, *part_ml;
    const int64_t *rows, *seq_lens;
    const uint16_t *w_vc, *gate;
    long long stride_gate;
    uint16_t* out;
    int width, heads, programs;
};

template <int PARTS>
struct Shape {
    static constexpr int OWN = LATENT / PARTS, THREADS = OWN, WARPS = THREADS / WARP;
    static constexpr int CHUNK = PARTS > 1 ? 72 : 8;  // splits on their way at once
    static_assert(OWN / LOAD * GROUPS == THREADS && OWN / DEPTH * (V / COLUMNS) == THREADS && V / COLUMNS * 2 == WARP);
};

template <int PARTS>
struct Memory {
    float weight[MAX_PROGRAMS], peak[4], mass[4];
    float part[GROUPS][Shape<PARTS>::OWN], latent[Shape<PARTS>::OWN];
    float value[SLICES / 2][V];  // of all parts, in the last CTA
    uint4 split[Shape<PARTS>::CHUNK / GROUPS][Shape<PARTS>::THREADS];
};

// Weight of every split of the row into shared memory, 0 for those that do not exist; returns the row's mass.
template <int PARTS>
__device__ __forceinline__ float weigh(Memory<PARTS>& shared, float2 peak_and_mass, int used) {
    const int split = static_cast<int>(threadIdx.x);
    const float highest = warp_max(peak_and_mass.x);
    if (split < MAX_PROGRAMS && lane_id() == 0) shared.peak[warp_id()] = highest;
    __syncthreads();
    const float anchor = fmaxf(fmaxf(shared.peak[0], shared.peak[1]), fmaxf(shared.peak[2], shared.peak[3]));
    const float weight = split < used ? exp2f(__fsub_rn(peak_and_mass.x, anchor)) : 0.0f;
    const float part = warp_sum(__fmul_rn(peak_and_mass.y, weight));
    if (split < MAX_PROGRAMS) {
        shared.weight[split] = weight;
        if (lane_id() == 0) shared.mass[warp_id()] = part;
    }
    __syncthreads();
    return __fadd_rn(__fadd_rn(shared.mass[0], shared.mass[1]), __fadd_rn(shared.mass[2], shared.mass[3]));
}

// This thread's four latents of the splits of its group; every thread reads back what it copied itself.
template <int PARTS>
struct Splits {
    Memory<PARTS>& shared;
    const float* from;  // of this thread's latents, split 0
    size_t stride;      // floats between two splits
    int group, used;

    __device__ __forceinline__ void request(int base) const {
        for (int i = 0; i < Shape<PARTS>::CHUNK / GROUPS && base + i * GROUPS + group < used; ++i)
            cp_async16(&shared.split[i][threadIdx.x], from + (base + i * GROUPS + group) * stride);
        cp_async_commit();
    }

    __device__ __forceinline__ void add(float4& sum, int base) const {
        cp_async_wait<0>();
        for (int i = 0; i < Shape<PARTS>::CHUNK / GROUPS && base + i * GROUPS + group < used; ++i) {
            const float4 value = *reinterpret_cast<const float4*>(&shared.split[i][threadIdx.x]);
            const float weight = shared.weight[base + i * GROUPS + group];
            sum.x = fmaf(weight, value.x, sum.x);
            sum.y = fmaf(weight, value.y, sum.y);
            sum.z = fmaf(weight, value.z, sum.z);
            sum.w = fmaf(weight, value.w, sum.w);
        }
    }
};

// Values of this part's latents, two slices a warp, into the last CTA of the cluster.
template <int PARTS>
__device__ __forceinline__ void project(Memory<PARTS>& shared, const uint4 (&w)[DEPTH], int slice, int column, int part) {
    float o[COLUMNS] = {};
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        const float latent = shared.latent[slice * DEPTH + i];
        const uint32_t words[4] = {w[i].x, w[i].y, w[i].z, w[i].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            o[2 * e] = fmaf(latent, bf16_lo(words[e]), o[2 * e]);
            o[2 * e + 1] = fmaf(latent, bf16_hi(words[e]), o[2 * e + 1]);
        }
    }
#pragma unroll
    for (int e = 0; e < COLUMNS; ++e) o[e] = __fadd_rn(o[e], shfl_xor(o[e], V / COLUMNS));
    float* to = &shared.value[part * Shape<PARTS>::WARPS + warp_id()][column];
    if (PARTS > 1) cluster_wait();
    if (PARTS > 1) to = cluster_at(to, PARTS - 1);
    if (lane_id() < V / COLUMNS) {
        *reinterpret_cast<float4*>(to) = make_float4(o[0], o[1], o[2], o[3]);
        *reinterpret_cast<float4*>(to + 4) = make_float4(o[4], o[5], o[6], o[7]);
    }
    __syncwarp();
    if (PARTS > 1) cluster_arrive();
}

template <int PARTS>
__global__ void __launch_bounds__(Shape<PARTS>::THREADS, PARTS > 1 ? 4 : 1) finish_kernel(Finish p) {
    constexpr int OWN = Shape<PARTS>::OWN, CHUNK = Shape<PARTS>::CHUNK;
    __shared__ __align__(16) Memory<PARTS> shared;
    if (PARTS > 1) cluster_arrive();
    const int head = static_cast<int>(blockIdx.x) / PARTS, part = static_cast<int>(blockIdx.x) % PARTS;
    const int n = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
    const int slice = thread / (V / COLUMNS), column = thread % (V / COLUMNS) * COLUMNS;
    const int request = n / p.width, rows = p.width * p.heads, r = n % p.width * p.heads + head;
    const int64_t row = __ldcg(p.rows + request), length = __ldcg(p.seq_lens + request);
    const uint16_t logit = __ldcg(p.gate + n * p.stride_gate + head);
    uint4 w[DEPTH];
    const uint16_t* weights = p.w_vc + (static_cast<size_t>(head) * LATENT + part * OWN + slice * DEPTH) * V + column;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) w[i] = load_stream16(weights + static_cast<size_t>(i) * V);
    const int total = (row > 0 ? static_cast<int>(length) : 0) + p.width;
    const int used = min(p.programs, (total + SPLIT - 1) / SPLIT);
    const size_t first = static_cast<size_t>(request) * p.programs * rows + r;
    const int group = thread / (OWN / LOAD), at = thread % (OWN / LOAD) * LOAD;
    const Splits<PARTS> splits{shared, p.part_out + first * LATENT + part * OWN + at,
                               static_cast<size_t>(rows) * LATENT, group, used};
    pdl_wait();
    pdl_trigger();
    float2 peak_and_mass = make_float2(-CUDART_INF_F, 0.0f);
    if (thread < used)
        peak_and_mass = *reinterpret_cast<const float2*>(p.part_ml + (first + static_cast<size_t>(thread) * rows) * 2);
    splits.request(0);
    const float mass = weigh<PARTS>(shared, peak_and_mass, used);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    splits.add(sum, 0);
    for (int base = CHUNK; base < used; base += CHUNK) {
        splits.request(base);
        splits.add(sum, base);
    }
    *reinterpret_cast<float4*>(&shared.part[group][at]) = sum;
    __syncthreads();
    const float low = __fadd_rn(shared.part[0][thread], shared.part[1][thread]);
    const float high = __fadd_rn(shared.part[2][thread], shared.part[3][thread]);
    shared.latent[thread] = to_float(to_bf16(__fdiv_rn(__fadd_rn(low, high), mass)));
    __syncthreads();
    project<PARTS>(shared, w, slice, column, part);
    if (part != PARTS - 1) return;
    if (PARTS > 1) cluster_wait();
    __syncthreads();
    if (thread >= V) return;
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < SLICES / 2; ++i) value = __fadd_rn(value, shared.value[i][thread]);
    const float gate = to_float(to_bf16(__fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-to_float(logit))))));
    p.out[(static_cast<size_t>(n) * p.heads + head) * V + thread] =
        to_bf16(__fmul_rn(to_float(to_bf16(value)), gate));
}

}  // namespace

// part_out fp32 [bs, programs, width * heads, latent], part_ml fp32 [.., 2]; w_vc [heads, latent, v], gate logits
// [bs * width, heads] with strided rows -> out [bs * width, heads * v]. Shapes: latent 512, v 128. parts: 1, or 4 (clusters).
extern "C" int mla_finish(const void* part_out, const void* part_ml, const void* rows, const void* seq_lens,
                          const void* w_vc, const void* gate, long long stride_gate, void* out, long long batch,
                          long long width, long long heads, long long programs, int parts, int pdl, void* stream) {
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
    const unsigned rows_y = static_cast<unsigned>(batch * width);
    if (parts == 1)
        return SGLING_LAUNCH(finish_kernel<1>, dim3(static_cast<unsigned>(heads), rows_y), Shape<1>::THREADS, 0, stream,
                             pdl, p);
    return sgling_launch_cluster(finish_kernel<4>, 4, dim3(static_cast<unsigned>(4 * heads), rows_y), Shape<4>::THREADS,
                                 stream, pdl, p);
}
