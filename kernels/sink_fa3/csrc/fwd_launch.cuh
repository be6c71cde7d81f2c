// Host side of the forward: descriptors, tile counts, launch.
#pragma once

#include <algorithm>

#include "fwd_kernel.cuh"
#include "tensor_map.h"

namespace sink_fa3 {

// Query heads that share a tile: the largest divisor of heads / kv_heads that fits.
inline int packed_heads(int heads_per_kv, int limit) {
    int g = std::min(heads_per_kv, limit);
    while (heads_per_kv % g != 0) --g;
    return g;
}

inline int multiprocessors() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

template <typename C>
char const* fwd_launch_config(Problem const& pr, FwdArgs const& a, cudaStream_t stream) {
    FwdParams p{};
    p.sinks = a.sinks;
    p.out = a.out;
    p.lse = a.lse;
    p.counter = a.counter;
    p.total_q = pr.total_q;
    p.heads = pr.heads;
    p.heads_per_kv = pr.heads / pr.kv_heads;
    p.c = pr.scale * kLog2e;
    TileParams& t = p.tiles;
    t.cu_q = pr.cu_seqlens_q;
    t.cu_k = pr.cu_seqlens_k;
    t.batch = pr.batch;
    t.group = packed_heads(p.heads_per_kv, C::kM);
    t.tokens = std::min(C::kM / t.group, 256);
    t.head_groups = pr.heads / t.group;
    t.blocks = (std::min(pr.max_seqlen_q, pr.total_q) + t.tokens - 1) / t.tokens;
    t.causal = pr.causal;
    t.window = pr.window;
    // Half of L2 for the keys and values that tiles in flight walk over.
    int64_t const unit_bytes = int64_t(std::max(1, std::min(pr.max_seqlen_k, pr.total_k))) * C::D * 4;
    int const units = t.batch * t.head_groups;
    t.units_per_group = int(std::clamp<int64_t>((int64_t(24) << 20) / unit_bytes, 1, units));
    int const groups = (units + t.units_per_group - 1) / t.units_per_group;
    int64_t const tickets = int64_t(groups) * t.units_per_group * t.blocks;
    if (tickets >= (int64_t(1) << 31) - 65536) return "sink_fa3 fwd: batch * heads * max_seqlen_q is too large";
    t.tickets = int(tickets);
    if (t.tickets == 0) return nullptr;

    CUtensorMap map_q, map_k, map_v;
    void const* k = pr.total_k > 0 ? a.k : a.q;
    void const* v = pr.total_k > 0 ? a.v : a.q;
    if (!encode_rows(&map_q, pr.dtype, a.q, pr.total_q, pr.heads, C::D, a.q_token, a.q_head, t.tokens, t.group) ||
        !encode_rows(&map_k, pr.dtype, k, pr.total_k, pr.kv_heads, C::D, a.k_token, a.k_head, C::kN, 1) ||
        !encode_rows(&map_v, pr.dtype, v, pr.total_k, pr.kv_heads, C::D, a.v_token, a.v_head, C::kN, 1))
        return "sink_fa3 fwd: no TMA descriptor for q, k or v (base must be 16-byte aligned, strides multiples of 8 elements)";

    constexpr int kSmem = sizeof(FwdSmem<C>);
    auto* const kernel = fwd_kernel<C>;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem) != cudaSuccess)
        return "sink_fa3 fwd: the device does not offer the shared memory of an sm_90 block";
    cudaMemsetAsync(a.counter, 0, sizeof(int), stream);
    kernel<<<std::min(t.tickets, multiprocessors()), C::kThreads, kSmem, stream>>>(map_q, map_k, map_v, p);
    return cudaGetLastError() == cudaSuccess ? nullptr : "sink_fa3 fwd: launch failed";
}

}  // namespace sink_fa3
