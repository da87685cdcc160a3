// What every CTA of a walk has, as moe/deal.cuh deals it: by number, tile after tile, and run after run.
#include "../../../sgl-kernel/sgling_kernel/moe/deal.cuh"

// [CTA] runs of tiles in steps of at most `step`: expert, first tile, number; one behind the last has none.
__device__ void walk(int* out, const Deal& deal, const Distinct& chosen, int step) {
    Place place(deal, chosen);
    for (; place.left > 0; out += 3) {
        const int count = min(place.run, step);
        out[0] = place.expert, out[1] = place.tile, out[2] = count;
        place.advance(deal, chosen, count);
    }
}

__global__ void deal_kernel(int* by_number, int* one_by_one, int* runs, const long long* ids, int pairs, int experts,
                            int room, Tiles tiles) {
    __shared__ int expert[MAX_PAIRS];
    __shared__ unsigned bits[WARP];
    stage_experts(expert, bits, ids, pairs, experts, [] {});
    const int mine = static_cast<int>(blockIdx.x) * room * 3;
    const Share share(tiles, bits);
    for (int number = 0; share.has(number); ++number) {
        const Tile tile = share.tile(number);
        int* out = by_number + mine + number * 3;
        out[0] = tile.expert, out[1] = tile.tile, out[2] = 1;
    }
    const Deal deal(tiles);
    const Distinct chosen(bits);
    walk(one_by_one + mine, deal, chosen, 1);
    walk(runs + mine, deal, chosen, room);
}

// Three tables int32 [ctas, room, 3], zero before; ids int64 [pairs]. One warp per CTA; 1: it cannot be dealt.
extern "C" int deal(int* by_number, int* one_by_one, int* runs, const long long* ids, long long pairs,
                    long long experts, long long tiles, long long has_shared, long long ctas, long long room, int pdl,
                    void* stream) {
    if (!walkable(experts, tiles, ctas)) return 1;
    return SGLING_LAUNCH(deal_kernel, static_cast<unsigned>(ctas), WARP, 0, stream, pdl, by_number, one_by_one, runs,
                         ids, static_cast<int>(pairs), static_cast<int>(experts), static_cast<int>(room),
                         Tiles(tiles, has_shared != 0, ctas));
}
