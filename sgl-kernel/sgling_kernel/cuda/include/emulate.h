// A CPU stand-in for the part of CUDA that sgling.cuh uses, so that g++ compiles the same sources for tests.
//
// The threads of a CTA are fibers. A fiber runs until it ends or reaches a rendezvous: __syncthreads, or an operation
// of its warp (shuffle, ballot, mma, __syncwarp), which is worked out when all live lanes of the warp have arrived at
// the same one. CTAs run one after another. Caught as errors: lanes that meet at different operations, barriers that
// some threads never reach, writes beyond the dynamic shared memory; it is full of NaN when a CTA starts, and
// asynchronous copies land only at the wait that covers them. Not modelled: timing, memory ordering between CTAs.
#pragma once

#include "emulate_machine.h"

namespace emulated {

// ---- numbers and memory ----

static inline uint16_t round_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static inline uint4 load16(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) {
        fprintf(stderr, "emulated kernel: 16-byte load from the unaligned address %p\n", from);
        abort();
    }
    uint4 value;
    memcpy(&value, from, 16);
    return value;
}

static void cp_async16(void* to, const void* from, bool valid) { current->open.push_back({to, from, valid}); }

static void cp_async_commit() {
    current->groups.push_back(std::move(current->open));
    current->open.clear();
}

static void cp_async_wait(size_t unfinished) {
    for (; current->groups.size() > unfinished; current->groups.pop_front())
        for (const Copy& copy : current->groups.front())
            copy.valid ? memcpy(copy.to, copy.from, 16) : memset(copy.to, 0, 16);
}

// Bulk copies (bulk.cuh): what is on its way to each barrier, and the rounds that have landed.
static void landing_init(uint64_t* bar) { landings[bar] = {}; }

static void landing_expect(uint64_t* bar, size_t bytes) {
    require(landings.count(bar) == 1, "a barrier of bulk copies that was not initialised");
    require(landings[bar].expected == 0, "bulk copies are expected twice in one round");
    landings[bar].expected = bytes;
}

static void bulk_copy(void* to, const void* from, size_t bytes, uint64_t* bar) {
    const bool aligned = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 == 0;
    require(aligned, "a bulk copy takes addresses and sizes that are multiples of 16");
    landings[bar].copies.push_back({to, from, bytes});
    landings[bar].bytes += bytes;
}

static void landing_wait(uint64_t* bar, unsigned parity) {
    Landed& landing = landings[bar];
    if (landing.rounds % 2 != parity) return;
    require(landing.expected > 0 && landing.bytes == landing.expected, "a wait for bulk copies that were not requested");
    for (const BulkCopy& copy : landing.copies) memcpy(copy.to, copy.from, copy.bytes);
    landing = {landing.rounds + 1, 0, 0, {}};
}

// ---- warp operations ----

template <class T>
struct Exchange {
    T value;
    int source;  // lane the result comes from
    T result;
};

template <class T>
static void exchange(void* (&lanes)[LANES]) {
    for (void* lane : lanes) {
        if (lane == nullptr) continue;
        auto* mine = static_cast<Exchange<T>*>(lane);
        auto* other = static_cast<Exchange<T>*>(lanes[mine->source & (LANES - 1)]);
        mine->result = other == nullptr ? mine->value : other->value;
    }
}

template <class T>
static T from_lane(T value, int source) {
    Exchange<T> operand{value, source, value};
    wait_at(At::warp, exchange<T>, &operand);
    return operand.result;
}

static inline int lane() {
    return static_cast<int>((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % LANES);
}

struct Vote {
    bool mine;
    unsigned all;
};

static void vote(void* (&lanes)[LANES]) {
    unsigned all = 0;
    for (int i = 0; i < LANES; ++i)
        if (lanes[i] != nullptr && static_cast<Vote*>(lanes[i])->mine) all |= 1u << i;
    for (void* lane : lanes)
        if (lane != nullptr) static_cast<Vote*>(lane)->all = all;
}

struct Fragments {
    float* d;
    const uint32_t *a, *b;
};

static inline float half_of(uint32_t pair, int high) {
    const uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Products in double, one rounding into the fp32 accumulator.
static void multiply(void* (&lanes)[LANES]) {
    float a[16][16], b[16][8];
    for (int i = 0; i < LANES; ++i) {
        const auto* lane = static_cast<Fragments*>(lanes[i]);
        for (int half = 0; half < 2; ++half) {
            const int g = i / 4, k = i % 4 * 2 + half;
            for (int part = 0; part < 4; ++part)
                a[g + part % 2 * 8][k + part / 2 * 8] = lane ? half_of(lane->a[part], half) : 0;
            for (int part = 0; part < 2; ++part) b[k + part * 8][g] = lane ? half_of(lane->b[part], half) : 0;
        }
    }
    for (int i = 0; i < LANES; ++i) {
        if (lanes[i] == nullptr) continue;
        float* d = static_cast<Fragments*>(lanes[i])->d;
        for (int part = 0; part < 4; ++part) {
            double sum = d[part];
            for (int k = 0; k < 16; ++k)
                sum += static_cast<double>(a[i / 4 + part / 2 * 8][k]) * b[k][i % 4 * 2 + part % 2];
            d[part] = static_cast<float>(sum);
        }
    }
}

static void mma_bf16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    Fragments operand{d, a, b};
    wait_at(At::warp, multiply, &operand);
}

static void nothing(void* (&)[LANES]) {}

}  // namespace emulated

// ---- CUDA's names ----

static inline void __syncthreads() { emulated::wait_at(emulated::At::cta, nullptr, nullptr); }
static inline void __syncwarp(unsigned = 0xffffffffu) {
    emulated::wait_at(emulated::At::warp, emulated::nothing, nullptr);
}
template <class T>
static inline T __shfl_sync(unsigned, T value, int lane) { return emulated::from_lane(value, lane); }
template <class T>
static inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulated::from_lane(value, emulated::lane() ^ mask);
}
template <class T>
static inline T __shfl_up_sync(unsigned, T value, int delta) {
    const int lane = emulated::lane();
    return emulated::from_lane(value, lane < delta ? lane : lane - delta);
}
template <class T>
static inline T __shfl_down_sync(unsigned, T value, int delta) {
    const int lane = emulated::lane();
    return emulated::from_lane(value, lane + delta > 31 ? lane : lane + delta);
}
static inline unsigned __ballot_sync(unsigned, bool predicate) {
    emulated::Vote operand{predicate, 0};
    emulated::wait_at(emulated::At::warp, emulated::vote, &operand);
    return operand.all;
}
static inline bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }

static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
static inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float rsqrtf(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
template <class T>
static inline T __ldg(const T* from) { return *from; }
template <class T>
static inline T __ldcg(const T* from) { return *from; }
template <class T, class U>
static inline T atomicAdd(T* at, U value) {
    const T old = *at;
    *at = old + value;
    return old;
}
template <class T, class U>
static inline T atomicOr(T* at, U value) {
    const T old = *at;
    *at = old | value;
    return old;
}
template <class T, class U>
static inline T atomicMax(T* at, U value) {
    const T old = *at;
    *at = std::max(old, static_cast<T>(value));
    return old;
}
template <class T, class U>
static inline T atomicExch(T* at, U value) {
    const T old = *at;
    *at = value;
    return old;
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
using std::max;
using std::min;

#define SGLING_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulated::dynamic_shared())

template <class... Params, class... Args>
static int sgling_launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, void*, int, Args... args) {
    return emulated::launch(grid, block, shared, [=] { kernel(static_cast<Params>(args)...); });
}

extern "C" const char* sgling_error(int) { return emulated::message; }
