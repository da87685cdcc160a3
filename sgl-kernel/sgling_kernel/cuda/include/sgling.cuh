// Device helpers shared by every CUDA source of this package, and the host side of a launch.
//
// The same sources compile with nvcc and, with SGLING_EMULATE defined, with g++ (emulate.h): tests run them on a CPU.
// One source is one translation unit and one shared library. Rules for kernels (docs/kernels.md):
//   * every CTA calls pdl_wait() before it reads what the previous node writes and before it writes anything, and
//     pdl_trigger() right after it; before the wait only weights and what is two nodes old may be read;
//   * a row's bits depend on that row alone: K slices and every reduction across threads have one fixed order.
#pragma once

#include <stdint.h>

#ifdef SGLING_EMULATE
#include "emulate.h"
#else
#include <cuda_runtime.h>
#include <math_constants.h>
#define SGLING_DYNAMIC_SHARED(type, name)                                   \
    extern __shared__ __align__(128) unsigned char sgling_dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(sgling_dynamic_shared)
#endif

constexpr int WARP = 32;

__host__ __device__ __forceinline__ constexpr long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) & (WARP - 1); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / WARP; }

// ---- bf16 <-> fp32 -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ __forceinline__ float bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Round to nearest even; NaN becomes 0x7fff.
__device__ __forceinline__ uint16_t to_bf16(float value) {
#ifdef SGLING_EMULATE
    return emulated::round_to_bf16(value);
#else
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}

// Two values as one word, `lo` in the low half (the element with the lower address); rounds like to_bf16.
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
#ifdef SGLING_EMULATE
    return emulated::round_to_bf16(lo) | static_cast<uint32_t>(emulated::round_to_bf16(hi)) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
#endif
}

// 1 / value within one unit in the last place; 0 for infinity.
__device__ __forceinline__ float reciprocal(float value) {
#ifdef SGLING_EMULATE
    return 1.0f / value;
#else
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
#endif
}

__device__ __forceinline__ float sigmoid(float value) { return reciprocal(__fadd_rn(1.0f, expf(-value))); }

// ---- programmatic dependent launch ---------------------------------------------------------------------------------

// Returns when every node before this one has finished and its writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if !defined(SGLING_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next node start as soon as every CTA of this one has called it (or ended).
__device__ __forceinline__ void pdl_trigger() {
#if !defined(SGLING_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- memory --------------------------------------------------------------------------------------------------------

// 16 bytes of a weight: read once, never kept in L1. Issued where it stands, so it may be placed before pdl_wait(). Where
// that wait exists it is no read-only load: ptxas moves those (ld.global.nc) behind the wait as it likes, volatile or not.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SGLING_STREAM "ld.global.L1::no_allocate.v4.u32"
#else
#define SGLING_STREAM "ld.global.nc.L1::no_allocate.v4.u32"
#endif
__device__ __forceinline__ uint4 load_stream16(const void* from) {
#ifdef SGLING_EMULATE
    return emulated::load16(from);
#else
    uint4 v;
    asm volatile(SGLING_STREAM " {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
#endif
}

// 16 bytes that an earlier node wrote: a coherent load, only behind pdl_wait().
__device__ __forceinline__ uint4 load16(const void* from) {
#ifdef SGLING_EMULATE
    return emulated::load16(from);
#else
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
#endif
}

__device__ __forceinline__ void store16(void* to, uint4 value) { *reinterpret_cast<uint4*>(to) = value; }

// Asynchronous copies into shared memory, 16 bytes each; `valid` false fills zeros and reads nothing.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid = true) {
#ifdef SGLING_EMULATE
    emulated::cp_async16(shared, global, valid);
#else
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void cp_async_commit() {
#ifdef SGLING_EMULATE
    emulated::cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most N of this thread's newest groups are unfinished.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
#ifdef SGLING_EMULATE
    emulated::cp_async_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Asks the L2 for 32 bytes. It reads nothing, so it may stand before pdl_wait() even where a writer is still at work.
__device__ __forceinline__ void prefetch32(const void* at) {
#ifndef SGLING_EMULATE
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// Asks for `bytes` from `at` on, a multiple of 32, spread over the CTA's threads.
__device__ __forceinline__ void prefetch(const void* at, int bytes) {
    for (int i = static_cast<int>(threadIdx.x) * 32; i < bytes; i += static_cast<int>(blockDim.x) * 32)
        prefetch32(static_cast<const char*>(at) + i);
}

// ---- warps ---------------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ T shfl_xor(T value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
template <class T>
__device__ __forceinline__ T shfl(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
#define ballot(predicate) __ballot_sync(0xffffffffu, predicate)  // a macro: CUDA still declares a function of that name

// Sum over the warp's 32 lanes, the same bits in every lane: tree of distances 16, 8, 4, 2, 1.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) value = __fadd_rn(value, shfl_xor(value, distance));
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) value = fmaxf(value, shfl_xor(value, distance));
    return value;
}

// d += a b for one 16x8 tile with k = 16. With g = lane / 4, t = lane % 4:
//   a[0] (g, 2t), a[1] (g + 8, 2t), a[2] (g, 2t + 8), a[3] (g + 8, 2t + 8), two columns each, row major;
//   b[0] (2t, g), b[1] (2t + 8, g), two rows each; d[0..1] (g, 2t..), d[2..3] (g + 8, 2t..).
__device__ __forceinline__ void mma_bf16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef SGLING_EMULATE
    emulated::mma_bf16_16816(d, a, b);
#else
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// ---- host ----------------------------------------------------------------------------------------------------------

#ifndef SGLING_EMULATE
// Tells a kernel of its dynamic shared memory: more than 48 KB needs that, those it declares itself included.
template <class... Params>
static int sgling_tell_shared(void (*kernel)(Params...), size_t shared) {
    if (shared == 0) return cudaSuccess;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
}

// Launches kernel(args...) on a stream; pdl != 0 lets it start before its predecessor ends (it must call pdl_wait()).
// Returns the cudaError_t.
template <class... Params, class... Args>
static int sgling_launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, void* stream, int pdl,
                         Args... args) {
    if (const int error = sgling_tell_shared(kernel, shared); error != 0) return error;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = pdl ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

extern "C" const char* sgling_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
#endif

#define SGLING_LAUNCH(kernel, grid, block, shared, stream, pdl, ...) \
    sgling_launch(kernel, grid, block, shared, stream, pdl, __VA_ARGS__)
