// The Markov chain of draft blocks in one node (reference.py): every CTA keeps its rows of w2 in shared memory for all
// drafts, and the CTAs hand each other their best tokens through flagged words in global memory.
//
// Phase p first collects what all CTAs left in phase p - 1, which is draft p - 1, then leaves its own best token for
// draft p; phase `drafts` only collects. Between phases a CTA waits for the words of all others, so all CTAs must be on
// the GPU at once: the grid is at most one CTA per SM. Nothing else can keep a CTA out for ever, because a later node
// starts early only after every CTA here has called pdl_trigger(). A launch may also run single phases (first = last),
// where it never waits: that is how the emulation, which runs CTAs one after another, and the tests run it.
//
// A word is {value, epoch}. The epoch grows by one per chain and is stored by the last phase, after every CTA has read
// it, so words of earlier chains are never taken for new ones and nothing needs to be cleared.
#include "sgling.cuh"

constexpr int TILE = 16;            // rows of w2 per warp and step
constexpr int CHUNK = 32;           // columns per pair of matrix instructions
constexpr int PAD = 64;             // bytes between rows in shared memory: no bank conflicts in 16-byte reads
constexpr int MAX_REQUESTS = 8, MAX_POLLS = 6;
constexpr int NO_TOKEN = 0x7fffffff;
constexpr unsigned long long GOLDEN = 0x9E3779B97F4A7C15ull;

struct Best {
    float score;
    int token;
};

struct Chain {
    unsigned long long* words;  // [0] epoch, then [drafts][requests][ctas][2]
    long long* out;
    const float* base;
    const uint16_t *w1, *w2;
    const long long* anchor;
    const float* temperature;  // null: nobody samples
    const long long *seed, *rows, *starts;
    long long out_stride, base_request, base_draft;
    int requests, drafts, vocab, rows_per_cta, first, last;
};

// The better of two; lowest token wins ties, in any order of reduction.
__device__ __forceinline__ Best better(Best a, Best b) {
    const bool second = b.score > a.score || (b.score == a.score && b.token < a.token);
    return second ? b : a;
}

template <int FROM>
__device__ __forceinline__ Best reduce_best(Best best, int down_to) {
#pragma unroll
    for (int distance = FROM; distance > 0; distance >>= 1) {
        if (distance < down_to) break;
        best = better(best, {shfl_xor(best.score, distance), shfl_xor(best.token, distance)});
    }
    return best;
}

// ---- hand-over between CTAs ----------------------------------------------------------------------------------------

__device__ __forceinline__ void post(unsigned long long* to, uint32_t value, uint32_t epoch) {
    const unsigned long long word = static_cast<unsigned long long>(epoch) << 32 | value;
#ifdef SGLING_EMULATE
    *to = word;
#else
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
#endif
}

__device__ __forceinline__ unsigned long long peek(const unsigned long long* from) {
#ifdef SGLING_EMULATE
    return *from;
#else
    unsigned long long word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
#endif
}

__device__ __forceinline__ unsigned long long* words_of(const Chain& c, int phase, int request) {
    return c.words + 1 + (static_cast<long long>(phase) * c.requests + request) * gridDim.x * 2;
}

// Draft `phase` of a request, by one warp: the best of all CTAs, waiting for those that are not there yet.
__device__ int collect(const Chain& c, int phase, int request, uint32_t epoch) {
    const unsigned long long* from = words_of(c, phase, request);
    unsigned long long words[MAX_POLLS][2];
    bool missing = true;
    while (missing) {
        missing = false;
#pragma unroll
        for (int i = 0; i < MAX_POLLS; ++i) {
            const int cta = lane_id() + i * WARP;
            const bool there = cta < static_cast<int>(gridDim.x);
            words[i][0] = there ? peek(from + cta * 2) : 0;
            words[i][1] = there ? peek(from + cta * 2 + 1) : 0;
        }
#pragma unroll
        for (int i = 0; i < MAX_POLLS; ++i) {
            const bool there = lane_id() + i * WARP < static_cast<int>(gridDim.x);
            missing |= there && ((words[i][0] >> 32) != epoch || (words[i][1] >> 32) != epoch);
        }
    }
    Best best{-INFINITY, NO_TOKEN};
#pragma unroll
    for (int i = 0; i < MAX_POLLS; ++i) {
        if (lane_id() + i * WARP < static_cast<int>(gridDim.x))
            best = better(best, {__uint_as_float(static_cast<uint32_t>(words[i][0])), static_cast<int>(words[i][1])});
    }
    return reduce_best<16>(best, 1).token;
}

// ---- one draft -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned long long mix64(unsigned long long x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// noise/reference.py: gumbel_noise of one token under the key of its row.
__device__ __forceinline__ float gumbel(unsigned long long key, int token) {
    uint32_t x = static_cast<uint32_t>(token) ^ static_cast<uint32_t>(key);
    x = (x ^ (x >> 16)) * 0x7FEB352Du + static_cast<uint32_t>(key >> 32);
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    x ^= x >> 16;
    const float u = fminf((static_cast<float>(x & 0x7FFFFFFFu) + 0.5f) * 0x1p-31f, 0x1.fffffep-1f);
    return -logf(-log1pf(-u));
}

