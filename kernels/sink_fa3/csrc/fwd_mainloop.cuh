// Forward, one tile of 64 * kWarpgroups query rows: the producer's loads and a consumer warpgroup's pass over the keys.
//
// Rows are (token, head) pairs of one group of query heads, heads fastest, so that one K/V tile serves the whole group.
// A consumer issues the next tile's Q K^T and this tile's P V together and takes the softmax of the first while the second
// runs; the other warpgroups fill the gaps. Tiles that no mask touches skip the row maximum (softmax_stale_max).
#pragma once

#include "mask.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

namespace sink_fa3 {

// kSplit: the keys of a tile are divided among blocks, and each leaves its part for fwd_combine.
template <typename T_, int kWarpgroups_, int kStages_, bool kSplit_ = false>
struct FwdConfig {
    using T = T_;
    static constexpr bool kSplit = kSplit_;
    static constexpr int D = 64;  // a row is one 128-byte swizzle span
    static constexpr int kWarpgroups = kWarpgroups_;  // consumers
    static constexpr int kStages = kStages_;
    static constexpr int kM = 64 * kWarpgroups;
    static constexpr int kN = 128;
    static constexpr int kThreads = 128 * (kWarpgroups + 1);
    static constexpr int kBlocksPerSm = kWarpgroups == 1 ? 2 : 1;
    static constexpr int kProducerRegs = kWarpgroups == 3 ? 32 : 24;
    static constexpr int kConsumerRegs = kWarpgroups == 3 ? 160 : kWarpgroups == 2 ? 240 : 224;
};

template <typename C>
struct FwdSmem {
    alignas(1024) uint8_t q[C::kM * C::D * 2];
    alignas(1024) uint8_t o[C::kSplit ? 16 : C::kM * C::D * 2];
    alignas(1024) uint8_t k[C::kStages][C::kN * C::D * 2];
    alignas(1024) uint8_t v[C::kStages][C::kN * C::D * 2];
    uint64_t q_full, q_empty;
    uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
    Tile tile;
};

// Position in a ring of stages: which one, and the parity of its current use.
template <int kStages>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// One thread.
template <typename C>
__device__ __forceinline__ void load_key_blocks(FwdSmem<C>& sm, CUtensorMap const* map_k, CUtensorMap const* map_v, Tile const& t,
                                                int kv_head, Ring<C::kStages>& ring) {
    constexpr int kBlockBytes = C::kN * 128;
    for (int n = t.n_max - 1; n >= t.n_min; --n) {
        int const row = t.k_begin + n * C::kN;
        mbar_wait(&sm.k_empty[ring.stage], ring.phase ^ 1);
        mbar_arrive_tx(&sm.k_full[ring.stage], kBlockBytes);
        tma_load_3d(sm.k[ring.stage], map_k, &sm.k_full[ring.stage], 0, kv_head, row);
        mbar_wait(&sm.v_empty[ring.stage], ring.phase ^ 1);
        mbar_arrive_tx(&sm.v_full[ring.stage], kBlockBytes);
        tma_load_3d(sm.v[ring.stage], map_v, &sm.v_full[ring.stage], 0, kv_head, row);
        ring.next();
    }
}

// S[64 x kN] = Q K^T.
template <typename C>
__device__ __forceinline__ void issue_qk(float (&s)[C::kN / 2], uint64_t q, uint64_t k) {
#pragma unroll
    for (int i = 0; i < C::D / 16; ++i)
        Wgmma<typename C::T, C::kN, 0>::ss(s, desc_advance(q, i * 32), desc_advance(k, i * 32), i > 0);
}

// O[64 x D] += P V with P in registers.
template <typename C>
__device__ __forceinline__ void issue_pv(float (&o)[C::D / 2], uint32_t const (&p)[C::kN / 16][4], uint64_t v) {
#pragma unroll
    for (int i = 0; i < C::kN / 16; ++i) Wgmma<typename C::T, C::D, 1>::rs(o, p[i], desc_advance(v, i * 2048), 1);
}

// The same S for one warp by warp-level products: it needs no other warp, so a single warp can take a tile again.
template <typename C>
__device__ __forceinline__ void recompute_scores(float (&s)[C::kN / 2], uint32_t q, uint32_t k, int lane) {
    uint32_t const row = (lane & 7) + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int i = 0; i < C::kN / 2; ++i) s[i] = 0.f;
    uint32_t a[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ldmatrix_x4(q + sw128(row, 2 * i + (lane >> 4)), a[i]);
#pragma unroll
    for (int j = 0; j < C::kN / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            uint32_t b[4];
            ldmatrix_x4(k + sw128(8 * j + (lane & 7), 2 * i + (lane >> 3)), b);
            mma_m16n8k16<typename C::T>(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3], a[i], b[0], b[1]);
            mma_m16n8k16<typename C::T>(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3], a[i + 1], b[2], b[3]);
        }
    }
}

