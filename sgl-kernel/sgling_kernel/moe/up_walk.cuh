// The up product as a walk: one CTA per multiprocessor over (distinct expert, tile), so that a weight is read once.
//
// A ring of two tiles in shared memory keeps the memory busy. What limits a walk is all the rest, so it is spread over
// three roles: SLICES warps do nothing but multiply, a slice of K each; one warp tells them, turn by turn, which tile
// and tokens are theirs, and asks for the tiles to come; one finishes what they have multiplied. A turn is a tile and
// up to eight tokens of its expert, and there is one barrier between turns. While turn i is multiplied,
//   the teller asks for the tile that takes the place of the one before, and tells turn i + 1,
//   the finisher sums the slices of turn i - 1.
// x stays in registers until the tokens change. Needs bulk copies: compute capability 9.0 and up.
#pragma once

#include "bulk.cuh"
#include "up_tile.cuh"

constexpr int STAGES = 2;      // of the ring
constexpr int TOLD = 4;        // turns that are remembered; three are in use: being finished, multiplied, told
constexpr int MAX_SLICES = 16;
constexpr int HELPERS = 2;     // warps beside the multipliers

// STAGES tiles in shared memory. A tile is two copies, whose rows meet different banks: a lane reads its pair in the
// one that is not its neighbour's (pair_of_lane).
template <int SLICES, int BLOCKS>
struct Ring {
    static constexpr int DIM = SLICES * BLOCKS * BLOCK_COLUMNS, COPY = TILE_ROWS / 2 * DIM, HALF = COPY + 32;
    static constexpr int STAGE = 2 * HALF, BYTES = STAGES * STAGE * 2;
    uint16_t* memory;
    Landing* landed;  // of each stage

    // One thread asks for the tile of a step.
    __device__ __forceinline__ void request(int step, const uint16_t* tile) const {
        uint16_t* stage = memory + step % STAGES * STAGE;
        Landing* bar = landed + step % STAGES;
        landing_expect(bar, 2 * COPY * 2);
        bulk_copy(stage, tile, COPY * 2, bar);
        bulk_copy(stage + HALF, tile + COPY, COPY * 2, bar);
    }
    __device__ __forceinline__ void wait(int step) const { landing_wait(landed + step % STAGES, step / STAGES % 2); }
    // This lane's words of its gate row in the first stage, from the first column of this warp's slice on.
    __device__ __forceinline__ const uint4* mine() const {
        const int pair = pair_of_lane(), half = pair / (TILE_PAIRS / 2), row = pair % (TILE_PAIRS / 2) * 2;
        const int column = warp_id() * BLOCKS * BLOCK_COLUMNS + lane_id() % 4 * LANE_COLUMNS;
        return reinterpret_cast<const uint4*>(memory + half * HALF + row * DIM + column);
    }
};

// Where eight tokens of an expert come from and go to; -1: there is no such token.
struct Tokens {
    int row[TILE_TOKENS], place[TILE_TOKENS];  // place: row * slots + slot
};

struct Turn {
    int step;    // of its tile in the ring; -1: the walk is over
    int fresh;   // whether the tokens are others than those of the turn before
    int tokens;  // which ones
    int tile;
    float limit;
};

struct Workplace {
    alignas(16) float sums[2][MAX_SLICES * TILE_SUMS];
    Tile steps[STAGES];  // in the ring
    Turn turns[TOLD];
    Tokens tokens[TOLD];
    int experts[MAX_PAIRS];
    unsigned bits[WARP];  // the chosen experts
    Landing landed[STAGES];
};

// The tokens of an expert from number `base` on; returns how many it has. `experts` are those of all pairs. A whole
// warp calls it; it is followed by a barrier.
__device__ __forceinline__ int list_tokens(Tokens& tokens, const Up& up, const int* experts, int expert, int base) {
    const auto set = [&](int token, int row, int slot) {
        tokens.row[token] = row;
        tokens.place[token] = row < 0 ? -1 : row * up.slots() + slot;
    };
    const int lane = lane_id(), row = base + lane;
    if (lane < TILE_TOKENS) set(lane, expert < 0 && row < up.rows ? row : -1, up.top);
    if (expert < 0) return up.rows;
    __syncwarp();
    int count = 0;
#pragma unroll 1
    for (int first = 0; first < up.rows * up.top; first += WARP) {
        const int pair = first + lane;
        const bool mine = experts[pair] == expert;
        const unsigned all = ballot(mine);
        const int token = count + __popc(all & ((1u << lane) - 1)) - base;
        if (mine && token >= 0 && token < TILE_TOKENS) set(token, pair / up.top, pair % up.top);
        count += __popc(all);
    }
    return count;
}

