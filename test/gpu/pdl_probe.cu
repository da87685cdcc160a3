// Neighbours for test_pdl.py: a node that triggers early and ends late, one that never waits, one that occupies SMs.
#include "sgling.cuh"

__device__ __forceinline__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

// Lets the next node start, works for `cycles`, then copies: table [n, 3] of (source, destination, 16-bit units).
__global__ void slow_copy_kernel(const long long* table, int n, long long cycles) {
    pdl_wait();
    pdl_trigger();
    spin(cycles);
    for (int i = 0; i < n; ++i) {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(table[3 * i]);
        uint16_t* to = reinterpret_cast<uint16_t*>(table[3 * i + 1]);
        for (long long at = blockIdx.x * blockDim.x + threadIdx.x; at < table[3 * i + 2]; at += gridDim.x * blockDim.x)
            to[at] = from[at];
    }
}

extern "C" int slow_copy(const long long* table, int n, long long cycles, int pdl, void* stream) {
    return SGLING_LAUNCH(slow_copy_kernel, 32, 256, 0, stream, pdl, table, n, cycles);
}

// What the rules forbid: reads and writes without waiting, so it sees what its predecessor has not written yet.
__global__ void hasty_copy_kernel(const long long* table, int n) {
    for (int i = 0; i < n; ++i) {
        const volatile uint16_t* from = reinterpret_cast<const volatile uint16_t*>(table[3 * i]);
        uint16_t* to = reinterpret_cast<uint16_t*>(table[3 * i + 1]);
        for (long long at = blockIdx.x * blockDim.x + threadIdx.x; at < table[3 * i + 2]; at += gridDim.x * blockDim.x)
            to[at] = from[at];
    }
    pdl_wait();
}

extern "C" int hasty_copy(const long long* table, int n, int pdl, void* stream) {
    return SGLING_LAUNCH(hasty_copy_kernel, 32, 256, 0, stream, pdl, table, n);
}

// Each CTA takes a whole SM (all its shared memory) until *release, in host memory, is not 0, or `limit` cycles pass.
__global__ void occupy_kernel(volatile int* release, int* running, long long limit) {
    if (threadIdx.x == 0) {
        atomicAdd_system(running, 1);
        const long long start = clock64();
        while (*release == 0 && clock64() - start < limit) {
        }
    }
    __syncthreads();
}

extern "C" int occupy(void* release, void* running, long long count, long long shared, long long limit, int pdl,
                      void* stream) {
    return SGLING_LAUNCH(occupy_kernel, static_cast<unsigned>(count), 1024, static_cast<size_t>(shared), stream, 0,
                         static_cast<volatile int*>(release), static_cast<int*>(running), limit);
}
