// Host side of the backward: workspace, descriptors, the four launches.
#pragma once

#include <algorithm>

#include "bwd_kernel.cuh"
#include "bwd_rows.cuh"
#include "fwd_launch.cuh"

namespace sink_fa3 {

struct BwdWorkspace {
    int64_t slots, dq_acc, rows, sink_part, turns, counter, bytes;  // offsets in bytes
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
    w.counter = w.turns + up(tiles * 4);
    w.bytes = w.counter + 1024;
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
    p.counter = reinterpret_cast<int*>(ws + w.counter);
    p.turns = C::kDeterministic ? reinterpret_cast<int*>(ws + w.turns) : nullptr;
    int const units = p.batch * p.kv_heads;
    p.blocks = (std::min(pr.max_seqlen_k, pr.total_k) + kBwdKeys - 1) / kBwdKeys;
    // Half of L2 for one head's Q, dO and dQ accumulators of the units in flight; groups of equal size.
    int64_t const unit_bytes = int64_t(std::max(1, std::min(pr.max_seqlen_q, pr.total_q))) * 64 * 8;
    int const fit = int(std::clamp<int64_t>((int64_t(24) << 20) / unit_bytes, 1, std::max(1, units)));
    int const groups = std::max(1, (units + fit - 1) / fit);
    p.units_per_group = (units + groups - 1) / groups;
    int64_t const tickets = int64_t(groups) * p.units_per_group * p.blocks;
    if (tickets >= (int64_t(1) << 31) - 65536) return "sink_fa3 bwd: batch * kv_heads * max_seqlen_k is too large";
    p.tickets = int(tickets);

    dim3 const tiles(p.slots, p.heads);
    cudaMemsetAsync(p.counter, 0, sizeof(int), stream);
    if (pr.total_q > 0) {
        bwd_prepare<T><<<tiles, 256, 0, stream>>>(p);
        if (a.sinks != nullptr) bwd_sinks<<<p.heads, 256, 0, stream>>>(p);
    } else if (a.sinks != nullptr) {
        cudaMemsetAsync(a.dsinks, 0, sizeof(float) * p.heads, stream);
    }
    if (p.tickets > 0) {
        CUtensorMap map_q, map_do, map_k, map_v;
        void const* q = pr.total_q > 0 ? a.q : a.k;
        void const* dout = pr.total_q > 0 ? a.dout : a.k;
        if (!encode_rows(&map_q, pr.dtype, q, pr.total_q, pr.heads, 64, a.q_token, a.q_head, kBwdRows, 1) ||
            !encode_rows(&map_do, pr.dtype, dout, pr.total_q, pr.heads, 64, a.do_token, a.do_head, kBwdRows, 1) ||
            !encode_rows(&map_k, pr.dtype, a.k, pr.total_k, pr.kv_heads, 64, a.k_token, a.k_head, kBwdKeys, 1) ||
            !encode_rows(&map_v, pr.dtype, a.v, pr.total_k, pr.kv_heads, 64, a.v_token, a.v_head, kBwdKeys, 1))
            return "sink_fa3 bwd: no TMA descriptor for q, k, v or dout (base must be 16-byte aligned, strides multiples of 8 elements)";
        constexpr int kSmem = sizeof(BwdSmem<C>) + 1024;
        auto* const kernel = bwd_kernel<C>;
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem) != cudaSuccess)
            return "sink_fa3 bwd: the device does not offer the shared memory of an sm_90 block";
        kernel<<<std::min(p.tickets, multiprocessors()), C::kThreads, kSmem, stream>>>(map_q, map_do, map_k, map_v, p);
    }
    if (pr.total_q > 0) bwd_dq<T><<<tiles, 128, 0, stream>>>(p);
    return cudaGetLastError() == cudaSuccess ? nullptr : "sink_fa3 bwd: launch failed";
}

}  // namespace sink_fa3
