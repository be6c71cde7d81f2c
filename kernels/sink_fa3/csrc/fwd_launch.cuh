// Host side of the forward: how the keys are split, descriptors, launches.
#pragma once

#include <algorithm>

#include "fwd_combine.cuh"
#include "host.h"
#include "tensor_map.h"

namespace sink_fa3 {

// Query heads that share a tile: the largest divisor of heads / kv_heads that fits.
inline int packed_heads(int heads_per_kv, int limit) {
    int g = std::min(heads_per_kv, limit);
    while (heads_per_kv % g != 0) --g;
    return g;
}

// Upper bound of the number of blocks of `block` tokens.
inline int64_t blocks_at_most(int total, int longest, int batch, int block) {
    int64_t const each = (std::min(longest, total) + block - 1) / block;
    return std::min(batch * each, int64_t(total / block) + batch);
}

// Which forward runs. Only queries that are fewer than their keys, that is a KV cache, get split keys: elsewhere the order of
// the sums must not depend on what else is in the batch.
struct FwdPlan {
    int splits = 1;
    bool few_rows = false;  // one warpgroup's tile holds all queries of a sequence
};

inline FwdPlan fwd_plan(Problem const& pr, int multiprocessors) {
    FwdPlan plan;
    int const longest_k = std::min(pr.max_seqlen_k, pr.total_k), longest_q = std::min(pr.max_seqlen_q, pr.total_q);
    if (longest_q >= longest_k || pr.total_q == 0) return plan;
    int const heads_per_kv = pr.heads / pr.kv_heads;
    int const small = packed_heads(heads_per_kv, 64);
    plan.few_rows = longest_q <= 64 / small;
    int const rows = plan.few_rows ? 64 : 192;
    int const group = packed_heads(heads_per_kv, rows), tokens = rows / group;
    int key_blocks = (longest_k + 127) / 128;
    if (pr.window > 0) key_blocks = std::min(key_blocks, (pr.window + tokens - 2) / 128 + 2);
    constexpr int kLeast = 4;  // key blocks of a part
    if (key_blocks < 2 * kLeast) return {};
    int64_t const tiles = blocks_at_most(pr.total_q, pr.max_seqlen_q, pr.batch, tokens) * (pr.heads / group);
    int64_t const slots = int64_t(multiprocessors) * (plan.few_rows ? 2 : 1);
    if (!plan.few_rows && tiles >= slots) return plan;
    // Rounds of parts over the slots, each as long as its key blocks and about one more for its start and end.
    int64_t best = 0;
    for (int s = 1; s <= std::min(key_blocks / kLeast, 64); ++s) {
        int64_t const cost = (tiles * s + slots - 1) / slots * ((key_blocks + s - 1) / s + 1);
        if (s == 1 || cost < best) best = cost, plan.splits = s;
    }
    return plan;
}

struct FwdWorkspace {
    int64_t part_out, part_lse, list, ends, bytes;  // offsets in bytes; the counter comes before `ends`
};

inline FwdWorkspace fwd_workspace(Problem const& pr, FwdPlan const& plan, int tokens) {
    auto const up = [](int64_t x) { return (x + 255) / 256 * 256; };
    bool const parts = plan.few_rows || plan.splits > 1;
    int64_t const rows = parts ? int64_t(plan.splits) * pr.total_q * pr.heads : 0;
    FwdWorkspace w{};
    w.part_lse = up(rows * pr.head_dim * 4);
    w.list = w.part_lse + up(rows * 4);
    w.ends = w.list + blocks_at_most(pr.total_q, pr.total_q, pr.batch, tokens) * 8 + 16;
    w.bytes = w.ends + int64_t(pr.batch) * 4;
    return w;
}

template <typename C>
char const* fwd_launch_config(Problem const& pr, FwdArgs const& a, FwdPlan const& plan, cudaStream_t stream) {
    int const group = packed_heads(pr.heads / pr.kv_heads, C::kM), tokens = std::min(C::kM / group, 256);
    FwdWorkspace const w = fwd_workspace(pr, plan, tokens);
    uint8_t* const ws = static_cast<uint8_t*>(a.workspace);
    FwdParams p{};
    p.sinks = a.sinks;
    p.out = a.out;
    p.lse = a.lse;
    p.part_out = reinterpret_cast<float*>(ws + w.part_out);
    p.part_lse = reinterpret_cast<float*>(ws + w.part_lse);
    int* const ends = reinterpret_cast<int*>(ws + w.ends);
    p.counter = ends - 1;
    p.total_q = pr.total_q;
    p.heads = pr.heads;
    p.heads_per_kv = pr.heads / pr.kv_heads;
    p.c = pr.scale * kLog2e;
    TileParams& t = p.tiles;
    t.cu_k = pr.cu_seqlens_k;
    t.splits = plan.splits;
    t.group = group;
    t.tokens = tokens;
    int const head_groups = pr.heads / t.group;
    int2* const list = reinterpret_cast<int2*>(ws + w.list);
    t.order = {pr.cu_seqlens_q, pr.cu_seqlens_k, ends, list, pr.batch, sequences_together(pr.total_k, pr.batch, head_groups, kTokensInL2),
               t.tokens, head_groups, kTokensInL2};
    t.causal = pr.causal;
    t.window = pr.window;
    if (pr.total_q == 0) return nullptr;
    int64_t const tickets = blocks_at_most(pr.total_q, pr.max_seqlen_q, pr.batch, t.tokens) * head_groups * t.splits;
    if (tickets >= (int64_t(1) << 31) - 65536) return "sink_fa3 fwd: total_q * heads is too large";
    if (tickets == 0) return nullptr;

    CUtensorMap map_q, map_k, map_v;
    void const* k = pr.total_k > 0 ? a.k : a.q;
    void const* v = pr.total_k > 0 ? a.v : a.q;
    if (!encode_rows(&map_q, pr.dtype, a.q, pr.total_q, pr.heads, C::D, a.q_token, a.q_head, t.tokens, t.group) ||
        !encode_rows(&map_k, pr.dtype, k, pr.total_k, pr.kv_heads, C::D, a.k_token, a.k_head, C::kN, 1) ||
        !encode_rows(&map_v, pr.dtype, v, pr.total_k, pr.kv_heads, C::D, a.v_token, a.v_head, C::kN, 1))
        return "sink_fa3 fwd: no TMA descriptor for q, k or v (base must be 16-byte aligned, strides multiples of 8 elements)";

    constexpr int kSmem = sizeof(FwdSmem<C>);
    auto* const kernel = fwd_kernel<C>;
    static std::atomic<uint64_t> allowed;
    if (allow_shared_memory(allowed, kernel, kSmem) != cudaSuccess)
        return "sink_fa3 fwd: the device does not offer the shared memory of an sm_90 block";
    plan_tickets<<<1, kPlanThreads, 0, stream>>>(t.order, p.counter, ends, list);
    int const blocks = int(std::min<int64_t>(tickets, int64_t(multiprocessors()) * C::kBlocksPerSm));
    kernel<<<blocks, C::kThreads, kSmem, stream>>>(map_q, map_k, map_v, p);
    if constexpr (C::kSplit) {
        constexpr int kRows = kCombineThreads / kRowThreads;
        int64_t const rows = int64_t(pr.total_q) * pr.heads;
        fwd_combine<typename C::T><<<unsigned((rows + kRows - 1) / kRows), kCombineThreads, 0, stream>>>(p);
    }
    return cudaGetLastError() == cudaSuccess ? nullptr : "sink_fa3 fwd: launch failed";
}

}  // namespace sink_fa3
