// Backward, the memory-bound ends: before the main kernel, per row lse and rowsum(dO * O), zeroed dQ accumulators and the
// sinks' gradient; after it, dQ in the output type.
#pragma once

#include "bwd_params.cuh"

namespace sink_fa3 {

// Sum of products of eight packed elements each.
template <typename T>
__device__ __forceinline__ float dot8(uint4 a, uint4 b) {
    uint32_t const x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 u, w;
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            u = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 const*>(&x[i]));
            w = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 const*>(&y[i]));
        } else {
            u = __half22float2(*reinterpret_cast<__half2 const*>(&x[i]));
            w = __half22float2(*reinterpret_cast<__half2 const*>(&y[i]));
        }
        sum = fmaf(u.x, w.x, sum);
        sum = fmaf(u.y, w.y, sum);
    }
    return sum;
}

// Whether any key block works on the tile of `rows` queries from `row0` on of sequence b. If so, the first one stores.
__host__ __device__ __forceinline__ bool has_key_block(BwdParams const& p, int b, int row0, int rows) {
    int const k_len = p.cu_k[b + 1] - p.cu_k[b];
    int const offset = k_len - (p.cu_q[b + 1] - p.cu_q[b]);
    int const key = first_key_block(p, row0 / kBwdRows, offset) * kBwdKeys;
    return key < k_len && (!p.causal || key - offset < row0 + min(rows, kBwdRows));
}

// Grid (slots, heads), 256 threads: eight threads a row. dsink_h = -sum_i exp(s_h - lse_i) * rowsum(dO_i * O_i); the sum over
// a tile here, over tiles in bwd_sinks, both in a fixed order.
template <typename T>
__global__ void __launch_bounds__(256) bwd_prepare(__grid_constant__ BwdParams const p) {
    int const slot = blockIdx.x, head = blockIdx.y, thread = threadIdx.x;
    int64_t const tile = int64_t(head) * p.slots + slot;
    int const b = sequence_of_slot(p, slot);
    int const q_begin = p.cu_q[b];
    int const row0 = (slot - first_slot(p, b)) * kBwdRows;
    int const valid = min(kBwdRows, p.cu_q[b + 1] - q_begin - row0);  // <= 0: a slot without rows
    float sink_term = 0.f;
    if (valid > 0) {
        if (p.turns == nullptr || !has_key_block(p, b, row0, valid)) {
            float4* acc = reinterpret_cast<float4*>(p.dq_acc + tile * kDqTile);
#pragma unroll
            for (int i = 0; i < kDqTile / 4 / 256; ++i) acc[thread + 256 * i] = float4{0.f, 0.f, 0.f, 0.f};
        }
        uint4 x[2], y[2];
        int const part = thread & 7;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int const row = (thread >> 3) + 32 * i;
            int64_t const token = q_begin + row0 + row;
            if (row < valid) {
                x[i] = *reinterpret_cast<uint4 const*>(static_cast<T const*>(p.dout) + token * p.do_token + head * p.do_head + part * 8);
                y[i] = *reinterpret_cast<uint4 const*>(static_cast<T const*>(p.out) + token * p.o_token + head * p.o_head + part * 8);
            } else {
                x[i] = y[i] = uint4{0, 0, 0, 0};
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int const row = (thread >> 3) + 32 * i;
            float delta = dot8<T>(x[i], y[i]);
            delta += __shfl_xor_sync(0xffffffff, delta, 1);
            delta += __shfl_xor_sync(0xffffffff, delta, 2);
            delta += __shfl_xor_sync(0xffffffff, delta, 4);
            if (part == 0) {
                // A row outside the sequence, or one that sees neither key nor sink, gets lse = +inf: its P is 0.
                float lse = row < valid ? p.lse[int64_t(head) * p.total_q + q_begin + row0 + row] : -neg_inf();
                if (lse == neg_inf()) lse = -neg_inf();
                float* const rows = p.rows + tile * (2 * kBwdRows);
                rows[row] = lse * kLog2e;
                rows[kBwdRows + row] = delta;
                if (p.sinks.data != nullptr && lse != -neg_inf()) sink_term += exp2_approx((load_sink(p.sinks, head) - lse) * kLog2e) * delta;
            }
        }
    }
    if (p.turns != nullptr && thread == 0) p.turns[tile] = 0;
    if (p.sinks.data == nullptr) return;
    __shared__ float sums[8];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sink_term += __shfl_xor_sync(0xffffffff, sink_term, d);
    if ((thread & 31) == 0) sums[thread >> 5] = sink_term;
    __syncthreads();
    if (thread == 0) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += sums[i];
        p.sink_part[tile] = sum;
    }
}

// Grid (heads), 256 threads.
static __global__ void __launch_bounds__(256) bwd_sinks(__grid_constant__ BwdParams const p) {
    float const* part = p.sink_part + int64_t(blockIdx.x) * p.slots;
    float sum = 0.f;
    for (int i = threadIdx.x; i < p.slots; i += 256) sum += part[i];
    __shared__ float sums[8];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float all = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) all += sums[i];
        store_sink_gradient(p.dsinks, p.sinks.type, blockIdx.x, -all);
    }
}

// Grid (slots, heads), 128 threads, each with the accumulator fragments of the thread that made them.
template <typename T>
__global__ void __launch_bounds__(128) bwd_dq(__grid_constant__ BwdParams const p) {
    int const slot = blockIdx.x, head = blockIdx.y, thread = threadIdx.x, lane = thread & 31;
    int const b = sequence_of_slot(p, slot);
    int const q_begin = p.cu_q[b];
    int const row0 = (slot - first_slot(p, b)) * kBwdRows;
    int const valid = min(kBwdRows, p.cu_q[b + 1] - q_begin - row0);
    if (valid <= 0) return;
    __shared__ alignas(128) uint8_t tile[kBwdRows * 128];
    float4 const* acc = reinterpret_cast<float4 const*>(p.dq_acc + (int64_t(head) * p.slots + slot) * kDqTile);
    uint32_t const base = smem_addr(tile);
    uint32_t const row = (thread >> 5) * 16 + (lane & 15);
    float4 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = acc[j * 128 + thread];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float4 const u = x[2 * j], w = x[2 * j + 1];
        float const s = p.scale;
        stmatrix_x4(base + sw128(row, 2 * j + (lane >> 4)), pack2<T>(u.x * s, u.y * s), pack2<T>(u.z * s, u.w * s),
                    pack2<T>(w.x * s, w.y * s), pack2<T>(w.z * s, w.w * s));
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int const r = (thread + 128 * i) / 8, chunk = thread % 8;
        if (r < valid) {
            uint4 const value = *reinterpret_cast<uint4 const*>(tile + sw128(r, chunk));
            int64_t const out_row = int64_t(q_begin + row0 + r) * p.heads + head;
            *reinterpret_cast<uint4*>(static_cast<T*>(p.dq) + out_row * 64 + chunk * 8) = value;
        }
    }
}

}  // namespace sink_fa3