struct Draw {
    float temperature;
    unsigned long long key;
};

template <bool SAMPLED>
__device__ __forceinline__ Draw draw_of(const Chain& c, int request, int draft) {
    if (!SAMPLED || request >= c.requests) return {0.0f, 0};
    const long long row = c.rows[request];
    const unsigned long long position = static_cast<unsigned long long>(c.starts[request] + draft);
    return {c.temperature[row], mix64(mix64(static_cast<unsigned long long>(c.seed[row]) + GOLDEN) + position * GOLDEN)};
}

// Products of 16 rows of w2 with the embeddings of up to 8 requests; a lane's 16 bytes feed two instructions, so both
// operands share one permutation of the columns. d as in mma_bf16_16816: rows g and g + 8, requests 2t and 2t + 1.
template <int CHUNKS, bool RESIDENT>
__device__ __forceinline__ void tile_logits(float (&d)[4], const unsigned char* low, const unsigned char* high,
                                            const uint4 (&e)[CHUNKS]) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        uint4 a, b;
        if constexpr (RESIDENT) {
            a = *reinterpret_cast<const uint4*>(low + i * CHUNK * 2);
            b = *reinterpret_cast<const uint4*>(high + i * CHUNK * 2);
        } else {
            a = load_stream16(low + i * CHUNK * 2);
            b = load_stream16(high + i * CHUNK * 2);
        }
        mma_bf16_16816(d, {a.x, b.x, a.y, b.y}, {e[i].x, e[i].y});
        mma_bf16_16816(d, {a.z, b.z, a.w, b.w}, {e[i].z, e[i].w});
    }
}

// Warps of a CTA at most: the embeddings fill 4 registers per chunk and thread.
template <int CHUNKS>
constexpr int MAX_WARPS = CHUNKS > 8 ? 12 : 20;
template <int CHUNKS>
constexpr int MAX_THREADS = MAX_WARPS<CHUNKS> * WARP;

