// CTAs that run at the same time on neighbouring multiprocessors and write into each other's shared memory (sm_90 and
// up). The CTAs of a cluster are those of one blockIdx.y and blockIdx.z: gridDim.x of them, at most eight.
//
// Values arrive like bulk copies (bulk.cuh): every CTA sets a Landing up that expects all bytes the others send, then
// all threads of all CTAs call cluster_arrive(), later cluster_wait(), and behind it send and wait for the landing. A CTA
// that has got everything sent to it may end. The emulation runs CTAs one after another and has no clusters.
#pragma once

#include "bulk.cuh"

// Behind the wait, every CTA of the cluster has started and set its landings up.
__device__ __forceinline__ void cluster_arrive() {
#if !defined(SGLING_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if !defined(SGLING_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// *to = value in CTA number `rank` of the cluster, counted by its `bar`; both are addresses in this CTA's shared memory.
__device__ __forceinline__ void send_in_cluster(float* to, Landing* bar, int rank, float value) {
#if !defined(SGLING_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const uint32_t own_bar = static_cast<uint32_t>(__cvta_generic_to_shared(bar));
    uint32_t remote, remote_bar;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_bar) : "r"(own_bar), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
                 "r"(__float_as_uint(value)), "r"(remote_bar)
                 : "memory");
#endif
}

// SGLING_LAUNCH with clusters of grid.x CTAs; grid.x 1: none.
template <class... Params, class... Args>
static int sgling_launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, void* stream, int pdl,
                                  Args... args) {
    if (grid.x == 1) return SGLING_LAUNCH(kernel, grid, block, 0, stream, pdl, args...);
#ifdef SGLING_EMULATE
    return 1;
#else
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {grid.x, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = pdl ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
#endif
}
