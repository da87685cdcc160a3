// Behind split.cu: the splits of a row combined, its latents projected to values, the head gate (see reference.py).
//
// One CTA per head and row. Splits are summed by four groups of threads, group g over splits g, g + 4, ..; the
// projection by 32 slices of the latent. Both orders are constants, and a split that does not exist adds nothing.
// Lengths and gate were written before split.cu's node waited, two hops ago: they are read before the wait, past L1.
#include "sgling.cuh"

namespace {

constexpr int SPLIT = 128, THREADS = 512, WARPS = THREADS / WARP, GROUPS = 4, MAX_PROGRAMS = 128, AT_ONCE = 8;

struct Finish {
    const float *part_out, *part_ml;
    const int64_t *rows, *seq_lens;
    const uint16_t *w_vc, *gate;
    long long stride_gate;
    uint16_t* out;
    int width, heads, programs;
};

template <int LATENT, int V>
struct Memory {
    float weight[MAX_PROGRAMS], peak[4], mass[4], part[GROUPS][LATENT], latent[LATENT], value[WARPS][V];
};

// Weight of every split of the row into shared memory, 0 for those that do not exist; returns the row's mass.
template <int LATENT, int V>
__device__ __forceinline__ float weigh(const Finish& p, Memory<LATENT, V>& shared, const float* ml, int rows, int used) {
    float peak = -CUDART_INF_F, mass = 0.0f;
    const int split = static_cast<int>(threadIdx.x);
    if (split < used) {
        const float2 pair = *reinterpret_cast<const float2*>(ml + static_cast<size_t>(split) * rows * 2);
        peak = pair.x;
        mass = pair.y;
    }
    const float highest = warp_max(peak);
    if (split < MAX_PROGRAMS && lane_id() == 0) shared.peak[warp_id()] = highest;
    __syncthreads();
    const float anchor = fmaxf(fmaxf(shared.peak[0], shared.peak[1]), fmaxf(shared.peak[2], shared.peak[3]));
    const float weight = split < used ? exp2f(__fsub_rn(peak, anchor)) : 0.0f;
    const float part = warp_sum(__fmul_rn(mass, weight));
    if (split < MAX_PROGRAMS) {
        shared.weight[split] = weight;
        if (lane_id() == 0) shared.mass[warp_id()] = part;
    }
    __syncthreads();
    return __fadd_rn(__fadd_rn(shared.mass[0], shared.mass[1]), __fadd_rn(shared.mass[2], shared.mass[3]));
}

__device__ __forceinline__ float4 load_floats(const float* from, bool valid) {
    const uint4 bits = valid ? load16(from) : make_uint4(0, 0, 0, 0);
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w));
}

template <int LATENT, int V>
__global__ void __launch_bounds__(THREADS, 1) finish_kernel(Finish p) {
    static_assert(LATENT * GROUPS == 4 * THREADS && V / 8 * 2 == WARP, "a thread sums four columns, a warp two slices");
    constexpr int SLICES = THREADS / (V / 8), DEPTH = LATENT / SLICES;
    __shared__ Memory<LATENT, V> shared;
    const int head = static_cast<int>(blockIdx.x), n = static_cast<int>(blockIdx.y), thread = threadIdx.x;
    const int slice = thread / (V / 8), column = thread % (V / 8) * 8;
    const int request = n / p.width, rows = p.width * p.heads, r = n % p.width * p.heads + head;
    const int64_t row = __ldcg(p.rows + request), length = __ldcg(p.seq_lens + request);
    const uint16_t logit = __ldcg(p.gate + n * p.stride_gate + head);
    uint4 w[DEPTH];
    const uint16_t* weights = p.w_vc + (static_cast<size_t>(head) * LATENT + slice * DEPTH) * V + column;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) w[i] = load_stream16(weights + static_cast<size_t>(i) * V);
    const int total = (row > 0 ? static_cast<int>(length) : 0) + p.width;
    const int used = min(p.programs, (total + SPLIT - 1) / SPLIT);
    pdl_wait();
    pdl_trigger();
    const size_t first = static_cast<size_t>(request) * p.programs * rows + r;
    const int group = thread / (LATENT / 4), at = thread % (LATENT / 4) * 4;
    const float* part = p.part_out + first * LATENT + at;
    float4 value[AT_ONCE], sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {  // in flight while the weights are worked out
        const int split = group + i * GROUPS;
        value[i] = load_floats(part + static_cast<size_t>(split) * rows * LATENT, split < used);
    }
    const float mass = weigh<LATENT, V>(p, shared, p.part_ml + first * 2, rows, used);
    for (int base = 0; base < used; base += AT_ONCE * GROUPS) {
        if (base > 0) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int split = base + group + i * GROUPS;
                value[i] = load_floats(part + static_cast<size_t>(split) * rows * LATENT, split < used);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int split = base + group + i * GROUPS;
            const float weight = split < used ? shared.weight[split] : 0.0f;
            sum.x = fmaf(weight, value[i].x, sum.x);
            sum.y = fmaf(weight, value[i].y, sum.y);
            sum.z = fmaf(weight, value[i].z, sum.z);
            sum.w = fmaf(weight, value[i].w, sum.w);
        }
    }
    *reinterpret_cast<float4*>(&shared.part[group][at]) = sum;
    __syncthreads();
    for (int c = thread; c < LATENT; c += THREADS) {
        const float low = __fadd_rn(shared.part[0][c], shared.part[1][c]);
        const float high = __fadd_rn(shared.part[2][c], shared.part[3][c]);
        shared.latent[c] = to_float(to_bf16(__fdiv_rn(__fadd_rn(low, high), mass)));
    }
    __syncthreads();
    float o[8] = {};
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
    for (int e = 0; e < 8; ++e) {
        o[e] = __fadd_rn(o[e], shfl_xor(o[e], V / 8));
        if (lane_id() < V / 8) shared.value[warp_id()][column + e] = o[e];
    }
    __syncthreads();
    if (thread >= V) return;
    float value_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) value_sum = __fadd_rn(value_sum, shared.value[i][thread]);
    const float gate = to_float(to_bf16(__fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-to_float(logit))))));
    p.out[(static_cast<size_t>(n) * p.heads + head) * V + thread] =
        to_bf16(__fmul_rn(to_float(to_bf16(value_sum)), gate));
}

}  // namespace

// part_out fp32 [bs, programs, width * heads, latent], part_ml fp32 [.., 2]; w_vc [heads, latent, v], gate logits
// [bs * width, heads] with strided rows -> out [bs * width, heads * v]. Shapes: latent 512, v 128.
extern "C" int mla_finish(const void* part_out, const void* part_ml, const void* rows, const void* seq_lens,
                          const void* w_vc, const void* gate, long long stride_gate, void* out, long long batch,
                          long long width, long long heads, long long programs, int pdl, void* stream) {
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
    const dim3 grid(static_cast<unsigned>(heads), static_cast<unsigned>(batch * width));
    return SGLING_LAUNCH((finish_kernel<512, 128>), grid, dim3(THREADS), 0, stream, pdl, p);
}