template <int CHUNKS, bool RESIDENT, bool SAMPLED>
__global__ void __launch_bounds__(MAX_THREADS<CHUNKS>, 1) markov_kernel(Chain c) {
    constexpr int RANK = CHUNKS * CHUNK, ROW = RESIDENT ? RANK * 2 + PAD : RANK * 2;
    SGLING_DYNAMIC_SHARED(unsigned char, resident);
    __shared__ Best partial[MAX_WARPS<CHUNKS>][MAX_REQUESTS];
    __shared__ int tokens[MAX_REQUESTS];
    const int lane = lane_id(), warp = warp_id(), warps = static_cast<int>(blockDim.x) / WARP;
    const int g = lane / 4, t = lane % 4;
    const int begin = static_cast<int>(blockIdx.x) * c.rows_per_cta, end = min(begin + c.rows_per_cta, c.vocab);
    if constexpr (RESIDENT) {
        constexpr int PIECES = RANK * 2 / 16;
        for (int i = static_cast<int>(threadIdx.x); i < c.rows_per_cta * PIECES; i += static_cast<int>(blockDim.x)) {
            const int row = i / PIECES, piece = i % PIECES;
            const bool valid = begin + row < end;
            const uint16_t* from = c.w2 + (valid ? static_cast<long long>(begin + row) * RANK + piece * 8 : 0);
            cp_async16(resident + row * ROW + piece * 16, from, valid);
        }
        cp_async_commit();
    }
    pdl_wait();
    pdl_trigger();
    const uint32_t epoch = static_cast<uint32_t>(c.words[0]) + 1;
    if constexpr (RESIDENT) cp_async_wait<0>();
    for (int phase = c.first; phase <= c.last; ++phase) {
        for (int request = warp; request < c.requests; request += warps) {
            if (phase == c.drafts && blockIdx.x != 0) break;
            const int token = phase == 0 ? static_cast<int>(c.anchor[request]) : collect(c, phase - 1, request, epoch);
            if (lane == 0) {
                tokens[request] = token;
                if (phase > 0 && blockIdx.x == 0) c.out[request * c.out_stride + phase - 1] = token;
            }
        }
        __syncthreads();  // the tokens, and before the first draft the rows of w2
        if (phase == c.drafts) break;
        uint4 e[CHUNKS];
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            e[i] = make_uint4(0, 0, 0, 0);
            if (g < c.requests)
                e[i] = load_stream16(c.w1 + static_cast<long long>(tokens[g]) * RANK + i * CHUNK + t * 8);
        }
        const Draw draws[2] = {draw_of<SAMPLED>(c, 2 * t, phase), draw_of<SAMPLED>(c, 2 * t + 1, phase)};
        Best best[2] = {{-INFINITY, NO_TOKEN}, {-INFINITY, NO_TOKEN}};
        for (int row = begin + warp * TILE; row < end; row += warps * TILE) {
            float base[4], d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = row + g + (i / 2) * 8, request = 2 * t + i % 2;
                const bool inside = token < end && request < c.requests;
                base[i] = inside ? c.base[request * c.base_request + phase * c.base_draft + token] : -INFINITY;
            }
            const int low = min(row + g, end - 1), high = min(row + g + 8, end - 1);
            const unsigned char* rows = RESIDENT ? resident : reinterpret_cast<const unsigned char*>(c.w2);
            const long long from = RESIDENT ? begin : 0;
            tile_logits<CHUNKS, RESIDENT>(d, rows + (low - from) * ROW + t * 16, rows + (high - from) * ROW + t * 16, e);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = row + g + (i / 2) * 8;
                const Draw& draw = draws[i % 2];
                float score = base[i] + d[i];
                if (SAMPLED && draw.temperature > 0.0f) score = score / draw.temperature + gumbel(draw.key, token);
                if (!(score == score)) score = -INFINITY;  // NaN never wins
                if (token < end) best[i % 2] = better(best[i % 2], {score, token});
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            best[i] = reduce_best<16>(best[i], 4);
            if (g == 0) partial[warp][2 * t + i] = best[i];
        }
        __syncthreads();
        for (int request = warp; request < c.requests; request += warps) {
            Best mine = lane < warps ? partial[lane][request] : Best{-INFINITY, NO_TOKEN};
            mine = reduce_best<16>(mine, 1);
            unsigned long long* to = words_of(c, phase, request) + 2 * blockIdx.x;
            if (lane == 0) post(to, __float_as_uint(mine.score), epoch);
            if (lane == 1) post(to + 1, static_cast<uint32_t>(mine.token), epoch);
        }
    }
    if (c.last == c.drafts && blockIdx.x == 0 && threadIdx.x == 0) c.words[0] = epoch;
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <int CHUNKS>
static int launch_chain(const Chain& chain, unsigned ctas, int resident, int pdl, void* stream) {
    const int tiles = chain.rows_per_cta / TILE, warps = tiles < MAX_WARPS<CHUNKS> ? tiles : MAX_WARPS<CHUNKS>;
    const size_t shared = resident ? static_cast<size_t>(chain.rows_per_cta) * (CHUNKS * CHUNK * 2 + PAD) : 0;
    auto kernel =
        resident ? (chain.temperature ? markov_kernel<CHUNKS, true, true> : markov_kernel<CHUNKS, true, false>)
                 : (chain.temperature ? markov_kernel<CHUNKS, false, true> : markov_kernel<CHUNKS, false, false>);
    return SGLING_LAUNCH(kernel, ctas, warps * WARP, shared, stream, pdl, chain);
}

// Phases first .. last of a chain. out int64 [requests, drafts], workspace 8 * (1 + drafts * requests * ctas * 2) bytes,
// zero before the very first chain; base fp32; w1, w2 bf16 [vocab, rank], rank one of 32, 64, 128, 256, 512; int64
// anchor [requests]; temperature fp32 (null: greedy), seed, rows, starts as DraftNoise. rows_per_cta: a multiple of 16,
// ctas of them cover the vocabulary. resident: w2 stays in shared memory between the phases.
extern "C" int markov_chain(void* out, void* workspace, const void* base, const void* w1, const void* w2,
                            const void* anchor, const void* temperature, const void* seed, const void* rows,
                            const void* starts, long long out_stride, long long base_request, long long base_draft,
                            int requests, int drafts, int vocab, int rank, int rows_per_cta, int first, int last,
                            int resident, int pdl, void* stream) {
    const Chain chain{static_cast<unsigned long long*>(workspace),
                      static_cast<long long*>(out),
                      static_cast<const float*>(base),
                      static_cast<const uint16_t*>(w1),
                      static_cast<const uint16_t*>(w2),
                      static_cast<const long long*>(anchor),
                      static_cast<const float*>(temperature),
                      static_cast<const long long*>(seed),
                      static_cast<const long long*>(rows),
                      static_cast<const long long*>(starts),
                      out_stride,
                      base_request,
                      base_draft,
                      requests,
                      drafts,
                      vocab,
                      rows_per_cta,
                      first,
                      last};
    const unsigned ctas = static_cast<unsigned>(ceil_div(vocab, rows_per_cta));
    switch (rank / CHUNK) {
        case 1: return launch_chain<1>(chain, ctas, resident, pdl, stream);
        case 2: return launch_chain<2>(chain, ctas, resident, pdl, stream);
        case 4: return launch_chain<4>(chain, ctas, resident, pdl, stream);
        case 8: return launch_chain<8>(chain, ctas, resident, pdl, stream);
        default: return launch_chain<16>(chain, ctas, resident, pdl, stream);
    }
}
