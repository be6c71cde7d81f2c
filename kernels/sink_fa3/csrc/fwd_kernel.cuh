// Forward kernel: persistent blocks of one producer warp and kWarpgroups consumer warpgroups.
#pragma once

#include "fwd_mainloop.cuh"

namespace sink_fa3 {

struct FwdParams {
    TileParams tiles;
    Sinks sinks;
    void* out;
    float* lse;
    // kSplit: (splits, total_q, heads, 64) and (splits, total_q, heads), each part normalised by itself and without the sink
    float *part_out, *part_lse;
    int* counter;
    int total_q, heads;
    int heads_per_kv;
    float c;  // scale * log2(e)
};

template <typename C>
__device__ __forceinline__ void fwd_producer(FwdSmem<C>& sm, CUtensorMap const* map_q, CUtensorMap const* map_k,
                                             CUtensorMap const* map_v, FwdParams const& p) {
    TileParams const& tp = p.tiles;
    Ring<C::kStages> ring;
    uint32_t q_phase = 0;
    uint32_t const q_bytes = 128 * tp.group * tp.tokens;
    int const tickets = tp.order.ends[groups_of(tp.order) - 1] * tp.splits;
    while (true) {
        int const ticket = atomicAdd(p.counter, 1);
        Tile t{};
        if (ticket < tickets) t = tile_of<C::kN, C::kSplit>(tp, ticket);
        mbar_wait(&sm.q_empty, q_phase ^ 1);
        q_phase ^= 1;
        if (ticket >= tickets) {
            sm.tile.n_max = -1;
            mbar_arrive(&sm.q_full);
            return;
        }
        sm.tile = t;
        int const head0 = t.head_group * tp.group;
        mbar_arrive_tx(&sm.q_full, q_bytes);
        tma_load_3d(sm.q, map_q, &sm.q_full, 0, head0, t.q_begin + t.token0);
        load_key_blocks<C>(sm, map_k, map_v, t, head0 / p.heads_per_kv, ring);
    }
}

// Writes a warpgroup's 64 rows: registers to its slab of shared memory, then whole rows to global memory.
template <typename C>
__device__ __forceinline__ void store_rows(FwdSmem<C>& sm, FwdParams const& p, Tile const& t, int wg, float const (&o)[C::D / 2]) {
    using T = typename C::T;
    int const thread = threadIdx.x & 127;
    int const lane = thread & 31;
    uint32_t const slab = smem_addr(sm.o) + wg * 64 * 128;
    uint32_t const row = (thread >> 5) * 16 + (lane & 15);
    bar_sync(1 + wg, 128);  // the slab's last reader is done
#pragma unroll
    for (int j = 0; j < C::D / 16; ++j) {
        stmatrix_x4(slab + sw128(row, 2 * j + (lane >> 4)), pack2<T>(o[8 * j], o[8 * j + 1]),
                    pack2<T>(o[8 * j + 2], o[8 * j + 3]), pack2<T>(o[8 * j + 4], o[8 * j + 5]), pack2<T>(o[8 * j + 6], o[8 * j + 7]));
    }
    bar_sync(1 + wg, 128);
    constexpr int kChunks = C::D / 8;
#pragma unroll
    for (int i = 0; i < 64 * kChunks / 128; ++i) {
        int const r = (thread + 128 * i) / kChunks;
        int const chunk = (thread + 128 * i) % kChunks;
        int const tile_row = wg * 64 + r;
        int const token = tile_row / p.tiles.group;
        int const head = t.head_group * p.tiles.group + tile_row - token * p.tiles.group;
        if (token < p.tiles.tokens && t.token0 + token < t.q_len) {
            uint4 value;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                         : "r"(slab + sw128(r, chunk)));
            int64_t const out_row = int64_t(t.q_begin + t.token0 + token) * p.heads + head;
            *reinterpret_cast<uint4*>(reinterpret_cast<T*>(p.out) + out_row * C::D + chunk * 8) = value;
        }
    }
}

// A part of the keys: a warpgroup's rows in float32, straight from the registers.
template <typename C>
__device__ __forceinline__ void store_part(FwdParams const& p, int64_t const (&row)[2], bool const (&valid)[2], int lane,
                                           float const (&o)[C::D / 2], float const (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (!valid[r]) continue;
        if ((lane & 3) == 0) p.part_lse[row[r]] = lse[r];
        if (lse[r] == neg_inf()) continue;  // no key: weighs nothing, and is not read
#pragma unroll
        for (int j = 0; j < C::D / 8; ++j)
            *reinterpret_cast<float2*>(p.part_out + row[r] * C::D + 8 * j + 2 * (lane & 3)) =
                float2{o[4 * j + 2 * r], o[4 * j + 2 * r + 1]};
    }
}

