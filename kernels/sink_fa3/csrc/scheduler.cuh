// Persistent forward scheduling: a ticket becomes a block of query tokens of one (sequence, head group).
//
// Tickets run through "units" (sequence x head group) in groups whose keys and values fit in L2 together, and inside a
// group from the last block of queries to the first: under a causal mask the longest work comes first, over sequences of
// any lengths, because a block's work grows with its index alone. The device hands the tickets out, so nothing here needs
// the lengths on the host; a ticket past the end of its sequence is skipped.
#pragma once

#include "launch.h"

namespace sink_fa3 {

struct TileParams {
    int const* cu_q;
    int const* cu_k;
    int batch, head_groups, units_per_group, blocks, tickets;
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
};

template <int kN>
__device__ __forceinline__ bool decode_ticket(TileParams const& p, int ticket, Tile& t) {
    int const per_group = p.units_per_group * p.blocks;
    int const g = ticket / per_group;
    int const r = ticket - g * per_group;
    int const unit = g * p.units_per_group + r % p.units_per_group;
    int const block = p.blocks - 1 - r / p.units_per_group;
    int const b = unit / p.head_groups;
    if (b >= p.batch) return false;
    t.head_group = unit - b * p.head_groups;
    t.q_begin = p.cu_q[b];
    t.q_len = p.cu_q[b + 1] - t.q_begin;
    t.token0 = block * p.tokens;
    if (t.token0 >= t.q_len) return false;
    t.k_begin = p.cu_k[b];
    t.k_len = p.cu_k[b + 1] - t.k_begin;
    int const offset = t.k_len - t.q_len;
    int const last = min(t.token0 + p.tokens, t.q_len) - 1;
    int const end = p.causal ? min(t.k_len, last + offset + 1) : t.k_len;
    int const begin = p.window > 0 ? max(0, t.token0 + offset - p.window + 1) : 0;
    t.n_max = end > 0 ? (end + kN - 1) / kN : 0;
    t.n_min = min(begin / kN, t.n_max);
    return true;
}

}  // namespace sink_fa3
