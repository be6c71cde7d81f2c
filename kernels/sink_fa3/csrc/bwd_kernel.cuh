// Backward main kernel, head_dim 64. A block owns 128 keys of one KV head and walks over all queries of the grouped heads
// that see them, so dK and dV stay in registers and need no sum over heads.
//
// Two warpgroups of 64 keys each compute, with keys as rows, S^T = K Q^T (K held in registers as A operand) and
// dP^T = V dO^T, P and dS, then dV += P^T dO and dK += dS^T Q with P^T and dS^T as A operands from registers. dS goes to shared
// memory for the third warpgroup, which computes dQ = dS K, adds it to global memory and, in one of its threads, runs the loads.
#pragma once

#include "bwd_queries.cuh"

namespace sink_fa3 {

// Rows are keys: scores of pairs outside the mask become -inf. `key0` is this thread's first key, `q0` the tile's first query.
__device__ __forceinline__ void mask_scores_transposed(float (&s)[32], BwdItem const& t, BwdParams const& p, int key0, int q0, int lane) {
    int const first = q0 + 2 * (lane & 3) + t.k_len - t.q_len;  // diagonal of this thread's first column
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int const key = key0 + 8 * r;
        int const lo = p.causal ? key - first : -1000;                              // column >= lo
        int const hi = key >= t.k_len ? -1000 : p.window > 0 ? key - first + p.window : 1000;  // column < hi
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int const col = 8 * j + e;
                if (col < lo || col >= hi) s[4 * j + 2 * r + e] = neg_inf();
            }
        }
    }
}

// 64 rows of 64 columns from accumulators, through this warpgroup's slab of shared memory.
template <typename T>
__device__ __forceinline__ void store_keys(uint32_t slab, T* out, int64_t row_stride, int valid, int barrier, float const (&x)[32],
                                           float factor) {
    int const thread = threadIdx.x & 127, lane = thread & 31;
    uint32_t const row = (thread >> 5) * 16 + (lane & 15);
    bar_sync(barrier, 128);  // the slab's last reader is done
#pragma unroll
    for (int j = 0; j < 4; ++j)
        stmatrix_x4(slab + sw128(row, 2 * j + (lane >> 4)), pack2<T>(x[8 * j] * factor, x[8 * j + 1] * factor),
                    pack2<T>(x[8 * j + 2] * factor, x[8 * j + 3] * factor), pack2<T>(x[8 * j + 4] * factor, x[8 * j + 5] * factor),
                    pack2<T>(x[8 * j + 6] * factor, x[8 * j + 7] * factor));
    bar_sync(barrier, 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int const r = (thread + 128 * i) / 8, chunk = thread % 8;
        if (r < valid) {
            uint4 value;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                         : "r"(slab + sw128(r, chunk)));
            *reinterpret_cast<uint4*>(out + r * row_stride + chunk * 8) = value;
        }
    }
}

