// Persistent scheduling: a ticket becomes a block of tokens of one (sequence, unit), a unit being a group of heads.
//
// The device hands the tickets out. Every ticket is work: `plan_tickets` sums the blocks of the sequences beforehand, so that
// nothing here needs the lengths on the host and a batch of one long and many short sequences has no empty tickets to skip.
// Within a sequence the tickets run through groups of units whose tensors fit in L2 together, and inside a group through the
// blocks in the order that puts the longest work first.
#pragma once

#include "launch.h"

namespace sink_fa3 {

constexpr int kPlanThreads = 256;

// One block. ends[b]: the tickets of sequences 0 .. b, `per_block` for every `block` tokens begun. Also starts the counter.
static __global__ void __launch_bounds__(kPlanThreads) plan_tickets(int const* cu, int batch, int block, int per_block, int* counter,
                                                                    int* ends) {
    __shared__ int sums[kPlanThreads / 32];
    int const thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    if (thread == 0) *counter = 0;
    int before = 0;
    for (int base = 0; base < batch; base += kPlanThreads) {
        int const b = base + thread;
        int tickets = b < batch ? (max(0, cu[b + 1] - cu[b]) + block - 1) / block * per_block : 0;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            int const other = __shfl_up_sync(0xffffffff, tickets, d);
            if (lane >= d) tickets += other;
        }
        if (lane == 31) sums[warp] = tickets;
        __syncthreads();
        for (int w = 0; w < warp; ++w) tickets += sums[w];
        if (b < batch) ends[b] = before + tickets;
        for (int w = 0; w < kPlanThreads / 32; ++w) before += sums[w];
        __syncthreads();
    }
}

// A ticket's place: sequence, unit, and its block counted in the order of the tickets.
struct Place {
    int sequence, unit, nth;
};

// `ticket` is below ends[batch - 1]. blocks_of(b) and together(b): a sequence's blocks, and how many units share L2 there.
template <typename Blocks, typename Together>
__host__ __device__ __forceinline__ Place place_of(int const* ends, int batch, int units, int ticket, Blocks blocks_of, Together together) {
    int lo = 0, hi = batch - 1;
    while (lo < hi) {
        int const mid = (lo + hi) / 2;
        if (ends[mid] <= ticket) lo = mid + 1;
        else hi = mid;
    }
    int const local = ticket - (lo > 0 ? ends[lo - 1] : 0);
    int const most = together(lo), blocks = blocks_of(lo);
    int const group = local / (most * blocks), rest = local - group * most * blocks;
    int const here = min(most, units - group * most);  // the last group may be smaller
    int const nth = rest / here;
    return {lo, group * most + rest - nth * here, nth};
}

struct TileParams {
    int const* cu_q;
    int const* cu_k;
    int const* ends;
    int batch, head_groups;
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
    constexpr int kTogether = (24 << 20) / 256;  // tokens whose keys and values of one head fill half of L2
    Tile t;
    t.split = 0;
    if constexpr (kSplit) {  // parts of a tile have neighbouring tickets
        t.split = ticket % p.splits;
        ticket /= p.splits;
    }
    Place const at = place_of(
        p.ends, p.batch, p.head_groups, ticket, [&](int b) { return (p.cu_q[b + 1] - p.cu_q[b] + p.tokens - 1) / p.tokens; },
        [&](int b) { return max(1, min(p.head_groups, kTogether / max(1, p.cu_k[b + 1] - p.cu_k[b]))); });
    t.head_group = at.unit;
    t.q_begin = p.cu_q[at.sequence];
    t.q_len = p.cu_q[at.sequence + 1] - t.q_begin;
    // The last block first: under a causal mask it sees the most keys.
    t.token0 = ((t.q_len + p.tokens - 1) / p.tokens - 1 - at.nth) * p.tokens;
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
