// Forward with split keys: adds the parts of a row and the sink, which joins here, once.
#pragma once

#include "fwd_kernel.cuh"

namespace sink_fa3 {

constexpr int kCombineThreads = 128;
constexpr int kRowThreads = 16;  // of a row, four columns each

// Grid: kCombineThreads / kRowThreads rows (token, head) a block. Sums run in the order of the parts: the same bits every time.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads) fwd_combine(__grid_constant__ FwdParams const p) {
    int64_t const rows = int64_t(p.total_q) * p.heads;
    int64_t const wanted = int64_t(blockIdx.x) * (kCombineThreads / kRowThreads) + threadIdx.x / kRowThreads;
    int64_t const row = min(wanted, rows - 1);  // all lanes take part in the shuffles
    int const part = threadIdx.x % kRowThreads;
    int const token = int(row / p.heads), head = int(row - int64_t(token) * p.heads);
    float mc = neg_inf();
    for (int s = part; s < p.tiles.splits; s += kRowThreads) mc = fmaxf(mc, p.part_lse[s * rows + row]);
#pragma unroll
    for (int d = 1; d < kRowThreads; d *= 2) mc = fmaxf(mc, __shfl_xor_sync(0xffffffff, mc, d));
    float4 sum{0.f, 0.f, 0.f, 0.f};
    float weights = 0.f;
    if (mc != neg_inf()) {
#pragma unroll 4
        for (int s = 0; s < p.tiles.splits; ++s) {
            float const lse = p.part_lse[s * rows + row];
            if (lse == neg_inf()) continue;  // its row of part_out was never written
            float const w = exp2_approx((lse - mc) * kLog2e);
            float4 const x = *reinterpret_cast<float4 const*>(p.part_out + (s * rows + row) * 64 + 4 * part);
            weights += w;
            sum.x = fmaf(w, x.x, sum.x);
            sum.y = fmaf(w, x.y, sum.y);
            sum.z = fmaf(w, x.z, sum.z);
            sum.w = fmaf(w, x.w, sum.w);
        }
    }
    float factor, lse;
    finish_row(mc * kLog2e, weights, p.sinks.data != nullptr ? load_sink(p.sinks, head) * kLog2e : neg_inf(), factor, lse);
    if (wanted >= rows) return;
    *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + row * 64 + 4 * part) =
        uint2{pack2<T>(sum.x * factor, sum.y * factor), pack2<T>(sum.z * factor, sum.w * factor)};
    if (part == 0) p.lse[int64_t(head) * p.total_q + token] = lse;
}

}  // namespace sink_fa3
