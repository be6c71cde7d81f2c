// Persistent scheduling: a ticket becomes a block of tokens of one (sequence, unit), a unit being a group of heads.
//
// The device hands the tickets out. Every ticket is work: `plan_tickets` sums the blocks of the sequences beforehand, so that
// nothing here needs the lengths on the host and a batch of one long and many short sequences has no empty tickets to skip.
// Tickets run through groups of neighbouring sequences, within a group through slices of units whose tensors fit in L2
// together, and within a slice from the blocks with the most work to those with the least: a block's level.
#pragma once

#include "launch.h"

namespace sink_fa3 {

constexpr int kPlanThreads = 512;
constexpr int kMostSequences = 8;  // of a group

// How many neighbouring sequences share a group: those whose tensors fit in L2 together, `together` tokens for all units.
inline int sequences_together(int total, int batch, int units, int together) {
    int64_t const tokens = (int64_t(total) * units + batch - 1) / batch;
    int64_t const fit = tokens > 0 ? together / tokens : kMostSequences;
    return int(fit < 1 ? 1 : fit > kMostSequences ? kMostSequences : fit);
}

// The order of a batch's blocks of `block` tokens, each taken for all `units`.
struct Order {
    int const* cu;       // of the tokens that are cut into blocks
    int const* cu_read;  // of the tokens that a unit reads all of, `together` of which fit in L2
    int const* ends;     // (groups,): tickets of groups 0 .. g
    int2 const* list;    // (blocks,): sequence and level of every block, a group's one after the other
    int batch, group_size, block, units, together;
};

// A block's place in the order: no more than so many blocks of its group have a higher level.
__host__ __device__ __forceinline__ int rank_of(int const (&blocks)[kMostSequences], int member, int level) {
    int rank = 0;
#pragma unroll
    for (int i = 0; i < kMostSequences; ++i) rank += max(0, blocks[i] - level - 1) + (i < member && blocks[i] > level);
    return rank;
}

__host__ __device__ __forceinline__ int groups_of(Order const& o) { return (o.batch + o.group_size - 1) / o.group_size; }
__host__ __device__ __forceinline__ int blocks_of(Order const& o, int b) { return (o.cu[b + 1] - o.cu[b] + o.block - 1) / o.block; }
// Blocks of the sequences of b's group; 0 beyond its end.
__host__ __device__ __forceinline__ void group_blocks(Order const& o, int b, int (&blocks)[kMostSequences]) {
    int const first = b / o.group_size * o.group_size;
#pragma unroll
    for (int i = 0; i < kMostSequences; ++i) blocks[i] = i < o.group_size && first + i < o.batch ? blocks_of(o, first + i) : 0;
}

// One block of threads. Writes ends and list and starts the counter.
static __global__ void __launch_bounds__(kPlanThreads) plan_tickets(__grid_constant__ Order const o, int* counter, int* ends, int2* list) {
    __shared__ int sums[kPlanThreads / 32];
    int const thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, groups = groups_of(o);
    if (thread == 0) *counter = 0;
    int before = 0;
    for (int base = 0; base < groups; base += kPlanThreads) {
        int const first = (base + thread) * o.group_size;
        int tickets = 0;
        for (int b = first; b < min(first + o.group_size, o.batch); ++b) tickets += blocks_of(o, b) * o.units;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            int const other = __shfl_up_sync(0xffffffff, tickets, d);
            if (lane >= d) tickets += other;
        }
        if (lane == 31) sums[warp] = tickets;
        __syncthreads();
        for (int w = 0; w < warp; ++w) tickets += sums[w];
        if (base + thread < groups) ends[base + thread] = before + tickets;
        for (int w = 0; w < kPlanThreads / 32; ++w) before += sums[w];
        __syncthreads();
    }
    for (int b = warp; b < o.batch; b += kPlanThreads / 32) {
        int blocks[kMostSequences];
        group_blocks(o, b, blocks);
        int const g = b / o.group_size, start = (g > 0 ? ends[g - 1] : 0) / o.units;
        int const own = blocks_of(o, b);
        for (int level = lane; level < own; level += 32) list[start + rank_of(blocks, b - g * o.group_size, level)] = int2{b, level};
    }
}

// A ticket's place. `level` counts a sequence's blocks from the one with the least work (0) to the one with the most.
struct Place {
    int sequence, unit, level;
};

// `ticket` is below ends[groups - 1].
__host__ __device__ __forceinline__ Place place_of(Order const& o, int ticket) {
    int lo = 0, hi = groups_of(o) - 1;
    while (lo < hi) {
        int const mid = (lo + hi) / 2;
        if (o.ends[mid] <= ticket) lo = mid + 1;
        else hi = mid;
    }
    int const start = (lo > 0 ? o.ends[lo - 1] : 0) / o.units, blocks = o.ends[lo] / o.units - start;
    int const first = lo * o.group_size, last = min(first + o.group_size, o.batch);
    int const fit = max(1, min(o.units, o.together / max(1, o.cu_read[last] - o.cu_read[first])));
    int const slices = (o.units + fit - 1) / fit, most = (o.units + slices - 1) / slices;  // slices of equal size
    int const local = ticket - start * o.units;
    int const slice = local / (most * blocks), rest = local - slice * most * blocks;
    int const here = min(most, o.units - slice * most);  // the last slice may be smaller
    int const nth = rest / here;
    int2 const block = o.list[start + nth];
    return {block.x, slice * most + rest - nth * here, block.y};
}

constexpr int kTokensInL2 = (24 << 20) / 256;  // whose keys and values of one head fill half of L2

struct TileParams {
    Order order;  // blocks of query tokens; units are groups of heads
    int const* cu_k;
    int splits;  // parts that a tile's keys are divided into
    int tokens;  // query tokens of a block
    int group;   // query heads of a block
    int causal, window;
};

// Everything a consumer needs to know about its tile; written to shared memory by the producer.
struct alignas(16) Tile {
    int q_begin;  // first row of the sequence in q
    int q_len;
    int token0;  // first token of the block within its sequence
    int head_group;
    int k_begin;
    int k_len;
    int n_min, n_max;  // key blocks [n_min, n_max); n_max < 0 ends the kernel
    int split, pad[3];
};

template <int kN, bool kSplit>
__host__ __device__ __forceinline__ Tile tile_of(TileParams const& p, int ticket) {
    Tile t{};
    if constexpr (kSplit) {  // parts of a tile have neighbouring tickets
        t.split = ticket % p.splits;
        ticket /= p.splits;
    }
    Place const at = place_of(p.order, ticket);
    t.head_group = at.unit;
    t.q_begin = p.order.cu[at.sequence];
    t.q_len = p.order.cu[at.sequence + 1] - t.q_begin;
    t.token0 = at.level * p.tokens;  // under a causal mask the last block sees the most keys
    t.k_begin = p.cu_k[at.sequence];
    t.k_len = p.cu_k[at.sequence + 1] - t.k_begin;
    int const offset = t.k_len - t.q_len;
    int const last = min(t.token0 + p.tokens, t.q_len) - 1;
    int const end = p.causal ? min(t.k_len, last + offset + 1) : t.k_len;
    int const begin = p.window > 0 ? max(0, t.token0 + offset - p.window + 1) : 0;
    t.n_max = end > 0 ? (end + kN - 1) / kN : 0;
    t.n_min = min(begin / kN, t.n_max);
    if constexpr (kSplit) {
        int const all = t.n_max - t.n_min, first = t.n_min;
        t.n_min = first + all * t.split / p.splits;
        t.n_max = first + all * (t.split + 1) / p.splits;
    }
    return t;
}

}  // namespace sink_fa3