template <typename C>
__device__ __forceinline__ void fwd_consumer(FwdSmem<C>& sm, FwdParams const& p, int wg) {
    Ring<C::kStages> ring;
    uint32_t q_phase = 0;
    int const lane = threadIdx.x & 31;
    int const row0 = wg * 64 + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
    int const group = p.tiles.group;
    while (true) {
        mbar_wait(&sm.q_full, q_phase);
        q_phase ^= 1;
        Tile const t = sm.tile;
        if (t.n_max < 0) return;
        KeyRange const first = keys_of(t.token0, t.q_len, t.k_len, p.tiles.causal, p.tiles.window);
        KeyRange const last =
            keys_of(min(t.token0 + p.tiles.tokens, t.q_len) - 1, t.q_len, t.k_len, p.tiles.causal, p.tiles.window);
        int token[2];
        KeyRange rows[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            token[r] = (row0 + 8 * r) / group;
            rows[r] = keys_of(t.token0 + token[r], t.q_len, t.k_len, p.tiles.causal, p.tiles.window);
        }
        float o[C::D / 2];
#pragma unroll
        for (int i = 0; i < C::D / 2; ++i) o[i] = 0.f;
        float row_sum[2] = {0.f, 0.f};
        float mc[2] = {neg_inf(), neg_inf()};
        if (t.n_max > t.n_min) {
            KeyLoop<C>{sm, t, rows, wg, lane, p.c, ring, o, row_sum, mc}.run(KeyRange{last.lo, first.hi});
        } else {
            mbar_arrive(&sm.q_empty);
        }
        float factor[2], lse[2];
        bool valid[2];
        int64_t part_row[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int const head = t.head_group * group + (row0 + 8 * r) - token[r] * group;
            valid[r] = token[r] < p.tiles.tokens && t.token0 + token[r] < t.q_len;
            int const row = t.q_begin + t.token0 + token[r];
            if constexpr (C::kSplit) {
                finish_row(mc[r], row_sum[r], neg_inf(), factor[r], lse[r]);
                part_row[r] = (int64_t(t.split) * p.total_q + row) * p.heads + head;
            } else {
                float const sink = p.sinks.data != nullptr && valid[r] ? load_sink(p.sinks, head) * kLog2e : neg_inf();
                finish_row(mc[r], row_sum[r], sink, factor[r], lse[r]);
                if (valid[r] && (lane & 3) == 0) p.lse[int64_t(head) * p.total_q + row] = lse[r];
            }
        }
        scale_rows(o, factor);
        if constexpr (C::kSplit) {
            store_part<C>(p, part_row, valid, lane, o, lse);
        } else {
            store_rows<C>(sm, p, t, wg, o);
        }
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    fwd_kernel(__grid_constant__ CUtensorMap const map_q, __grid_constant__ CUtensorMap const map_k,
               __grid_constant__ CUtensorMap const map_v, __grid_constant__ FwdParams const p) {
    // Used as it is, without pointer arithmetic that would hide from the compiler that this is shared memory.
    extern __shared__ __align__(1024) uint8_t raw[];
    FwdSmem<C>& sm = *reinterpret_cast<FwdSmem<C>*>(raw);
    if ((smem_addr(raw) & 1023) != 0) asm volatile("trap;");  // the swizzle needs it, and nothing promises it
    int const warpgroup = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4 * C::kWarpgroups;
        mbar_init(&sm.q_full, 1);
        mbar_init(&sm.q_empty, 32 * kWarps);  // every lane reads the tile's description, and arrives for itself
        for (int i = 0; i < C::kStages; ++i) {
            mbar_init(&sm.k_full[i], 1);
            mbar_init(&sm.k_empty[i], kWarps);
            mbar_init(&sm.v_full[i], 1);
            mbar_init(&sm.v_empty[i], kWarps);
        }
        fence_barrier_init();
    }
    // Rows of the Q tile that the copies never fill (a group that does not divide kM) must still be finite.
    int const rows = p.tiles.group * p.tiles.tokens;
    for (int i = rows * 8 + threadIdx.x; i < C::kM * 8; i += C::kThreads) {
        reinterpret_cast<uint4*>(sm.q)[i] = uint4{0, 0, 0, 0};
    }
    fence_proxy_async();
    __syncthreads();
    if (warpgroup == 0) {
        reg_dec<C::kProducerRegs>();
        if (threadIdx.x == 0) {
            tma_prefetch_descriptor(&map_q);
            tma_prefetch_descriptor(&map_k);
            tma_prefetch_descriptor(&map_v);
            fwd_producer<C>(sm, &map_q, &map_k, &map_v, p);
        }
    } else {
        reg_inc<C::kConsumerRegs>();
        fwd_consumer<C>(sm, p, warpgroup - 1);
    }
}

}  // namespace sink_fa3
