// Group-limited top-k: one CTA per row, one thread per expert, three barriers (reference.py). The lowest id wins every
// tie.
//
// Nothing is chosen one after another; places are counted. An expert's place in its segment (its group, at most a warp)
// comes from comparing it with the whole segment; the first few of every segment are candidates, and a candidate's
// place among all of them is its slot. Scores are compared as unsigned keys in the order of the floats. Candidates lie
// by segment and place, so of two equal keys the candidate with the lower number has the lower id.
#include "sgling.cuh"

constexpr int MAX_EXPERTS = 512, LOAD = 4;  // keys per 16-byte load
constexpr unsigned MINUS_INFINITY_KEY = 0x007fffffu, LOWEST_KEY = 0;
constexpr float SUM_EPS = 1e-20f;

struct Router {
    int experts, groups, kept_groups, top;
    bool normalised;
    float factor;
    // Powers of two, as exponents: experts of a segment, candidates of a segment, segments of a group, threads that count
    // for a candidate.
    int segment_log, per_segment_log, group_log, split_log;

    __device__ __forceinline__ int segment() const { return 1 << segment_log; }
    __device__ __forceinline__ int candidates() const { return experts >> split_log; }
    __device__ __forceinline__ int group_of_segment(int segment) const { return segment >> group_log; }
};

struct Board {
    alignas(16) unsigned keys[MAX_EXPERTS];    // of all experts
    alignas(16) unsigned masked[MAX_EXPERTS];  // of the candidates, minus infinity in a dropped group
    float score[MAX_EXPERTS];                  // of all experts, without bias
    unsigned key[MAX_EXPERTS];                 // of the candidates
    int id[MAX_EXPERTS];
    float chosen[WARP];  // scores by slot
};

__device__ __forceinline__ unsigned key_of(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// How many of the LOAD keys from number `first` on stand before key `mine` of number `number`.
__device__ __forceinline__ int before(const unsigned* keys, int first, unsigned mine, int number) {
    const uint4 four = *reinterpret_cast<const uint4*>(keys + first);
    return (four.x > mine || (four.x == mine && first < number)) +
           (four.y > mine || (four.y == mine && first + 1 < number)) +
           (four.z > mine || (four.z == mine && first + 2 < number)) +
           (four.w > mine || (four.w == mine && first + 3 < number));
}

// Place of this thread's key in its segment.
__device__ __forceinline__ int place_in_segment(const unsigned* keys, unsigned mine, int segment) {
    const int number = static_cast<int>(threadIdx.x), first = number & -segment;
    int place = 0;
    if (segment == WARP) {
#pragma unroll
        for (int i = 0; i < WARP; i += LOAD) place += before(keys, first + i, mine, number);
    } else {
        for (int i = first; i < first + segment; ++i) place += keys[i] > mine || (keys[i] == mine && i < number);
    }
    return place;
}

// Sum of the two largest biased scores of a group (the only one, if it has one expert).
__device__ __forceinline__ float group_score(const Board& board, const Router& router, int group) {
    float best = -CUDART_INF_F, second = -CUDART_INF_F;
    const int first = group << router.group_log;
    for (int segment = first; segment < first + (1 << router.group_log); ++segment) {
        const unsigned* keys = board.key + (segment << router.per_segment_log);
        const float high = value_of(keys[0]), low = router.segment_log > 0 ? value_of(keys[1]) : -CUDART_INF_F;
        second = fmaxf(fminf(best, high), fmaxf(second, low));
        best = segment == first ? high : fmaxf(best, high);
    }
    return router.experts > router.groups ? __fadd_rn(best, second) : best;
}

// Groups before which fewer than kept_groups others rank, as bits: higher score first, then lower number.
__device__ __forceinline__ unsigned kept_mask(const Board& board, const Router& router) {
    const int mine = lane_id();
    const float score = mine < router.groups ? group_score(board, router, mine) : 0.0f;
    int ahead = 0;
#pragma unroll 8
    for (int group = 0; group < router.groups; ++group) {
        const float other = shfl(score, group);
        ahead += other > score || (other == score && group < mine);
    }
    return ballot(ahead < router.kept_groups);
}

// Slot of candidate `number`: `split` neighbouring threads count a part of the candidates each.
__device__ __forceinline__ int slot_of(const Board& board, int candidates, int number, int split) {
    const int part = static_cast<int>(threadIdx.x) & (split - 1);
    const unsigned mine = board.masked[number];
    int slot = 0;
#pragma unroll 8
    for (int first = part * LOAD; first < candidates; first += split * LOAD)
        slot += before(board.masked, first, mine, number);
    for (int distance = 1; distance < split; distance <<= 1) slot += shfl_xor(slot, distance);
    return slot;
}

__global__ void __launch_bounds__(MAX_EXPERTS) grouped_topk_kernel(float* weights, long long* ids, const float* logits,
                                                                   const float* bias, Router router) {
    __shared__ Board board;
    const int expert = static_cast<int>(threadIdx.x), count = router.candidates();
    const float offset = __ldg(bias + expert);
    pdl_wait();
    pdl_trigger();
    const float logit = logits[static_cast<long long>(blockIdx.x) * router.experts + expert];
    const float score = __fdiv_rn(1.0f, 1.0f + expf(-logit));
    const unsigned key = key_of(__fadd_rn(score, offset));
    board.keys[expert] = key, board.score[expert] = score;
    __syncwarp();
    const int place = place_in_segment(board.keys, key, router.segment());
    if (place < 1 << router.per_segment_log) {
        const int candidate = (expert >> router.segment_log << router.per_segment_log) + place;
        board.key[candidate] = key, board.id[candidate] = expert;
    }
    __syncthreads();
    const unsigned kept = kept_mask(board, router);
    if (expert < ceil_div(count, LOAD) * LOAD) {
        const int group = router.group_of_segment(expert >> router.per_segment_log);
        const bool stays = expert < count && (kept >> group & 1);
        board.masked[expert] = stays ? board.key[expert] : expert < count ? MINUS_INFINITY_KEY : LOWEST_KEY;
    }
    __syncthreads();
    const int split = 1 << router.split_log, candidate = expert >> router.split_log;
    const int slot = slot_of(board, count, candidate, split);
    const long long at = static_cast<long long>(blockIdx.x) * router.top;
    if (slot < router.top && (expert & (split - 1)) == 0) {
        const int segment = candidate >> router.per_segment_log, first = segment << router.per_segment_log;
        // A dropped group is a run of equal keys: its first candidates are its lowest ids.
        const bool stays = kept >> router.group_of_segment(segment) & 1;
        const int id = stays ? board.id[candidate] : (segment << router.segment_log) + candidate - first;
        ids[at + slot] = id;
        board.chosen[slot] = board.score[id];
    }
    __syncthreads();
    if (expert >= router.top) return;
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < router.top; ++i) total = __fadd_rn(total, board.chosen[i]);
    float weight = board.chosen[expert];
    if (router.normalised) weight = __fdiv_rn(weight, __fadd_rn(total, SUM_EPS));
    weights[at + expert] = __fmul_rn(weight, router.factor);
}

