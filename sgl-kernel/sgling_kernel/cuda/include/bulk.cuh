// Bulk copies into shared memory (sm_90 and up): one instruction moves kilobytes, a barrier in shared memory counts the
// bytes that have landed. A kernel that uses them is not for older GPUs, where it stops with a trap.
//
//   one thread:  landing_init(bar), then a __syncthreads()
//   one thread:  landing_expect(bar, bytes of all copies), then the copies (any threads of its warp, behind a
//                __syncwarp()): bulk_copy(to, from, bytes, bar), addresses and sizes multiples of 16
//   any thread:  landing_wait(bar, n % 2) returns when the copies of round n = 0, 1, ... lie in shared memory
//
// What is copied is a weight, which nobody reads again in this step: its lines are the first to leave L2.
// A place is copied over again only behind a barrier of the threads that read it. In the emulation, copies land at the
// wait, and a wait for copies that no thread has asked for is an error.
#pragma once

#include "sgling.cuh"

using Landing = uint64_t;

__device__ __forceinline__ void landing_init(Landing* bar) {
#if defined(SGLING_EMULATE)
    emulated::landing_init(bar);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(bar));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    __trap();
#endif
}

__device__ __forceinline__ void landing_expect(Landing* bar, int bytes) {
#if defined(SGLING_EMULATE)
    emulated::landing_expect(bar, bytes);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(bar));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
#else
    __trap();
#endif
}

__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, Landing* bar) {
#if defined(SGLING_EMULATE)
    emulated::bulk_copy(shared, global, bytes, bar);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(bar));
    uint64_t once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        :
        : "r"(to), "l"(global), "r"(bytes), "r"(at), "l"(once)
        : "memory");
#else
    __trap();
#endif
}

__device__ __forceinline__ void landing_wait(Landing* bar, int parity) {
#if defined(SGLING_EMULATE)
    emulated::landing_wait(bar, parity);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(bar));
    asm volatile(
        "{\n"
        ".reg .pred landed;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 landed, [%0], %1;\n"
        "@!landed bra again;\n"
        "}" ::"r"(at),
        "r"(parity)
        : "memory");
#else
    __trap();
#endif
}
