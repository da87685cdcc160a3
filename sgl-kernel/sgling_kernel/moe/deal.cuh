// Which tiles of which experts a CTA of a walk has, and in what order: of w13 in up_walk.cuh, of w2 in down_walk.cuh.
#pragma once

#include "grouping.cuh"

// Division by a number the host knows: exact for n * by < 2^32.
struct Divisor {
    unsigned long long factor;

    explicit Divisor(long long by) : factor(0xffffffffu / static_cast<unsigned>(by > 0 ? by : 1) + 1ull) {}
    __device__ __forceinline__ int quotient(int n) const {
        return static_cast<int>(static_cast<unsigned long long>(n) * factor >> 32);
    }
};

// What is dealt, and to how many CTAs.
struct Tiles {
    Divisor ctas, per_expert;
    int each, shared;  // tiles of a routed expert; of the shared one: as many, or none

    Tiles(long long tiles, bool has_shared, long long number_of_ctas)
        : ctas(number_of_ctas), per_expert(tiles), each(static_cast<int>(tiles)), shared(has_shared ? each : 0) {}
};

// Whether a walk can list the experts and deal their tiles (Divisor).
inline bool walkable(long long experts, long long tiles, long long ctas) {
    const long long most = (experts + 1) * tiles, limit = 1LL << 32;
    return experts <= MAX_EXPERTS && ctas < 1024 && tiles < 1024 && most * tiles < limit && most * ctas * ctas < limit;
}

struct Span {
    int first, count;
};

// First a CTA's part of the shared expert's tiles, whose many tokens take longest, then its part of the routed ones, in
// order of the experts. Which shared tiles are its own does not depend on the routing, so they can be asked for before
// it is known. Of both together every CTA has as many, give or take one.
struct Deal {
    Tiles tiles;
    Span shared;

    __device__ __forceinline__ explicit Deal(const Tiles& all) : tiles(all) {
        const int first = cut(tiles.shared, 0);
        shared = {first, cut(tiles.shared, 1) - first};
    }
    // This CTA's routed tiles of so many experts.
    __device__ __forceinline__ Span routed(int distinct) const {
        const int total = distinct * tiles.each, first = routed_cut(total, 0);
        return {first, routed_cut(total, 1) - first};
    }

  private:
    // The first of `total` tiles that belongs to the CTA `behind` this one.
    __device__ __forceinline__ int cut(int total, int behind) const {
        return tiles.ctas.quotient(total * (static_cast<int>(blockIdx.x) + behind));
    }
    // Of routed ones. A CTA with a shared tile more gets a routed one less, where there are enough of them.
    __device__ __forceinline__ int routed_cut(int total, int behind) const {
        return total < static_cast<int>(gridDim.x) ? cut(total, behind)
                                                   : cut(total + tiles.shared, behind) - cut(tiles.shared, behind);
    }
};

struct Tile {
    int expert, tile;  // expert -1 is the shared one
};

// The tiles of this CTA by number.
struct Share {
    Deal deal;
    Distinct chosen;
    Span routed;

    __device__ __forceinline__ Share(const Tiles& tiles, const unsigned* bits)
        : deal(tiles), chosen(bits), routed(deal.routed(chosen.count())) {}
    __device__ __forceinline__ bool has(int number) const { return number < deal.shared.count + routed.count; }
    // A whole warp calls it.
    __device__ __forceinline__ Tile tile(int number) const {
        if (number < deal.shared.count) return {-1, deal.shared.first + number};
        const int at = routed.first + number - deal.shared.count, group = deal.tiles.per_expert.quotient(at);
        return {chosen.expert(group), at - group * deal.tiles.each};
    }
};

// A tile of the CTA, one after another in the same order. A whole warp moves it on.
struct Place {
    int left, run;     // tiles from here on: all, of this expert
    int expert, tile;  // as in Tile
    int group, first;  // the expert behind this one: its number among the chosen ones, its first tile here

    __device__ __forceinline__ Place(const Deal& deal, const Distinct& chosen)
        : run(deal.shared.count), expert(-1), tile(deal.shared.first) {
        const Span routed = deal.routed(chosen.count());
        left = run + routed.count;
        group = deal.tiles.per_expert.quotient(routed.first);
        first = routed.first - group * deal.tiles.each;
        if (run == 0) enter(deal, chosen);
    }
    // By `count` <= run tiles.
    __device__ __forceinline__ void advance(const Deal& deal, const Distinct& chosen, int count) {
        left -= count;
        tile += count;
        run -= count;
        if (run == 0) enter(deal, chosen);
    }

  private:
    __device__ __forceinline__ void enter(const Deal& deal, const Distinct& chosen) {
        if (left == 0) return;
        expert = chosen.expert(group++);
        tile = first;
        run = min(deal.tiles.each - first, left);
        first = 0;
    }
};
