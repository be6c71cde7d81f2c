// Online softmax on wgmma accumulators. A thread holds two rows of a 64 x N tile: accumulator 4 * j + e is row e / 2, column
// 8 * j + 2 * (lane % 4) + e % 2.
//
// All scores are in units of log2: c = scale * log2(e), and `mc` is the row's reference exponent, so p = 2^(s * c - mc).
#pragma once

#include "ptx.cuh"

namespace sink_fa3 {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

// p = 2^(s * c - mc) in place and the two rows' sums over this thread's columns.
template <int N>
__device__ __forceinline__ void exponentiate(float (&s)[N], float c, float const (&mc)[2], float (&sum)[2]) {
    float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        s[i] = exp2_approx(fmaf(s[i], c, -mc[(i >> 1) & 1]));
        part[i & 3] += s[i];
    }
    sum[0] = part[0] + part[1];
    sum[1] = part[2] + part[3];
}

// A step with a fresh maximum. Updates mc and gives the factor old sums and outputs shrink by; s becomes p.
template <int N>
__device__ __forceinline__ void softmax_with_max(float (&s)[N], float c, float (&mc)[2], float (&row_sum)[2], float (&shrink)[2]) {
    float mx[2] = {neg_inf(), neg_inf()};
#pragma unroll
    for (int i = 0; i < N; ++i) mx[(i >> 1) & 1] = fmaxf(mx[(i >> 1) & 1], s[i]);
    float ref[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        mx[r] = fmaxf(mx[r], __shfl_xor_sync(0xffffffff, mx[r], 1));
        mx[r] = fmaxf(mx[r], __shfl_xor_sync(0xffffffff, mx[r], 2));
        float const m = fmaxf(mc[r], mx[r] * c);
        ref[r] = m == neg_inf() ? 0.f : m;  // no key yet: every p is 2^-inf
        shrink[r] = exp2_approx(mc[r] - ref[r]);
        mc[r] = m;
    }
    float sum[2];
    exponentiate(s, c, ref, sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] = row_sum[r] * shrink[r] + sum[r];
}

// A step that keeps the reference exponent of an earlier tile: no maximum, no dependence of the exponentials on one. Any
// reference serves as long as nothing overflows, since P and O are floating point. True when this warp must take the tile
// again with softmax_with_max (s is lost then, row_sum untouched).
template <typename T, int N>
__device__ __forceinline__ bool softmax_stale_max(float (&s)[N], float c, float const (&mc)[2], float (&row_sum)[2]) {
    // bf16 has fp32's range; fp16 ends at 65504.
    constexpr float kLimit = std::is_same_v<T, __nv_bfloat16> ? 1.15e18f : 32768.f;
    float sum[2];
    exponentiate(s, c, mc, sum);
    bool const fits = sum[0] < kLimit && sum[1] < kLimit;  // false for NaN too
    if (__any_sync(0xffffffff, !fits)) return true;
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
    return false;
}

// End of a row: the sink joins the denominator. Gives the factor for O and the natural-log LSE.
__device__ __forceinline__ void finish_row(float mc, float row_sum, float sink_log2, float& factor, float& lse) {
    float const m = fmaxf(mc, sink_log2);
    if (m == neg_inf()) {  // neither key nor sink
        factor = 0.f;
        lse = neg_inf();
    } else if (sink_log2 == -neg_inf()) {
        factor = 0.f;
        lse = sink_log2;
    } else {
        float const keys = exp2_approx(mc - m);
        float const total = row_sum * keys + exp2_approx(sink_log2 - m);
        factor = keys / total;
        lse = (m + log2f(total)) * kLn2;
    }
}

}  // namespace sink_fa3
