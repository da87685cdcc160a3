// One small kernel per primitive of sgling.cuh, for test_cuda_primitives.py (emulation) and test/gpu.
#include "sgling.cuh"

// d [16, 8] = a [16, 16] times b [8, 16] transposed, one warp.
__global__ void tile_kernel(float* d, const uint32_t* a, const uint32_t* b) {
    pdl_wait();
    pdl_trigger();
    const int g = lane_id() / 4, t = lane_id() % 4;
    const uint32_t fa[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
    const uint32_t fb[2] = {b[g * 8 + t], b[g * 8 + t + 4]};
    float sum[4] = {0, 0, 0, 0};
    mma_bf16_16816(sum, fa, fb);
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}

extern "C" int tile(float* d, const void* a, const void* b, int pdl, void* stream) {
    return SGLING_LAUNCH(tile_kernel, 1, 32, 0, stream, pdl, d, static_cast<const uint32_t*>(a),
                         static_cast<const uint32_t*>(b));
}

// Per block of 64 numbers: sum, maximum, bit mask of the positive ones among the first 32, and the numbers reversed.
template <int N>
__global__ void block_kernel(float* out, float* reversed, const float* x, float scale) {
    pdl_wait();
    pdl_trigger();
    __shared__ float partial[2];
    SGLING_DYNAMIC_SHARED(float, staged);
    const int i = static_cast<int>(threadIdx.x);
    const float* mine = x + blockIdx.x * N;
    if (i < N / 4) cp_async16(staged + 4 * i, mine + 4 * i);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const float value = staged[i] * scale;
    const float sum = warp_sum(value), best = warp_max(value);
    const unsigned positive = ballot(value > 0);
    if (lane_id() == 0) partial[warp_id()] = sum;
    reversed[blockIdx.x * N + i] = shfl(staged[N - 1 - (i ^ 31)], 31 - lane_id());
    __syncthreads();
    if (i == 0) {
        out[blockIdx.x * 3] = partial[0] + partial[1];
        out[blockIdx.x * 3 + 1] = best;
        out[blockIdx.x * 3 + 2] = __uint_as_float(positive);
    }
}

extern "C" int blocks(float* out, float* reversed, const float* x, long long count, float scale, int pdl,
                      void* stream) {
    return SGLING_LAUNCH(block_kernel<64>, static_cast<unsigned>(count), 64, 64 * sizeof(float), stream, pdl, out,
                         reversed, x, scale);
}

// bf16 [2 n] rounded twice (in pairs and alone) from fp32 [2 n].
__global__ void rounding_kernel(uint32_t* pairs, uint16_t* single, const float* x, long long n) {
    pdl_wait();
    pdl_trigger();
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        pairs[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
        single[2 * i] = to_bf16(x[2 * i]);
        single[2 * i + 1] = to_bf16(x[2 * i + 1]);
    }
}

extern "C" int rounding(void* pairs, void* single, const float* x, long long n, int pdl, void* stream) {
    return SGLING_LAUNCH(rounding_kernel, 1, 64, 0, stream, pdl, static_cast<uint32_t*>(pairs),
                         static_cast<uint16_t*>(single), x, n);
}

// What an emulation must refuse: 0 = a barrier half of the threads skip for good, 1 = lanes at different operations,
// 2 = a write beyond the dynamic shared memory. Never launched on a GPU.
__global__ void faulty_kernel(int fault) {
    SGLING_DYNAMIC_SHARED(float, staged);
    const bool first = threadIdx.x < 16;
    if (fault == 0 && first) __syncthreads();
    if (fault == 0 && !first) shfl_xor(1.0f, 1);
    if (fault == 1) first ? shfl_xor(1.0f, 1) : static_cast<float>(ballot(true));
    if (fault == 2) staged[blockDim.x] = 1.0f;
}

extern "C" int faulty(int fault, int pdl, void* stream) {
    return SGLING_LAUNCH(faulty_kernel, 1, 32, 32 * sizeof(float), stream, pdl, fault);
}