template <int SLICES, int BLOCKS>
__device__ __forceinline__ void tell_turns(const Up& up, const Deal& deal, const Ring<SLICES, BLOCKS>& ring,
                                           Workplace& shared) {
    const Distinct chosen(shared.bits);
    Place place(deal, chosen);
    const int steps = place.left, begun = min(deal.shared.count, STAGES);  // begun: requested before the wait
    int asked = 0, step = 0, base = 0, count = 0, listed = -2, tokens = 0;  // listed: the expert of `tokens`
    for (int turn = -1;; ++turn) {
        int reading = 0;  // the step that is being multiplied; those before it have been
        if (turn >= 0) {
            __syncthreads();
            reading = shared.turns[turn % TOLD].step;
            if (reading < 0) return;
        }
        for (; asked < min(steps, reading + STAGES); ++asked) {
            if (asked >= begun && lane_id() == 0) ring.request(asked, up.tile(place.expert, place.tile));
            shared.steps[asked % STAGES] = {place.expert, place.tile};
            place.advance(deal, chosen, 1);
        }
        Turn& told = shared.turns[(turn + 1) % TOLD];
        if (step == steps) {
            told.step = -1;
            continue;
        }
        const Tile at = shared.steps[step % STAGES];
        const bool fresh = at.expert != listed || count > TILE_TOKENS;
        if (fresh) {
            tokens = (tokens + 1) % TOLD;
            count = list_tokens(shared.tokens[tokens], up, shared.experts, at.expert, base);
            listed = at.expert;
        }
        told = {step, fresh, tokens, at.tile, at.expert < 0 ? up.shared_limit : up.limit};
        base += TILE_TOKENS;
        if (base < count) continue;
        base = 0;
        ++step;
    }
}

template <int BLOCKS>
__device__ __forceinline__ void load_tokens(uint4 (&x)[BLOCKS], const Up& up, int row) {
    const int column = warp_id() * BLOCKS * BLOCK_COLUMNS + lane_id() % 4 * LANE_COLUMNS;
    const uint16_t* part = row < 0 ? nullptr : up.x + row * up.stride_x + column;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) x[block] = row < 0 ? zero16() : load16(part + block * BLOCK_COLUMNS);
}

template <int SLICES, int BLOCKS>
__device__ __forceinline__ void multiply_turns(const Up& up, const Ring<SLICES, BLOCKS>& ring, Workplace& shared) {
    constexpr int WORDS = BLOCK_COLUMNS / LANE_COLUMNS, ROW_WORDS = Ring<SLICES, BLOCKS>::DIM / LANE_COLUMNS;
    const uint4* mine = ring.mine();
    uint4 x[BLOCKS];
    for (int turn = 0;; ++turn) {
        __syncthreads();
        const Turn& told = shared.turns[turn % TOLD];
        const int step = told.step;
        if (step < 0) return;
        if (told.fresh) load_tokens(x, up, shared.tokens[told.tokens].row[lane_id() / 4]);
        ring.wait(step);
        const uint4* words = mine + step % STAGES * (Ring<SLICES, BLOCKS>::STAGE / LANE_COLUMNS);
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
            multiply_block(d, words[block * WORDS], words[block * WORDS + ROW_WORDS], x[block]);
        keep_slice(shared.sums[turn % 2], d);
    }
}

template <int SLICES>
__device__ __forceinline__ void finish_turns(const Up& up, const Workplace& shared) {
    for (int turn = 0;; ++turn) {
        __syncthreads();
        if (turn > 0) {
            const Turn& done = shared.turns[(turn - 1) % TOLD];
#pragma unroll 1
            for (int i = 0; i < 2; ++i) {
                const int place = shared.tokens[done.tokens].place[lane_id() % 4 * 2 + i];
                uint16_t* hidden = up.hidden + static_cast<long long>(place) * up.width + done.tile * TILE_PAIRS;
                if (place >= 0) finish_pair<SLICES>(hidden, shared.sums[(turn - 1) % 2], i, done.limit);
            }
        }
        if (shared.turns[turn % TOLD].step < 0) return;
    }
}

template <int SLICES, int BLOCKS>
__global__ void __launch_bounds__((SLICES + HELPERS) * WARP, 2) up_grouped_kernel(Up up) {
    __shared__ Workplace shared;
    SGLING_DYNAMIC_SHARED(uint16_t, memory);
    const Ring<SLICES, BLOCKS> ring{memory, shared.landed};
    const Deal deal(up.tiles);
    if (warp_id() == SLICES && lane_id() == 0) {
        for (int stage = 0; stage < STAGES; ++stage) landing_init(shared.landed + stage);
        for (int step = 0; step < min(deal.shared.count, STAGES); ++step)
            ring.request(step, up.tile(-1, deal.shared.first + step));
    }
    pdl_wait();
    pdl_trigger();
    stage_experts(shared.experts, shared.bits, up.ids, up.rows * up.top, up.experts, [] {});
    if (warp_id() < SLICES)
        multiply_turns(up, ring, shared);
    else if (warp_id() == SLICES)
        tell_turns(up, deal, ring, shared);
    else
        finish_turns<SLICES>(up, shared);
}
