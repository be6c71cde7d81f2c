// Chunk borders of the window backward. The last 8 key blocks of a chunk are seen by the first tiles of the next one too: each
// of the two CTAs leaves its part of dK and dV in fp32, and `border_kernel` adds them in a fixed order and sums dsinks.
#pragma once

#include "sinks.h"
#include "window_common.cuh"

namespace sink_fa3::window {
namespace {

constexpr int kHalo = kBlocks - 1;  // key blocks shared by neighbouring chunks
constexpr int kBlockElements = kTileTokens * kHeadDim;

struct BwdParams {
    CUtensorMap q, k, v, dout, dq, dk, dv;
    float const* lse;
    Sinks sinks;
    Sequences seqs;
    void *dk_rows, *dv_rows;  // of dk and dv, for the border kernel
    float* border;        // (2: dV, dK; 2: head, tail; chunks; kv_heads; kHalo; kBlockElements), accumulator order
    float* dsinks_parts;  // (chunks, heads)
    int total, kv_heads, window;
    int tiles, per_chunk, chunks;
    float scale, scale_log2;
};

__device__ __forceinline__ float* border_block(BwdParams const& p, int which, int tail, int chunk, int kv_head, int block) {
    return p.border + ((((which * 2 + tail) * static_cast<int64_t>(p.chunks) + chunk) * p.kv_heads + kv_head) * kHalo + block) *
                          kBlockElements;
}

// One CTA adds a chunk's tail to the next chunk's head for one KV head, for dV (z = 0) or dK (1).
template <typename T>
__global__ void __launch_bounds__(128) border_kernel(__grid_constant__ BwdParams const p, void* dsinks) {
    int const chunk = blockIdx.x, kv_head = blockIdx.y, which = blockIdx.z, heads = p.kv_heads * kGroup;
    int const first = chunk * p.per_chunk, count = min(p.per_chunk, p.tiles - first);
    int const key = threadIdx.x / 8, d0 = threadIdx.x % 8 * 8;
    float const scale = which == 0 ? 1.f : p.scale;
    T* const out = static_cast<T*>(which == 0 ? p.dv_rows : p.dk_rows);
    for (int j = max(0, kHalo - count); j < kHalo; ++j) {
        int const token = (first + count - kHalo + j) * kTileTokens + key;
        float const* const tail = border_block(p, which, 1, chunk, kv_head, j);
        float const* const head = chunk + 1 < p.chunks ? border_block(p, which, 0, chunk + 1, kv_head, j) : nullptr;
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float y[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                // Accumulator order: element (key / 8, d / 8 % 2, key % 2) of thread (d / 16, d % 8, key % 8 / 2).
                int const d = d0 + 2 * i + e;
                int const at = (key / 8 * 4 + d / 8 % 2 * 2 + key % 2) * 128 + d / 16 * 32 + d % 8 * 4 + key % 8 / 2;
                y[e] = (tail[at] + (head == nullptr ? 0.f : head[at])) * scale;
            }
            x[i] = pack2<T>(y[0], y[1]);
        }
        if (token < p.total)
            *reinterpret_cast<uint4*>(out + (static_cast<int64_t>(token) * p.kv_heads + kv_head) * kHeadDim + d0) =
                make_uint4(x[0], x[1], x[2], x[3]);
    }
    if (dsinks != nullptr && chunk == 0 && which == 0 && threadIdx.x < kGroup) {
        int const head = kv_head * kGroup + threadIdx.x;
        float sum = 0.f;
        for (int c = 0; c < p.chunks; ++c) sum += p.dsinks_parts[c * heads + head];
        store_sink_gradient(dsinks, p.sinks.type, head, sum);
    }
}

}  // namespace
}  // namespace sink_fa3::window
