// Backward, the third warpgroup: it loads queries for the other two and computes dQ from the dS they leave in shared memory.
#pragma once

#include "bwd_items.cuh"

namespace sink_fa3 {

template <typename C>
struct QueryLoader {
    Ring<C::kStages> ring;
    TileWalk at;
    int left;
    __device__ __forceinline__ void start(BwdParams const& p, BwdItem const& t) {
        at.start(p, t);
        left = t.m_count * p.heads_per_kv;
    }
    __device__ __forceinline__ void load_one(BwdSmem<C>& sm, BwdParams const& p, CUtensorMap const* map_q, CUtensorMap const* map_do,
                                             CUtensorMap const* map_rows, BwdItem const& t) {
        if (left == 0) return;
        --left;
        int const s = ring.stage;
        uint64_t* const bar = &sm.full[s];
        mbar_wait(&sm.empty[s], ring.phase ^ 1);
        mbar_arrive_tx(bar, 2 * kBwdRows * 128 + sizeof(sm.rows[0]));
        tma_load_3d(sm.q[s], map_q, bar, 0, at.head, t.q_begin + at.m * kBwdRows);
        tma_load_2d(sm.rows[s], map_rows, bar, 0, at.head * p.slots + t.slot0 + at.m);
        tma_load_3d(sm.dout[s], map_do, bar, 0, at.head, t.q_begin + at.m * kBwdRows);
        ring.next();
        at.next();
    }
};

// Without a branch, which would end up between the products.
__device__ __forceinline__ void red_or_store_v4(bool store, float* dst, float a, float b, float c, float d) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "@p st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
        "@!p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
        "}" ::"l"(dst),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(static_cast<unsigned>(store))
        : "memory");
}

// Deterministic mode: key blocks add to a dQ tile in ascending order. Blocks with a smaller index were handed out earlier, so
// whoever is waited for is running.
__device__ __forceinline__ int read_turn(int const* turn) {
    int now;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    return now;
}
__device__ __forceinline__ void pass_turn(int* turn, int next) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(turn), "r"(next) : "memory");
}
// Once this warpgroup's additions are visible. Called a product later than they were issued, which hides their latency.
__device__ __forceinline__ void pass_turn_after_adds(int* turn, int next) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    bar_sync(1, 128);
    if (threadIdx.x == 0 && turn != nullptr) pass_turn(turn, next);
}
// How many key blocks add to query tile m before block n does.
__device__ __forceinline__ int turn_of(BwdParams const& p, BwdItem const& t, int m) {
    return t.n - first_key_block(p, m, t.k_len - t.q_len);
}

template <typename C>
__device__ __forceinline__ void bwd_dq_warpgroup(BwdSmem<C>& sm, CUtensorMap const* map_q, CUtensorMap const* map_do,
                                                 CUtensorMap const* map_k, CUtensorMap const* map_v, CUtensorMap const* map_rows,
                                                 BwdParams const& p) {
    int const thread = threadIdx.x, lane = thread & 31;
    QueryLoader<C> loader;
    uint32_t phase = 0, ds_phase = 0;
    int buffer = 0;
    uint64_t const k_desc = smem_desc_sw128(smem_addr(sm.k));
    uint64_t const ds_desc = smem_desc_sw128(smem_addr(sm.ds[0]));
    while (true) {
        if (thread == 0) {
            int const ticket = atomicAdd(p.counter, 1);
            bool const work = ticket < p.order.ends[groups_of(p.order) - 1];
            BwdItem t{};
            if (work) t = bwd_item(p, ticket);
            mbar_wait(&sm.item_empty, phase ^ 1);
            if (!work) {
                sm.item.end = 1;
                mbar_arrive(&sm.kv_full);
            } else {
                sm.item = t;
                mbar_arrive_tx(&sm.kv_full, 2 * kBwdKeys * 128);
                tma_load_3d(sm.k, map_k, &sm.kv_full, 0, t.kv_head, t.k_begin + t.n * kBwdKeys);
                tma_load_3d(sm.v, map_v, &sm.kv_full, 0, t.kv_head, t.k_begin + t.n * kBwdKeys);
                loader.start(p, t);
                for (int i = 0; i < C::kStages - 1; ++i) loader.load_one(sm, p, map_q, map_do, map_rows, t);
            }
        }
        __syncwarp();
        mbar_wait(&sm.kv_full, phase);
        phase ^= 1;
        BwdItem const t = sm.item;
        __syncwarp();
        if (t.end) return;
        if (lane == 0) mbar_arrive(&sm.item_empty);
        TileWalk at;
        at.start(p, t);
        int* turn = nullptr;  // of the tile before, still to be passed on
        int next_turn = 0;
        for (int i = t.m_count * p.heads_per_kv; i > 0; --i) {
            if (thread == 0) loader.load_one(sm, p, map_q, map_do, map_rows, t);
            __syncwarp();
            mbar_wait(&sm.ds_full[buffer], ds_phase);
            float dq[32];
            keep(dq);
            wgmma_fence();
            uint32_t const ds_low = uniform(static_cast<uint32_t>(ds_desc) + buffer * (kBwdKeys * 128 / 16));
#pragma unroll
            for (int k = 0; k < kBwdKeys / 16; ++k)
                Wgmma<typename C::T, 64, 1, 1>::ss(dq, desc_from(ds_low + k * 128, ds_desc), desc_advance(k_desc, k * 2048), k > 0);
            wgmma_commit();
            int now = 0, mine = 0;
            if constexpr (C::kDeterministic) {
                mine = turn_of(p, t, at.m);
                int* const own = p.turns + int64_t(at.head) * p.slots + t.slot0 + at.m;
                // Asked early by a warp that does not pass turns: the answer takes as long as the fence.
                if (thread == 32) now = read_turn(own);
                pass_turn_after_adds(turn, next_turn);
                turn = own;
                next_turn = mine + 1;
            }
            wgmma_wait<0>();
            keep(dq);
            if (lane == 0) mbar_arrive(&sm.ds_empty[buffer]);
            if (++buffer == C::kDsBuffers) {
                buffer = 0;
                ds_phase ^= 1;
            }
            int64_t const tile = int64_t(at.head) * p.slots + t.slot0 + at.m;
            float* const acc = p.dq_acc + tile * kDqTile + thread * 4;
            if constexpr (C::kDeterministic) {
                if (thread == 32) {
                    while (now != mine) now = read_turn(turn);
                }
                __syncwarp();
                bar_sync(1, 128);
            }
            bool const first = C::kDeterministic && mine == 0;  // it stores, and nobody has to clear the tile
#pragma unroll
            for (int j = 0; j < 8; ++j) red_or_store_v4(first, acc + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
            at.next();
        }
        if constexpr (C::kDeterministic) pass_turn_after_adds(turn, next_turn);
        bar_sync(1, 128);  // every warp has read K
    }
}

}  // namespace sink_fa3
