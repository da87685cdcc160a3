// Group-limited top-k: one CTA per row, one thread per expert, three barriers (reference.py). The lowest id wins every
// tie.
//
// Nothing is chosen one after another; places are counted. An expert's place in its segment (its group, at most a warp)
// comes from comparing it with the whole segment; the first few of every segment are candidates, and a candidate's
// place among those of the kept groups is its slot. Candidates lie by segment and place, so of two equal ones the one
// with the lower number has the lower id. What rarely happens is counted again in a slower way: equal scores in a
// segment, and rows of which fewer than `top` scores above minus infinity are kept, where dropped experts fill up.
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

    // 512 experts in 8 groups, 4 of them kept, 8 chosen.
    __host__ __device__ __forceinline__ void fix_sizes() {
        experts = 512, groups = 8, kept_groups = 4, top = 8;
        segment_log = 5, per_segment_log = 3, group_log = 1, split_log = 2;
    }
    __host__ __forceinline__ bool has_fixed_sizes() const {
        return experts == 512 && groups == 8 && kept_groups == 4 && top == 8;
    }

    __device__ __forceinline__ int segment() const { return 1 << segment_log; }
    __device__ __forceinline__ int candidates() const { return experts >> split_log; }
    __device__ __forceinline__ int group_of_segment(int segment) const { return segment >> group_log; }
};

struct Board {
    alignas(16) float biased[MAX_EXPERTS];     // of all experts
    alignas(16) unsigned keys[MAX_EXPERTS];    // the same as keys, if they are needed
    alignas(16) unsigned key[MAX_EXPERTS];     // of the candidates, by segment and place
    alignas(16) unsigned masked[MAX_EXPERTS];  // of the candidates, minus infinity in a dropped group, if needed
    float score[MAX_EXPERTS];                  // of all experts, without bias
    int id[MAX_EXPERTS];                       // of the candidates
    float chosen[WARP];                        // scores by slot
    unsigned last;                             // key of the last slot
};

__device__ __forceinline__ unsigned warp_total(unsigned value) {
#ifdef SGLING_EMULATE
    for (int distance = 1; distance < WARP; distance <<= 1) value += shfl_xor(value, distance);
    return value;
#else
    return __reduce_add_sync(0xffffffffu, value);
#endif
}

