// Clusters (sm_90 and up): CTAs that run at the same time and write into each other's shared memory. Two ways to meet:
//
// Plain stores, read by one CTA:
//   all threads, at the start:      cluster_arrive()
//   all threads:                    cluster_wait(), then stores through cluster_at(shared, rank), then cluster_arrive()
//   all threads of the reader:      cluster_wait(), then reads of its own shared memory
//   The reader must be the last CTA of its cluster: in the emulation CTAs run one after another, and a `__shared__`
//   array keeps what earlier CTAs wrote.
//
// Values counted by a barrier, as bulk copies are (bulk.cuh), read by every CTA; no fence over other memory:
//   one thread, at the start:       landing_init and landing_expect of all bytes that the others send
//   all threads:                    cluster_arrive_with_landings(), later cluster_wait(), then send_in_cluster and landing_wait
//   A CTA that has got everything sent to it may end. The emulation has no such clusters.
#pragma once

#include "bulk.cuh"

// Where `shared`, an address in this CTA's static shared memory, lies in CTA `rank` of the cluster.
template <class T>
__device__ __forceinline__ T* cluster_at(T* shared, int rank) {
#if !defined(SGLING_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
    return reinterpret_cast<T*>(there);
#else
    return shared;
#endif
}

// All earlier stores of this CTA are seen behind the cluster_wait() of the others.
__device__ __forceinline__ void cluster_arrive() {
#if !defined(SGLING_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

// Only the landings that this CTA has set up are sure to be seen.
__device__ __forceinline__ void cluster_arrive_with_landings() {
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

// SGLING_LAUNCH with `cluster` neighbouring CTAs of the grid's x dimension, a multiple of it, in a cluster; 1: none.
// `shared` bytes of dynamic shared memory come on top of what the kernel declares.
template <class... Params, class... Args>
static int sgling_launch_cluster_shared(void (*kernel)(Params...), unsigned cluster, dim3 grid, dim3 block,
                                        size_t shared, void* stream, int pdl, Args... args) {
#ifdef SGLING_EMULATE
    return sgling_launch(kernel, grid, block, shared, stream, pdl, args...);
#else
    if (cluster == 1) return sgling_launch(kernel, grid, block, shared, stream, pdl, args...);
    if (const int error = sgling_tell_shared(kernel, shared); error != 0) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = pdl ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
#endif
}

template <class... Params, class... Args>
static int sgling_launch_cluster(void (*kernel)(Params...), unsigned cluster, dim3 grid, dim3 block, void* stream,
                                 int pdl, Args... args) {
    return sgling_launch_cluster_shared(kernel, cluster, grid, block, 0, stream, pdl, args...);
}