template <typename C>
__device__ __forceinline__ void bwd_consumer(BwdSmem<C>& sm, BwdParams const& p, int wg) {
    using T = typename C::T;
    int const lane = threadIdx.x & 31;
    int const warp_row = wg * 64 + ((threadIdx.x >> 5) & 3) * 16;
    uint32_t const frag_row = warp_row + (lane & 15);
    Ring<C::kStages> ring;
    uint32_t kv_phase = 0, ds_phase = 1;
    int buffer = 0;
    uint64_t const q_desc = smem_desc_sw128(smem_addr(sm.q[0]));
    uint64_t const do_desc = smem_desc_sw128(smem_addr(sm.dout[0]));
    uint64_t const v_desc = smem_desc_sw128(smem_addr(sm.v) + wg * 64 * 128);
    uint32_t const q_low = static_cast<uint32_t>(q_desc), do_low = static_cast<uint32_t>(do_desc);
    constexpr uint32_t kStageBytes = kBwdRows * 128;
    if constexpr (C::kPingPong) {
        if (wg == 1) bar_arrive(4, 256);
    }
    while (true) {
        mbar_wait(&sm.kv_full, kv_phase);
        kv_phase ^= 1;
        BwdItem const t = sm.item;
        if (t.end) return;
        uint32_t kf[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ldmatrix_x4(smem_addr(sm.k) + sw128(frag_row, 2 * i + (lane >> 4)), kf[i]);
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(&sm.item_empty);
        float dk[32], dv[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) dk[i] = dv[i] = 0.f;
        float s[32], dp[32];
        uint32_t pf[4][4], dsf[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) pf[i >> 2][i & 3] = dsf[i >> 2][i & 3] = 0;

        // `low`: a stage's offset in descriptor units, the same for Q and dO.
        auto issue_grads = [&](uint32_t low) {
#pragma unroll
            for (int i = 0; i < 4; ++i) Wgmma<T, 64, 1>::rs(dv, pf[i], desc_from(do_low + low + i * 128, do_desc), 1);
#pragma unroll
            for (int i = 0; i < 4; ++i) Wgmma<T, 64, 1>::rs(dk, dsf[i], desc_from(q_low + low + i * 128, q_desc), 1);
            wgmma_commit();
        };
        auto fence = [&] {
            keep(s);
            keep(dp);
            keep(dk);
            keep(dv);
            wgmma_fence();
        };
        int const key_first = t.n * kBwdKeys + wg * 64;  // this warpgroup's keys
        int const offset = t.k_len - t.q_len;
        TileWalk at;
        at.start(p, t);
        int const tiles = t.m_count * p.heads_per_kv;
        // A round issues S and dP of its tile and dV, dK of the tile before (in the first round with P = dS = 0), so that the
        // exponentials run under the other three products. Every product is complete by the end of the round.
        int previous = ring.stage;
        uint32_t previous_low = uniform(previous * (kStageBytes / 16));
        for (int i = 0; i < tiles; ++i) {
            int const stage = ring.stage;
            uint32_t const low = uniform(stage * (kStageBytes / 16));
            mbar_wait(&sm.full[stage], ring.phase);
            if constexpr (C::kPingPong) bar_sync(4 + wg, 256);
            fence();
#pragma unroll
            for (int a = 0; a < 4; ++a) Wgmma<T, 64, 0>::rs(s, kf[a], desc_from(q_low + low + a * 2, q_desc), a > 0);
            wgmma_commit();
#pragma unroll
            for (int a = 0; a < 4; ++a) Wgmma<T, 64, 0>::ss(dp, desc_advance(v_desc, a * 32), desc_from(do_low + low + a * 2, do_desc), a > 0);
            wgmma_commit();
            issue_grads(previous_low);
            if constexpr (C::kPingPong) bar_arrive(5 - wg, 256);
            previous_low = low;
            wgmma_wait<2>();
            keep(s);
            int const q0 = at.m * kBwdRows;
            bool const masked = (p.causal && key_first + 63 > q0 + offset) || key_first + 64 > t.k_len ||
                                (p.window > 0 && key_first < q0 + 63 + offset - p.window + 1);
            if (masked) mask_scores_transposed(s, t, p, key_first + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2), q0, lane);
            uint32_t const rows = smem_addr(sm.rows[0]) + stage * sizeof(sm.rows[0]) + 8 * (lane & 3);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float2 const lse = load_shared_float2(rows + 32 * j);
#pragma unroll
                for (int e = 0; e < 4; ++e) s[4 * j + e] = exp2_approx(fmaf(s[4 * j + e], p.c, -(e & 1 ? lse.y : lse.x)));
            }
            keep(s);  // the exponentials come before this wait, not after it
            wgmma_wait<1>();
            keep(dp);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float2 const delta = load_shared_float2(rows + 4 * kBwdRows + 32 * j);
#pragma unroll
                for (int e = 0; e < 4; ++e) dp[4 * j + e] = s[4 * j + e] * (dp[4 * j + e] - (e & 1 ? delta.y : delta.x));
            }
            keep(dp);
            wgmma_wait<0>();
            keep(dk);
            keep(dv);
            if (i > 0 && lane == 0) mbar_arrive(&sm.empty[previous]);
            previous = stage;
            ring.next();
            mbar_wait(&sm.ds_empty[buffer], ds_phase);
            uint32_t const ds_base = smem_addr(sm.ds[buffer]);
#pragma unroll
            for (int a = 0; a < 4; ++a) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    pf[a][e] = pack2<T>(s[8 * a + 2 * e], s[8 * a + 2 * e + 1]);
                    dsf[a][e] = pack2<T>(dp[8 * a + 2 * e], dp[8 * a + 2 * e + 1]);
                }
                stmatrix_x4(ds_base + sw128(frag_row, 2 * a + (lane >> 4)), dsf[a][0], dsf[a][1], dsf[a][2], dsf[a][3]);
            }
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) mbar_arrive(&sm.ds_full[buffer]);
            if (++buffer == C::kDsBuffers) {
                buffer = 0;
                ds_phase ^= 1;
            }
            at.next();
        }
        if (tiles > 0) {
            fence();
            issue_grads(previous_low);
            wgmma_wait<0>();
            keep(dk);
            keep(dv);
            if (lane == 0) mbar_arrive(&sm.empty[previous]);
        }
        int64_t const out_row = int64_t(t.k_begin + key_first) * p.kv_heads + t.kv_head;
        uint32_t const slab = smem_addr(sm.staging) + wg * 64 * 128;
        int64_t const stride = int64_t(p.kv_heads) * 64;
        store_keys<T>(slab, static_cast<T*>(p.dv) + out_row * 64, stride, t.k_len - key_first, 2 + wg, dv, 1.f);
        store_keys<T>(slab, static_cast<T*>(p.dk) + out_row * 64, stride, t.k_len - key_first, 2 + wg, dk, p.scale);
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    bwd_kernel(__grid_constant__ CUtensorMap const map_q, __grid_constant__ CUtensorMap const map_do,
               __grid_constant__ CUtensorMap const map_k, __grid_constant__ CUtensorMap const map_v,
               __grid_constant__ CUtensorMap const map_rows, __grid_constant__ BwdParams const p) {
    extern __shared__ uint8_t raw[];
    BwdSmem<C>& sm = *reinterpret_cast<BwdSmem<C>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    int const warpgroup = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) {
        mbar_init(&sm.kv_full, 1);
        mbar_init(&sm.item_empty, 12);
        for (int i = 0; i < C::kStages; ++i) {
            mbar_init(&sm.full[i], 1);
            mbar_init(&sm.empty[i], 8);
        }
        for (int i = 0; i < C::kDsBuffers; ++i) {
            mbar_init(&sm.ds_full[i], 8);
            mbar_init(&sm.ds_empty[i], 4);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (warpgroup == 0) {
        reg_dec<C::kDqRegs>();
        bwd_dq_warpgroup<C>(sm, &map_q, &map_do, &map_k, &map_v, &map_rows, p);
    } else {
        reg_inc<C::kConsumerRegs>();
        bwd_consumer<C>(sm, p, warpgroup - 1);
    }
}

}  // namespace sink_fa3
