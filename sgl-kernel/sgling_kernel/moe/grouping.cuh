// Which experts a step chose, and which pairs chose one. A pair is one (row, slot): number row * top + slot.
//
// Every CTA works this out for itself from the raw top-k ids, so no node has to. An id outside [0, experts) names no
// expert: its pair belongs to nobody.
#pragma once

#include "sgling.cuh"

constexpr int MAX_PAIRS = 1280;            // 160 rows of 8 experts
constexpr int MAX_EXPERTS = WARP * WARP;   // that Distinct can list

// Position of the set bit number `index` of a mask that has it.
__device__ __forceinline__ int nth_bit(unsigned mask, int index) {
    for (; index > 0; --index) mask &= mask - 1;
    return __ffs(static_cast<int>(mask)) - 1;
}

// expert[pair] in shared memory for all pairs, `experts` where an id names none and up to the next multiple of WARP;
// bit e % 32 of word e / 32 of `bits` for every chosen expert e. A whole CTA calls it; ends with a barrier.
// `meanwhile()` is called while the first ids are on their way.
template <class Meanwhile>
__device__ __forceinline__ void stage_experts(int* expert, unsigned* bits, const long long* ids, int pairs, int experts,
                                              Meanwhile meanwhile) {
    const int padded = static_cast<int>(ceil_div(pairs, WARP) * WARP), thread = static_cast<int>(threadIdx.x);
    const auto load = [&](int pair) -> long long {  // not a line of L1 from an earlier layer
        return pair < pairs ? __ldcg(ids + pair) : experts;
    };
    const auto keep = [&](int pair, long long id) {
        const bool named = id >= 0 && id < experts;
        expert[pair] = named ? static_cast<int>(id) : experts;
        if (named) atomicOr(bits + id / WARP, 1u << id % WARP);
    };
    const long long first = load(thread);
    if (thread < WARP) bits[thread] = 0;
    meanwhile();
    __syncthreads();
    if (thread < padded) keep(thread, first);
#pragma unroll 1
    for (int pair = thread + static_cast<int>(blockDim.x); pair < padded; pair += static_cast<int>(blockDim.x))
        keep(pair, load(pair));
    __syncthreads();
}

// The chosen experts of a step in ascending order, spread over the lanes of a warp; at most MAX_EXPERTS experts.
struct Distinct {
    unsigned word;  // this lane's 32 experts
    int before;     // chosen ones in the lanes below

    __device__ __forceinline__ explicit Distinct(const unsigned* bits) {
        word = bits[lane_id()];
        const int mine = __popc(word);
        before = mine;
#pragma unroll
        for (int distance = 1; distance < WARP; distance <<= 1) {
            const int lower = __shfl_up_sync(0xffffffffu, before, distance);
            if (lane_id() >= distance) before += lower;
        }
        before -= mine;
    }
    __device__ __forceinline__ int count() const { return shfl(before + __popc(word), WARP - 1); }
    // Expert number `index` < count(). A whole warp calls it.
    __device__ __forceinline__ int expert(int index) const {
        const int holder = WARP - 1 - __clz(static_cast<int>(ballot(before <= index)));
        unsigned mask = shfl(word, holder);
#pragma unroll 1
        for (int skip = index - shfl(before, holder); skip > 0; --skip) mask &= mask - 1;
        return holder * WARP + __ffs(static_cast<int>(mask)) - 1;
    }
};

// The pairs of one expert, found by ballots: the first one, their number, and pair number base + lane / 4 of them (-1:
// there is none). `id_of(pair)` gives a pair's id; it is asked for LOOKS pairs per lane at once.
struct Members {
    int first, count, mine;
};
constexpr int LOOKS = 5;

template <class Ids>
__device__ __forceinline__ Members find_members(Ids id_of, int pairs, int expert, int base) {
    Members found{-1, 0, -1};
    const int wanted = base + lane_id() / 4;
    for (int start = 0; start < pairs; start += LOOKS * WARP) {
        int ids[LOOKS];
#pragma unroll
        for (int look = 0; look < LOOKS; ++look) {
            const int pair = start + look * WARP + lane_id();
            ids[look] = pair < pairs ? static_cast<int>(id_of(pair)) : -1;
        }
#pragma unroll
        for (int look = 0; look < LOOKS; ++look) {
            const unsigned mask = ballot(ids[look] == expert);
            const int first = start + look * WARP, in_mask = __popc(mask), place = wanted - found.count;
            if (found.first < 0 && mask != 0) found.first = first + nth_bit(mask, 0);
            if (place >= 0 && place < in_mask) found.mine = first + nth_bit(mask, place);
            found.count += in_mask;
        }
    }
    return found;
}