__device__ __forceinline__ unsigned key_of(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// How many of the warp's 32 scores are larger: the place of a score that no other equals. In floating point, which leaves
// half of the work to the pipe that compares.
__device__ __forceinline__ unsigned larger_in_warp(const float* biased, float mine) {
    const float4* fours = reinterpret_cast<const float4*>(biased + (static_cast<int>(threadIdx.x) & -WARP));
    float larger[LOAD] = {};
#pragma unroll
    for (int i = 0; i < WARP / LOAD; ++i) {
        const float4 four = fours[i];
        larger[0] += four.x > mine ? 1.0f : 0.0f;
        larger[1] += four.y > mine ? 1.0f : 0.0f;
        larger[2] += four.z > mine ? 1.0f : 0.0f;
        larger[3] += four.w > mine ? 1.0f : 0.0f;
    }
    return static_cast<unsigned>((larger[0] + larger[1]) + (larger[2] + larger[3]));
}

// How many of the LOAD keys from number `first` on stand before key `mine` of number `number`.
__device__ __forceinline__ int before(const unsigned* keys, int first, unsigned mine, int number) {
    const uint4 four = *reinterpret_cast<const uint4*>(keys + first);
    return (four.x > mine || (four.x == mine && first < number)) +
           (four.y > mine || (four.y == mine && first + 1 < number)) +
           (four.z > mine || (four.z == mine && first + 2 < number)) +
           (four.w > mine || (four.w == mine && first + 3 < number));
}

// Place of this thread's key in its segment, equal keys told apart by number.
__device__ __forceinline__ int place_in_segment(Board& board, unsigned mine, int segment) {
    const int number = static_cast<int>(threadIdx.x), first = number & -segment;
    int place = 0;
    board.keys[number] = mine;
    __syncwarp();
    for (int i = first; i < first + segment; ++i)
        place += board.keys[i] > mine || (board.keys[i] == mine && i < number);
    return place;
}

// Sum of the two largest biased scores of a group (the only one, if it has one expert).
__device__ __forceinline__ float group_score(const Board& board, const Router& router, int group) {
    const int first = group << router.group_log;
    const unsigned* keys = board.key + (first << router.per_segment_log);
    if (router.experts == router.groups) return value_of(keys[0]);
    unsigned best = keys[0], second = keys[1];
#pragma unroll 2
    for (int segment = 1; segment < 1 << router.group_log; ++segment) {
        keys += 1 << router.per_segment_log;
        const unsigned high = keys[0], low = keys[1];
        second = max(min(best, high), max(second, low));
        best = max(best, high);
    }
    return __fadd_rn(value_of(best), value_of(second));
}

// Whether group `other` ranks before group `mine`: higher score, or the same and a lower number.
__device__ __forceinline__ bool ranks_before(float other_score, int other, float score, int mine) {
    return other < mine ? other_score >= score : other_score > score;
}

// Groups before which fewer than kept_groups others rank, as bits.
__device__ __forceinline__ unsigned kept_mask(const Board& board, const Router& router) {
    if (router.groups == 8) {  // all pairs at once: lane 8 i + g compares group g with groups i and i + 4
        const int mine = lane_id() % 8, other = lane_id() / 8;
        const float score = group_score(board, router, mine);
        const unsigned low = ballot(ranks_before(shfl(score, other), other, score, mine));
        const unsigned high = ballot(ranks_before(shfl(score, other + 4), other + 4, score, mine));
        const unsigned own = 0x01010101u << mine;
        const bool kept = __popc(low & own) + __popc(high & own) < router.kept_groups;
        return ballot(kept) & 0xffu;
    }
    const int mine = lane_id();
    const float score = mine < router.groups ? group_score(board, router, mine) : 0.0f;
    int ahead = 0;
    for (int group = 0; group < router.groups; ++group) ahead += ranks_before(shfl(score, group), group, score, mine);
    return ballot(ahead < router.kept_groups && mine < router.groups);
}

// Number of kept segment `n`, counted from 0.
__device__ __forceinline__ int kept_segment(const Router& router, unsigned kept, int n) {
    const int before = n >> router.group_log;  // kept groups
#pragma unroll 4
    for (int i = 0; i < router.kept_groups - 1; ++i) kept = i < before ? kept & (kept - 1) : kept;
    return ((__ffs(static_cast<int>(kept)) - 1) << router.group_log) + (n & ((1 << router.group_log) - 1));
}

__device__ __forceinline__ int count_above(const unsigned* keys, int count, unsigned least) {
    int above = 0;
    if (count == 8) {
        const uint4 four = *reinterpret_cast<const uint4*>(keys), more = *reinterpret_cast<const uint4*>(keys + 4);
        above = (four.x > least) + (four.y > least) + (four.z > least) + (four.w > least);
        above += (more.x > least) + (more.y > least) + (more.z > least) + (more.w > least);
    } else {
        for (int i = 0; i < count; ++i) above += keys[i] > least;
    }
    return above;
}

// Slot of the candidate at `place` of segment `own` among those of the `segments` kept ones: neighbouring threads count a
// part of them each. Before it stand larger keys, and equal ones of segments with lower ids. (No score has the key 0.)
__device__ __forceinline__ int slot_among_kept(const Board& board, const Router& router, unsigned kept, int segments,
                                               int own, int place) {
    const int split = 1 << router.split_log, size = 1 << router.per_segment_log;
    const unsigned mine = board.key[own * size + place];
    int slot = 0;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) & (split - 1); i < segments; i += split) {
        const int segment = kept_segment(router, kept, i);
        const int above = count_above(board.key + segment * size, size, segment < own ? mine - 1 : mine);
        slot += segment == own ? place : above;
    }
    for (int distance = 1; distance < split; distance <<= 1) slot += shfl_xor(slot, distance);
    return slot;
}

// Fills the slots from the kept groups: neighbouring threads share a candidate, and only the warps that have one work.
__device__ __forceinline__ void choose(Board& board, const Router& router, long long* ids) {
    const int thread = static_cast<int>(threadIdx.x), segments = router.kept_groups << router.group_log;
    if ((thread & -WARP) >= segments << router.segment_log) return;
    const unsigned kept = kept_mask(board, router);
    const int candidate = thread >> router.split_log, n = candidate >> router.per_segment_log;
    const int own = kept_segment(router, kept, min(n, segments - 1));
    const int place = candidate & ((1 << router.per_segment_log) - 1);
    const int slot = slot_among_kept(board, router, kept, segments, own, place);
    if (n >= segments || slot >= router.top || (thread & ((1 << router.split_log) - 1)) != 0) return;
    const int number = (own << router.per_segment_log) + place, id = board.id[number];
    ids[slot] = id;
    board.chosen[slot] = board.score[id];
    if (slot == router.top - 1) board.last = board.key[number];
}