template <typename C>
__device__ __forceinline__ void pack_probabilities(float const (&s)[C::kN / 2], uint32_t (&p)[C::kN / 16][4]) {
#pragma unroll
    for (int i = 0; i < C::kN / 16; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) p[i][e] = pack2<typename C::T>(s[8 * i + 2 * e], s[8 * i + 2 * e + 1]);
    }
}

template <int N>
__device__ __forceinline__ void scale_rows(float (&o)[N], float const (&f)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= f[(i >> 1) & 1];
}

// One warpgroup's pass over a tile's keys.
template <typename C>
struct KeyLoop {
    static constexpr int kN = C::kN;
    static constexpr uint32_t kStageBytes = kN * C::D * 2;

    FwdSmem<C>& sm;
    Tile const& t;
    KeyRange const (&rows)[2];
    int wg, lane;
    float c;
    Ring<C::kStages>& ring;  // the key block whose scores were taken last
    float (&o)[C::D / 2];
    float (&row_sum)[2];
    float (&mc)[2];
    float s[kN / 2];
    uint32_t p[kN / 16][4];

    __device__ __forceinline__ uint32_t q_base() const { return smem_addr(sm.q) + wg * 64 * 128; }
    __device__ __forceinline__ uint64_t k_desc(int stage) const { return smem_desc_sw128(smem_addr(sm.k[stage])); }
    __device__ __forceinline__ uint64_t v_desc(int stage) const {
        return smem_desc_sw128(smem_addr(sm.v[stage]), kN * 128);
    }
    __device__ __forceinline__ void release(uint64_t* bar) const {
        if (lane == 0) mbar_arrive(bar);
    }

    // Issues this block's Q K^T and the previous block's P V; returns when the scores are there.
    __device__ __forceinline__ void start_step(int stage, uint32_t phase, int prev, uint32_t prev_phase) {
        mbar_wait(&sm.k_full[stage], phase);
        mbar_wait(&sm.v_full[prev], prev_phase);
        keep(s);
        keep(o);
        wgmma_fence();
        issue_qk<C>(s, smem_desc_sw128(q_base()), k_desc(stage));
        wgmma_commit();
        issue_pv<C>(o, p, v_desc(prev));
        wgmma_commit();
        wgmma_wait<1>();
        keep(s);
    }

    // s holds this block's scores, nothing is in flight: maximum, exponentials, O and sums brought to the new reference.
    __device__ __forceinline__ void fresh_step() {
        float shrink[2];
        softmax_with_max(s, c, mc, row_sum, shrink);
        if (__any_sync(0xffffffff, shrink[0] != 1.f || shrink[1] != 1.f)) scale_rows(o, shrink);
        pack_probabilities<C>(s, p);
    }

    __device__ __forceinline__ void first_block(bool masked) {
        mbar_wait(&sm.k_full[ring.stage], ring.phase);
        keep(s);
        wgmma_fence();
        issue_qk<C>(s, smem_desc_sw128(q_base()), k_desc(ring.stage));
        wgmma_commit();
        wgmma_wait<0>();
        keep(s);
        release(&sm.k_empty[ring.stage]);
        if (masked) mask_scores(s, rows, (t.n_max - 1) * kN, lane);
        fresh_step();
    }

