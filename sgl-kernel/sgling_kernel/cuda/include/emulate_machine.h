// The machine of emulate.h: threads of a CTA as fibers, their rendezvous, launches.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
static dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulated {

constexpr size_t STACK = 256 * 1024, GUARD = 256;
constexpr int LANES = 32;
enum class At { ready, warp, cta, done };

// What a warp operation does with the lanes' operands; lanes that have ended are null.
using Resolve = void (*)(void* (&lanes)[LANES]);

struct Copy {
    void* to;
    const void* from;
    bool valid;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    At at;
    Resolve resolve;
    void* operand;
    std::vector<Copy> open;                // copies since the last commit
    std::deque<std::vector<Copy>> groups;  // committed, unfinished
};

struct BulkCopy {
    void* to;
    const void* from;
    size_t bytes;
};

struct Landed {
    unsigned rounds;
    size_t expected, bytes;  // of the round under way
    std::vector<BulkCopy> copies;
};

static std::map<const void*, Landed> landings;  // by barrier
static std::deque<Fiber> fibers;
static std::function<void()> body;
static ucontext_t scheduler;
static Fiber* current;
static std::vector<unsigned char> shared_memory;
static char message[256];

static unsigned char* dynamic_shared() {
    const uintptr_t address = reinterpret_cast<uintptr_t>(shared_memory.data());
    return reinterpret_cast<unsigned char*>((address + 127) / 128 * 128);
}

static void entry() {
    body();
    current->at = At::done;
    swapcontext(&current->context, &scheduler);
}

static void resume(Fiber& fiber, unsigned index) {
    threadIdx = dim3(index % blockDim.x, index / blockDim.x % blockDim.y, index / (blockDim.x * blockDim.y));
    current = &fiber;
    swapcontext(&scheduler, &fiber.context);
}

__attribute__((noinline)) static void wait_at(At at, Resolve resolve, void* operand) {
    current->at = at;
    current->resolve = resolve;
    current->operand = operand;
    swapcontext(&current->context, &scheduler);
}

// What no later statement can repair ends the process.
static void require(bool holds, const char* text) {
    if (holds) return;
    fprintf(stderr, "emulated kernel: block (%u, %u, %u): %s\n", blockIdx.x, blockIdx.y, blockIdx.z, text);
    abort();
}

static bool fail(const char* text) {
    snprintf(message, sizeof message, "block (%u, %u, %u): %s", blockIdx.x, blockIdx.y, blockIdx.z, text);
    return false;
}

// Works out the operation all live lanes of a warp wait at; returns whether the warp may go on.
static bool settle_warp(unsigned first, unsigned last, bool& broken) {
    void* lanes[LANES] = {};
    Resolve resolve = nullptr;
    for (unsigned i = first; i < last; ++i) {
        if (fibers[i].at == At::done) continue;
        if (fibers[i].at != At::warp) return false;
        if (resolve != nullptr && resolve != fibers[i].resolve) {
            broken = true;
            return fail("lanes of a warp met at different operations");
        }
        resolve = fibers[i].resolve;
        lanes[i - first] = fibers[i].operand;
    }
    if (resolve == nullptr) return false;
    resolve(lanes);
    for (unsigned i = first; i < last; ++i)
        if (fibers[i].at == At::warp) fibers[i].at = At::ready;
    return true;
}

static bool run_warp(unsigned first, unsigned last, bool& broken) {
    bool moved = false;
    for (bool again = true; again && !broken;) {
        for (unsigned i = first; i < last; ++i)
            if (fibers[i].at == At::ready) {
                resume(fibers[i], i);
                moved = true;
            }
        again = settle_warp(first, last, broken);
    }
    return moved;
}

// All live threads wait at the CTA's barrier: let them pass. Threads that have ended do not count.
static bool release_cta(unsigned count, unsigned& live) {
    live = 0;
    for (unsigned i = 0; i < count; ++i) {
        if (fibers[i].at == At::done) continue;
        if (fibers[i].at != At::cta) return false;
        ++live;
    }
    for (unsigned i = 0; i < count; ++i)
        if (fibers[i].at == At::cta) fibers[i].at = At::ready;
    return live > 0;
}

static void start_fibers(unsigned count) {
    while (fibers.size() < count) {
        fibers.emplace_back();
        fibers.back().stack = std::make_unique<char[]>(STACK);
    }
    for (unsigned i = 0; i < count; ++i) {
        Fiber& fiber = fibers[i];
        fiber.at = At::ready;
        fiber.open.clear();
        fiber.groups.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, entry, 0);
    }
}

static bool run_cta(unsigned count, size_t shared) {
    start_fibers(count);
    landings.clear();
    memset(dynamic_shared(), 0xff, shared + GUARD);
    for (;;) {
        bool moved = false, broken = false;
        for (unsigned first = 0; first < count && !broken; first += LANES)
            moved |= run_warp(first, std::min(first + LANES, count), broken);
        if (broken) return false;
        unsigned live = 0;
        if (release_cta(count, live)) continue;
        if (std::all_of(fibers.begin(), fibers.begin() + count, [](const Fiber& f) { return f.at == At::done; })) break;
        if (!moved) return fail("some threads never reach the barrier the others wait at");
    }
    const unsigned char* guard = dynamic_shared() + shared;
    if (std::any_of(guard, guard + GUARD, [](unsigned char byte) { return byte != 0xff; }))
        return fail("write beyond the dynamic shared memory");
    return true;
}

static int launch(dim3 grid, dim3 block, size_t shared, std::function<void()> kernel) {
    const unsigned count = block.x * block.y * block.z;
    if (count == 0 || count > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0) {
        snprintf(message, sizeof message, "invalid launch: %u threads in a %u x %u x %u grid", count, grid.x, grid.y,
                 grid.z);
        return 1;
    }
    gridDim = grid;
    blockDim = block;
    body = std::move(kernel);
    shared_memory.resize(shared + GUARD + 128);
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                if (!run_cta(count, shared)) return 1;
            }
    return 0;
}

}  // namespace emulated
