// Backward: what its four kernels share. Rows (queries of one head) are grouped in tiles of 64 that never straddle
// sequences; a tile has a slot in the workspace, and sequence b's first slot is cu_seqlens_q[b] / 64 + b, which needs no
// prefix sum and leaves at most one unused slot a sequence.
#pragma once

#include "launch.h"
#include "mask.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

namespace sink_fa3 {

constexpr int kBwdRows = 64;    // queries of a tile
constexpr int kBwdKeys = 128;   // keys of a block
constexpr int kDqTile = kBwdRows * 64;  // floats of a dQ accumulator tile

struct BwdParams {
    int const* cu_q;
    int const* cu_k;
    int batch, total_q, heads, kv_heads, heads_per_kv, slots;
    Order order;  // blocks of keys; units are KV heads
    int causal, window;
    float scale, c;       // c = scale * log2(e)
    float const* lse;     // (heads, total_q), natural logarithm
    Sinks sinks;
    void const *dout, *out;
    int64_t do_token, do_head, o_token, o_head;
    void *dq, *dk, *dv;
    void* dsinks;
    // workspace
    float* dq_acc;     // (heads, slots, 4096) in the accumulator order of the dQ warpgroup
    float* rows;       // (heads, slots, 2, 64): lse * log2(e), then rowsum(dO * O)
    float* sink_part;  // (heads, slots)
    int* counter;
    int* turns;  // (heads, slots), deterministic mode: how many key blocks have added their dQ
};

__host__ __device__ __forceinline__ int first_slot(BwdParams const& p, int b) { return p.cu_q[b] / kBwdRows + b; }

// The sequence a slot belongs to.
__device__ __forceinline__ int sequence_of_slot(BwdParams const& p, int slot) {
    int lo = 0, hi = p.batch - 1;
    while (lo < hi) {
        int const mid = (lo + hi + 1) / 2;
        if (first_slot(p, mid) <= slot) lo = mid;
        else hi = mid - 1;
    }
    return lo;
}

// The first key block that adds to query tile m; `offset` is len_k - len_q.
__host__ __device__ __forceinline__ int first_key_block(BwdParams const& p, int m, int offset) {
    int const key = p.window > 0 ? m * kBwdRows + offset - p.window + 1 : 0;  // first key that the tile's first query sees
    return max(0, key) / kBwdKeys;
}

}  // namespace sink_fa3