    __device__ __forceinline__ void fresh_block(int n, bool masked) {
        Ring<C::kStages> const prev = ring;
        ring.next();
        start_step(ring.stage, ring.phase, prev.stage, prev.phase);
        wgmma_wait<0>();
        keep(o);
        release(&sm.k_empty[ring.stage]);
        release(&sm.v_empty[prev.stage]);
        if (masked) mask_scores(s, rows, n * kN, lane);
        fresh_step();
    }

    template <int kStage>
    __device__ __forceinline__ void stale_block() {
        constexpr int kPrev = kStage == 0 ? C::kStages - 1 : kStage - 1;
        uint32_t const prev_phase = ring.phase;
        if constexpr (kStage == 0) ring.phase ^= 1;
        ring.stage = kStage;
        start_step(kStage, ring.phase, kPrev, prev_phase);
        // A warp whose reference no longer serves takes the scores again, still before the wait: without a branch here the
        // compiler would let the exponentials sink below it, and nothing would run under the product with V.
        bool const fresh = softmax_stale_max<typename C::T>(s, c, mc, row_sum);
        if (fresh) recompute_scores<C>(s, q_base() + ((threadIdx.x >> 5) & 3) * 16 * 128, smem_addr(sm.k[kStage]), lane);
        wgmma_wait<0>();
        keep(o);
        release(&sm.v_empty[kPrev]);
        if (fresh) {
            fresh_step();
            __syncwarp();  // every lane has read K
        } else {
            pack_probabilities<C>(s, p);
        }
        release(&sm.k_empty[kStage]);
    }

    // `count` blocks that no mask touches and whose rows all have a reference. One body per stage keeps the descriptors out of
    // the general registers.
    __device__ __forceinline__ void stale_blocks(int count) {
        static_assert(C::kStages == 2 || C::kStages == 3);
        int stage = ring.stage + 1 == C::kStages ? 0 : ring.stage + 1;
        while (true) {
            if (stage == 0) {
                stale_block<0>();
                stage = 1;
                if (--count == 0) break;
            }
            if (stage == 1) {
                stale_block<1>();
                stage = C::kStages == 2 ? 0 : 2;
                if (--count == 0) break;
            }
            if constexpr (C::kStages == 3) {
                if (stage == 2) {
                    stale_block<2>();
                    stage = 0;
                    if (--count == 0) break;
                }
            }
        }
    }

    // all_rows: the keys that every row of the block sees; a tile inside them needs no mask. From the tile of the first
    // row's last key on (towards the left), every row has a reference. Leaves O unnormalised and complete row sums.
    __device__ __forceinline__ void run(KeyRange all_rows) {
        auto masked = [&](int n) { return n * kN < all_rows.lo || (n + 1) * kN > all_rows.hi; };
        int const n_fresh = (all_rows.hi - 1) / kN;
        int const n_stale = max(t.n_min, (all_rows.lo + kN - 1) / kN);
        int n = t.n_max - 1;
        first_block(masked(n));
        --n;
        while (n >= t.n_min) {
            if (masked(n) || n >= n_fresh) {
                fresh_block(n, masked(n));
                --n;
            } else {
                stale_blocks(n - n_stale + 1);
                n = n_stale - 1;
            }
        }
        mbar_arrive(&sm.q_empty);
        mbar_wait(&sm.v_full[ring.stage], ring.phase);
        keep(o);
        wgmma_fence();
        issue_pv<C>(o, p, v_desc(ring.stage));
        wgmma_commit();
        wgmma_wait<0>();
        keep(o);
        release(&sm.v_empty[ring.stage]);
        ring.next();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row_sum[r] += __shfl_xor_sync(0xffffffff, row_sum[r], 1);
            row_sum[r] += __shfl_xor_sync(0xffffffff, row_sum[r], 2);
        }
    }
};

}  // namespace sink_fa3
