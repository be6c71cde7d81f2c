// Host side of the backward: workspace, descriptors, the four launches.
#pragma once

#include <algorithm>

#include "bwd_kernel.cuh"
#include "bwd_rows.cuh"
#include "fwd_launch.cuh"

namespace sink_fa3 {

struct BwdWorkspace {
    int64_t slots, dq_acc, rows, sink_part, turns, list, ends, bytes;  // offsets in bytes; the counter comes before `ends`
};

inline BwdWorkspace bwd_workspace(Problem const& pr) {
    auto const up = [](int64_t x) { return (x + 1023) / 1024 * 1024; };
    BwdWorkspace w{};
    w.slots = pr.total_q / kBwdRows + pr.batch;
    int64_t const tiles = w.slots * pr.heads;
    w.dq_acc = 0;
    w.rows = w.dq_acc + up(tiles * kDqTile * 4);
    w.sink_part = w.rows + up(tiles * 2 * kBwdRows * 4);
    w.turns = w.sink_part + up(tiles * 4);
    w.list = w.turns + up(tiles * 4);
    w.ends = w.list + blocks_at_most(pr.total_k, pr.total_k, pr.batch, kBwdKeys) * 8 + 16;
    w.bytes = w.ends + int64_t(pr.batch) * 4;
    return w;
}

template <typename C>
char const* bwd_launch_config(Problem const& pr, BwdArgs const& a, cudaStream_t stream) {
    using T = typename C::T;
    BwdWorkspace const w = bwd_workspace(pr);
    uint8_t* const ws = static_cast<uint8_t*>(a.workspace);
    BwdParams p{};
    p.cu_q = pr.cu_seqlens_q;
    p.cu_k = pr.cu_seqlens_k;
    p.batch = pr.batch;
    p.total_q = pr.total_q;
    p.heads = pr.heads;
    p.kv_heads = pr.kv_heads;
    p.heads_per_kv = pr.heads / pr.kv_heads;
    p.slots = int(w.slots);
    p.causal = pr.causal;
    p.window = pr.window;
    p.scale = pr.scale;
    p.c = pr.scale * kLog2e;
    p.lse = a.lse;
    p.sinks = a.sinks;
    p.dout = a.dout;
    p.out = a.out;
    p.do_token = a.do_token, p.do_head = a.do_head, p.o_token = a.o_token, p.o_head = a.o_head;
    p.dq = a.dq, p.dk = a.dk, p.dv = a.dv, p.dsinks = a.dsinks;
    p.dq_acc = reinterpret_cast<float*>(ws + w.dq_acc);
    p.rows = reinterpret_cast<float*>(ws + w.rows);
    p.sink_part = reinterpret_cast<float*>(ws + w.sink_part);
    int* const ends = reinterpret_cast<int*>(ws + w.ends);
    p.counter = ends - 1;
    p.turns = C::kDeterministic ? reinterpret_cast<int*>(ws + w.turns) : nullptr;
    int2* const list = reinterpret_cast<int2*>(ws + w.list);
    p.order = {p.cu_k, p.cu_q, ends, list, p.batch, sequences_together(pr.total_q, pr.batch, pr.kv_heads, kQueriesInL2), kBwdKeys,
               p.kv_heads, kQueriesInL2};
    int64_t const tickets = blocks_at_most(pr.total_k, pr.max_seqlen_k, pr.batch, kBwdKeys) * p.kv_heads;
    if (tickets >= (int64_t(1) << 31) - 65536) return "sink_fa3 bwd: total_k * kv_heads is too large";

    dim3 const tiles(p.slots, p.heads);
    plan_tickets<<<1, kPlanThreads, 0, stream>>>(p.order, p.counter, ends, list);
    if (pr.total_q > 0) {
        bwd_prepare<T><<<tiles, 256, 0, stream>>>(p);
        if (a.sinks.data != nullptr) bwd_sinks<<<p.heads, 256, 0, stream>>>(p);
    } else if (a.sinks.data != nullptr) {
        cudaMemsetAsync(a.dsinks, 0, size_t(sink_bytes(a.sinks.type)) * p.heads, stream);
    }
    if (tickets > 0) {
        CUtensorMap map_q, map_do, map_k, map_v, map_rows;
        void const* q = pr.total_q > 0 ? a.q : a.k;
        void const* dout = pr.total_q > 0 ? a.dout : a.k;
        if (!encode_rows(&map_q, pr.dtype, q, pr.total_q, pr.heads, 64, a.q_token, a.q_head, kBwdRows, 1) ||
            !encode_rows(&map_do, pr.dtype, dout, pr.total_q, pr.heads, 64, a.do_token, a.do_head, kBwdRows, 1) ||
            !encode_rows(&map_k, pr.dtype, a.k, pr.total_k, pr.kv_heads, 64, a.k_token, a.k_head, kBwdKeys, 1) ||
            !encode_rows(&map_v, pr.dtype, a.v, pr.total_k, pr.kv_heads, 64, a.v_token, a.v_head, kBwdKeys, 1) ||
            !encode_floats(&map_rows, p.rows, w.slots * pr.heads, 2 * kBwdRows))
            return "sink_fa3 bwd: no TMA descriptor for q, k, v or dout (base must be 16-byte aligned, strides multiples of 8 elements)";
        constexpr int kSmem = sizeof(BwdSmem<C>) + 1024;
        auto* const kernel = bwd_kernel<C>;
        static std::atomic<uint64_t> allowed;
        if (allow_shared_memory(allowed, kernel, kSmem) != cudaSuccess)
            return "sink_fa3 bwd: the device does not offer the shared memory of an sm_90 block";
        kernel<<<int(std::min<int64_t>(tickets, multiprocessors())), C::kThreads, kSmem, stream>>>(map_q, map_do, map_k, map_v, map_rows, p);
    }
    if (pr.total_q > 0) bwd_dq<T><<<tiles, 128, 0, stream>>>(p);
    return cudaGetLastError() == cudaSuccess ? nullptr : "sink_fa3 bwd: launch failed";
}

}  // namespace sink_fa3