static int log_of(long long value) {  // smallest exponent of a power of two that is not less
    int exponent = 0;
    while (1LL << exponent < value) ++exponent;
    return exponent;
}

// A segment is a group, or a warp's part of it; two of its experts decide the group's score, and `top` may be chosen.
static Router router_of(long long experts, int groups, int kept_groups, int top, bool normalised, float factor) {
    const int group = log_of(experts / groups), segment = group < 5 ? group : 5, wanted = log_of(top < 2 ? 2 : top);
    const int per_segment = wanted < segment ? wanted : segment;
    return {static_cast<int>(experts), groups,      kept_groups,     top,
            normalised,                factor,      segment,         per_segment,
            group - segment,           segment - per_segment};
}

// weights fp32 [rows, top] and ids int64 [rows, top] from contiguous logits fp32 [rows, experts] and bias fp32
// [experts]; experts is 32, 64, 128, 256 or 512, groups divides 32, top is at most 32. Returns 1 (invalid value) for
// other sizes.
extern "C" int grouped_topk(float* weights, void* ids, const float* logits, const float* bias, long long rows,
                            long long experts, int groups, int kept_groups, int top, int normalised, float factor,
                            int pdl, void* stream) {
    const bool power_of_two = (experts & (experts - 1)) == 0;
    if (experts < WARP || experts > MAX_EXPERTS || !power_of_two || WARP % groups != 0 || top > WARP) return 1;
    const Router router = router_of(experts, groups, kept_groups, top, normalised != 0, factor);
    return SGLING_LAUNCH(grouped_topk_kernel, static_cast<unsigned>(rows), static_cast<unsigned>(experts), 0, stream,
                         pdl, weights, static_cast<long long*>(ids), logits, bias, router);
}
