// Arithmetic of KDA shared by decode, verify and commit (docs/ling3.md §3.1).
//
// Verify plus commit must leave the bits of decode, so every operation that decides a bit is spelled out (fmaf,
// __fmul_rn, __fadd_rn): the compiler may contract none of them in one kernel and not in another. A value row of the
// state belongs to eight lanes; a head's K channels of one row belong to one warp, K / 32 neighbours per lane.
#pragma once

#include "sgling.cuh"

constexpr float L2_EPS = 1e-6f;
constexpr int SHARERS = 8;  // lanes per value row

// ---- functions -----------------------------------------------------------------------------------------------------

// e^x with a relative error below 3e-7 + 6e-8 |x|: for the sigmoids, whose results round to bf16 or enter an e^g.
__device__ __forceinline__ float fast_exp(float x) {
#ifdef SGLING_EMULATE
    return expf(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 1.4426950408889634f)));
    return y;
#endif
}

__device__ __forceinline__ float fast_sigmoid(float x) { return reciprocal(__fadd_rn(1.0f, fast_exp(-x))); }

// Four conv taps, oldest first, then SiLU; not rounded yet.
__device__ __forceinline__ float convolve(const float4& tap, float oldest, float older, float old, float now) {
    const float sum = fmaf(tap.w, now, fmaf(tap.z, old, fmaf(tap.y, older, __fmul_rn(tap.x, oldest))));
    return __fmul_rn(sum, fast_sigmoid(sum));
}

// ---- rows of one warp ----------------------------------------------------------------------------------------------

// PER neighbouring bf16 channels of one lane.
template <int PER>
struct alignas(2 * PER) Channels {
    uint32_t word[PER / 2];

    __device__ __forceinline__ float operator[](int i) const {
        return i % 2 ? bf16_hi(word[i / 2]) : bf16_lo(word[i / 2]);
    }

    static __device__ __forceinline__ Channels round(const float (&value)[PER]) {
        Channels rounded;
#pragma unroll
        for (int i = 0; i < PER / 2; ++i) rounded.word[i] = pack_bf16(value[2 * i], value[2 * i + 1]);
        return rounded;
    }

    static __device__ __forceinline__ Channels gather(const uint16_t* from) {
        Channels value;
#pragma unroll
        for (int i = 0; i < PER / 2; ++i) value.word[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
        return value;
    }
};

template <>
struct Channels<1> {
    uint16_t bits;

    __device__ __forceinline__ float operator[](int) const { return to_float(bits); }
    static __device__ __forceinline__ Channels round(const float (&value)[1]) { return {to_bf16(value[0])}; }
    static __device__ __forceinline__ Channels gather(const uint16_t* from) { return {*from}; }
};

// PER channels in one load where ALIGNED, else from any even address.
template <int PER, bool ALIGNED>
__device__ __forceinline__ Channels<PER> load_channels(const uint16_t* from) {
    if constexpr (ALIGNED)
        return *reinterpret_cast<const Channels<PER>*>(from);
    else
        return Channels<PER>::gather(from);
}

template <int PER>
__device__ __forceinline__ void store_channels(uint16_t* to, const Channels<PER>& value) {
    *reinterpret_cast<Channels<PER>*>(to) = value;
}

// PER neighbouring fp32 values of one lane, in one load or store.
template <int PER>
struct alignas(4 * PER) Values {
    float at[PER];
};

template <int PER>
__device__ __forceinline__ void store_values(float* to, const float (&value)[PER]) {
    Values<PER> packed;
#pragma unroll
    for (int i = 0; i < PER; ++i) packed.at[i] = value[i];
    *reinterpret_cast<Values<PER>*>(to) = packed;
}

// This lane's part of sum(a b) over the channels of a row.
template <int PER>
__device__ __forceinline__ float partial_dot(const float (&a)[PER], const float (&b)[PER]) {
    float sum = __fmul_rn(a[0], b[0]);
#pragma unroll
    for (int i = 1; i < PER; ++i) sum = fmaf(a[i], b[i], sum);
    return sum;
}

// 1 / |x| of a row from the sum of its squares, epsilon inside the root.
__device__ __forceinline__ float inverse_norm(float squares) { return rsqrtf(__fadd_rn(squares, L2_EPS)); }

// ---- the recurrence ------------------------------------------------------------------------------------------------

// Elements of a [K] vector that belong to lane % 8: of every 32 neighbours four.
template <int N>
__device__ __forceinline__ void load_part(float (&to)[N], const float* from) {
    const int sharer = lane_id() % SHARERS;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + 4 * sharer + i * SHARERS);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
}

template <int N>
__device__ __forceinline__ void store_part(float* to, const float (&from)[N]) {
    const int sharer = lane_id() % SHARERS;
#pragma unroll
    for (int i = 0; i < N; i += 4)
        *reinterpret_cast<float4*>(to + 4 * sharer + i * SHARERS) =
            make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
}

// This lane's part of state . x: four running sums, one per element modulo four.
template <int N>
__device__ __forceinline__ float part_of_dot(const float (&state)[N], const float (&x)[N]) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i % 4] = i < 4 ? __fmul_rn(state[i], x[i]) : fmaf(state[i], x[i], sum[i % 4]);
    return __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
}

__device__ __forceinline__ float sum_of_sharers(float part) {
#pragma unroll
    for (int distance = SHARERS / 2; distance > 0; distance >>= 1) part = __fadd_rn(part, shfl_xor(part, distance));
    return part;
}

__device__ __forceinline__ float update_of(float beta, float v, float predicted) {
    return __fmul_rn(beta, __fadd_rn(v, -predicted));
}

// state <- decay state + update key. The first product may be taken while the update is still being summed.
template <int N>
__device__ __forceinline__ void decay_state(float (&state)[N], const float (&decay)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) state[i] = __fmul_rn(state[i], decay[i]);
}

template <int N>
__device__ __forceinline__ void add_update(float (&state)[N], float update, const float (&key)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) state[i] = fmaf(update, key[i], state[i]);
}
