// Which tiles of which experts a CTA of the walk has, and in what order.
#pragma once

#include "grouping.cuh"
#include "up_tile.cuh"

// Division by a number that is known early: exact for n * by < 2^32.
struct Divisor {
    unsigned long long factor;

    __device__ __forceinline__ explicit Divisor(int by) : factor(0xffffffffu / static_cast<unsigned>(by) + 1ull) {
#ifndef SGLING_EMULATE
        asm volatile("" : "+l"(factor));  // worked out here, not where it is used
#endif
    }
    __device__ __forceinline__ int quotient(int n) const {
        return static_cast<int>(static_cast<unsigned long long>(n) * factor >> 32);
    }
};

// First a CTA's part of the shared expert's tiles, then its part of the routed ones, in order of the experts. Which
// shared tiles are its own does not depend on the routing, so they can be asked for before it is known.
struct Deal {
    Divisor ctas, per_expert;
    int tiles, all_shared, shared, shared_count;  // of an expert; shared ones in all, this CTA's first, their number

    __device__ __forceinline__ explicit Deal(const Up& up)
        : ctas(static_cast<int>(gridDim.x)), per_expert(up.tiles()), tiles(up.tiles()),
          all_shared(up.shared_w13 != nullptr ? tiles : 0), shared(cut(all_shared, 0)),
          shared_count(cut(all_shared, 1) - shared) {}
    // The first of `total` tiles that belongs to the CTA `behind` this one.
    __device__ __forceinline__ int cut(int total, int behind) const {
        return ctas.quotient(total * (static_cast<int>(blockIdx.x) + behind));
    }
    // Of routed ones. A CTA with a shared tile more gets a routed one less, where there are enough of them.
    __device__ __forceinline__ int routed_cut(int total, int behind) const {
        return total < static_cast<int>(gridDim.x) ? cut(total, behind)
                                                   : cut(total + all_shared, behind) - cut(all_shared, behind);
    }
};

// A tile of the CTA. A whole warp moves it on.
struct Place {
    int left, run;     // tiles from here on: to the end, of this expert
    int expert, tile;  // expert -1 is the shared one
    int group, first;  // the expert behind this one: its number among the chosen ones, its first tile here

    __device__ __forceinline__ Place(const Deal& deal, const Distinct& chosen)
        : run(deal.shared_count), expert(-1), tile(deal.shared) {
        const int total = chosen.count() * deal.tiles, routed = deal.routed_cut(total, 0);
        left = run + deal.routed_cut(total, 1) - routed;
        group = deal.per_expert.quotient(routed);
        first = routed - group * deal.tiles;
        if (run == 0) enter(deal, chosen);
    }
    __device__ __forceinline__ void next(const Deal& deal, const Distinct& chosen) {
        --left;
        ++tile;
        if (--run == 0) enter(deal, chosen);
    }

  private:
    __device__ __forceinline__ void enter(const Deal& deal, const Distinct& chosen) {
        if (left == 0) return;
        expert = chosen.expert(group++);
        tile = first;
        run = deal.tiles - first;
        first = 0;
    }
};