// Slot of candidate `number` of all: `split` neighbouring threads count a part of the candidates each.
__device__ __forceinline__ int slot_of(const Board& board, int candidates, int number, int split) {
    const int part = static_cast<int>(threadIdx.x) & (split - 1);
    const unsigned mine = board.masked[number];
    int slot = 0;
    for (int first = part * LOAD; first < candidates; first += split * LOAD)
        slot += before(board.masked, first, mine, number);
    for (int distance = 1; distance < split; distance <<= 1) slot += shfl_xor(slot, distance);
    return slot;
}

// Fills the slots from all groups, with minus infinity for dropped experts: kept ones of that score must not win by rank
// against a lower id. The whole CTA calls this.
__device__ __forceinline__ void choose_with_dropped(Board& board, const Router& router, long long* ids) {
    const int thread = static_cast<int>(threadIdx.x), count = router.candidates(), split = 1 << router.split_log;
    const unsigned kept = kept_mask(board, router);
    if (thread < ceil_div(count, LOAD) * LOAD) {
        const bool stays = thread < count && (kept >> router.group_of_segment(thread >> router.per_segment_log) & 1);
        board.masked[thread] = stays ? board.key[thread] : thread < count ? MINUS_INFINITY_KEY : LOWEST_KEY;
    }
    __syncthreads();
    const int candidate = thread >> router.split_log, slot = slot_of(board, count, candidate, split);
    if (slot >= router.top || (thread & (split - 1)) != 0) return;
    const int segment = candidate >> router.per_segment_log, first = segment << router.per_segment_log;
    // A dropped group is a run of equal keys: its first candidates are its lowest ids.
    const bool stays = kept >> router.group_of_segment(segment) & 1;
    const int id = stays ? board.id[candidate] : (segment << router.segment_log) + candidate - first;
    ids[slot] = id;
    board.chosen[slot] = board.score[id];
}

// `FIXED`: the published model's sizes, known to the compiler.
template <bool FIXED>
__global__ void __launch_bounds__(MAX_EXPERTS) grouped_topk_kernel(float* weights, long long* ids, const float* logits,
                                                                   const float* bias, Router router) {
    __shared__ Board board;
    if (FIXED) router.fix_sizes();
    const int expert = static_cast<int>(threadIdx.x);
    const float offset = bias[expert];  // a plain load: a read-only one (__ldg) would move behind the wait
    pdl_wait();
    pdl_trigger();
    const float logit = logits[static_cast<long long>(blockIdx.x) * router.experts + expert];
    const float score = __fdiv_rn(1.0f, 1.0f + expf(-logit)), biased = __fadd_rn(score, offset);
    board.biased[expert] = biased, board.score[expert] = score;
    __syncwarp();
    int place = static_cast<int>(larger_in_warp(board.biased, biased));
    const bool distinct = warp_total(place) == WARP * (WARP - 1) / 2;
    if (router.segment() != WARP || !distinct) place = place_in_segment(board, key_of(biased), router.segment());
    if (place < 1 << router.per_segment_log) {
        const int candidate = (expert >> router.segment_log << router.per_segment_log) + place;
        board.key[candidate] = key_of(biased), board.id[candidate] = expert;
    }
    __syncthreads();
    const long long at = static_cast<long long>(blockIdx.x) * router.top;
    choose(board, router, ids + at);
    __syncthreads();
    if (board.last <= MINUS_INFINITY_KEY) {
        choose_with_dropped(board, router, ids + at);
        __syncthreads();
    }
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
    const auto kernel = router.has_fixed_sizes() ? grouped_topk_kernel<true> : grouped_topk_kernel<false>;
    return SGLING_LAUNCH(kernel, static_cast<unsigned>(rows), static_cast<unsigned>(experts), 0, stream, pdl, weights,
                         static_cast<long long*>(ids), logits, bias, router);
}
