// Absorbed attention over the paged latent cache, one split of SPLIT positions per program (see kernel.py and
// reference.py): partial outputs, peaks and masses that finish.cu combines.
//
// With `early` set, lengths, page table and cache rows below the committed length are two hops old: they are read before
// the wait, past L1, which may still hold a line of an earlier step. Rows of the window itself come from the node before
// and are fetched behind the wait.
#include "split.cuh"

namespace {

template <int LATENT, int ROPE, int TILES>
__global__ void __launch_bounds__(THREADS, 1) split_kernel(Split p) {
    SGLING_DYNAMIC_SHARED(unsigned char, shared);
    Program<LATENT, ROPE, TILES> program(p, shared);
    const int first = static_cast<int>(blockIdx.y), start = p.group_tiles * static_cast<int>(blockIdx.x);
    const int end = min(start + p.group_tiles, (program.rows_total + 7) / 8);
    int loaded = -1;
    bool fetched = false;
    if (p.early) {
        program.read_lengths();
        if (first * SPLIT < program.total) {
            program.find_slots(first);
            fetched = program.committed(first);
            if (fetched) program.fetch();
        }
    }
    const int cta = static_cast<int>((blockIdx.z * gridDim.y + first) * gridDim.x + blockIdx.x);
    const int ctas = static_cast<int>(gridDim.z * gridDim.y * gridDim.x);
    for (int at = (cta * THREADS + static_cast<int>(threadIdx.x)) * 32; at < p.next_bytes; at += ctas * THREADS * 32)
        prefetch32(p.next_weights + at);
    pdl_wait();
    pdl_trigger();
    if (!p.early) program.read_lengths();
    if (first * SPLIT >= program.total) return;
    program.load_queries(8 * start);
    for (int tile = start; tile < end; tile += TILES) {
        program.start();
        for (int split = first; split * SPLIT < program.total; split += p.programs) {
            if (loaded == split) {
                cp_async_wait<0>();
            } else {
                if (loaded >= 0) __syncthreads();
                if (loaded >= 0 || !p.early) program.find_slots(split);
                if (loaded >= 0 || !fetched) program.fetch();
                loaded = split;
            }
            float score[TILES][4];
            program.compute_scores(score);
            program.mask(score, split, 8 * tile);
            __syncthreads();
            const int next = (split + p.programs) * SPLIT < program.total ? tile : tile + TILES;
            if (next < end) program.request_queries(8 * next);
            program.soften(score, split == first);
            if (split != first) program.rescale();
            __syncthreads();
            program.account(8 * tile, split == first);
            program.multiply_values();
        }
        program.store(8 * tile);
    }
}

template <int LATENT, int ROPE, int TILES>
int launch_split(const Split& p, dim3 grid, int pdl, void* stream) {
    return SGLING_LAUNCH((split_kernel<LATENT, ROPE, TILES>), grid, dim3(THREADS),
                         (Memory<LATENT, ROPE, TILES>::BYTES), stream, pdl, p);
}

template <int LATENT, int ROPE>
int launch_tiles(const Split& p, dim3 grid, int tiles, int pdl, void* stream) {
    switch (tiles) {
        case 1: return launch_split<LATENT, ROPE, 1>(p, grid, pdl, stream);
        case 2: return launch_split<LATENT, ROPE, 2>(p, grid, pdl, stream);
        case 3: return launch_split<LATENT, ROPE, 3>(p, grid, pdl, stream);
        case 4: return launch_split<LATENT, ROPE, 4>(p, grid, pdl, stream);
        default: return launch_split<LATENT, ROPE, MAX_TILES>(p, grid, pdl, stream);
    }
}

}  // namespace

// q_lat [bs * width, heads, latent], q_pe [.., rope], part_out fp32 [bs, programs, width * heads, latent], part_ml
// fp32 [.., 2] (peak, mass). `groups` CTAs share a split's rows; the weights of the next node are brought into the L2.
// Shapes: latent 512, rope 64.
extern "C" int mla_split(const void* q_lat, const void* q_pe, const void* kv_pool, const void* req_to_token,
                         long long table_width, const void* rows, const void* seq_lens, void* part_out, void* part_ml,
                         float scale_log2, long long batch, long long width, long long heads, long long programs,
                         long long groups, int early, const void* next_weights, long long next_bytes, int pdl,
                         void* stream) {
    Split p{};
    p.next_weights = static_cast<const char*>(next_weights);
    p.next_bytes = static_cast<int>(next_bytes);
    p.q_lat = static_cast<const uint16_t*>(q_lat);
    p.q_pe = static_cast<const uint16_t*>(q_pe);
    p.kv_pool = static_cast<const uint16_t*>(kv_pool);
    p.req_to_token = static_cast<const long long*>(req_to_token);
    p.rows = static_cast<const long long*>(rows);
    p.seq_lens = static_cast<const long long*>(seq_lens);
    p.table_width = table_width;
    p.part_out = static_cast<float*>(part_out);
    p.part_ml = static_cast<float*>(part_ml);
    p.scale_log2 = scale_log2;
    p.width = static_cast<int>(width);
    p.heads = static_cast<int>(heads);
    p.programs = static_cast<int>(programs);
    p.early = early;
    const long long mine = ceil_div(ceil_div(width * heads, 8), groups);
    p.group_tiles = static_cast<int>(mine);
    const long long passes = ceil_div(mine, MAX_TILES);
    const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(programs), static_cast<unsigned>(batch));
    return launch_tiles<512, 64>(p, grid, static_cast<int>(ceil_div(mine, passes)), pdl, stream);
}
