// Backward, what a block works on: configuration, shared memory, the tickets and the order of query tiles.
#pragma once

#include "bwd_params.cuh"
#include "fwd_mainloop.cuh"  // Ring

namespace sink_fa3 {

template <typename T_, int kStages_, bool kPingPong_, bool kDeterministic_, bool kInStep_ = kDeterministic_>
struct BwdConfig {
    using T = T_;
    static constexpr int kStages = kStages_;
    static constexpr bool kPingPong = kPingPong_;  // the two warpgroups take turns at the tensor cores
    static constexpr bool kDeterministic = kDeterministic_;
    static constexpr bool kInStep = kInStep_;  // TileWalk
    static_assert(kInStep || !kDeterministic, "turns want blocks that follow each other");
    static constexpr int kThreads = 384;
    static constexpr int kDqRegs = 72;
    static constexpr int kConsumerRegs = 216;
};

struct alignas(16) BwdItem {
    int q_begin, q_len, k_begin, k_len;
    int kv_head, n, m_min, m_count;  // query tiles m_min .. m_min + m_count - 1 of every head
    int slot0, end, pad0, pad1;
};

template <typename C>
struct BwdSmem {
    alignas(1024) uint8_t k[kBwdKeys * 128];
    alignas(1024) uint8_t v[kBwdKeys * 128];
    alignas(1024) uint8_t q[C::kStages][kBwdRows * 128];
    alignas(1024) uint8_t dout[C::kStages][kBwdRows * 128];
    alignas(1024) uint8_t ds[2][kBwdKeys * 128];  // rows are keys, 64 queries each
    alignas(1024) uint8_t staging[kBwdKeys * 128];
    alignas(16) float rows[C::kStages][2 * kBwdRows];
    uint64_t kv_full, item_empty;
    uint64_t full[C::kStages], empty[C::kStages];
    uint64_t ds_full[2], ds_empty[2];
    BwdItem item;
};

__device__ __forceinline__ bool decode_bwd_ticket(BwdParams const& p, int ticket, BwdItem& t) {
    int const per_group = p.units_per_group * p.blocks;
    int const g = ticket / per_group;
    int const r = ticket - g * per_group;
    int const unit = g * p.units_per_group + r % p.units_per_group;
    t.n = r / p.units_per_group;  // the first keys are seen by the most queries
    int const b = unit / p.kv_heads;
    if (b >= p.batch) return false;
    t.kv_head = unit - b * p.kv_heads;
    t.k_begin = p.cu_k[b];
    t.k_len = p.cu_k[b + 1] - t.k_begin;
    int const k0 = t.n * kBwdKeys;
    if (k0 >= t.k_len) return false;
    t.q_begin = p.cu_q[b];
    t.q_len = p.cu_q[b + 1] - t.q_begin;
    t.slot0 = first_slot(p, b);
    int const offset = t.k_len - t.q_len;
    int const last_key = min(k0 + kBwdKeys, t.k_len) - 1;
    int const first = p.causal ? max(0, k0 - offset) : 0;
    int const end = p.window > 0 ? min(t.q_len, last_key - offset + p.window) : t.q_len;
    t.m_min = first / kBwdRows;
    t.m_count = end > first ? (end + kBwdRows - 1) / kBwdRows - t.m_min : 0;
    t.end = 0;
    return true;
}

// The order in which a block walks over its query tiles. In step: the last tiles first, heads inside. All blocks start at the
// same tile and stay close, which deterministic mode needs: it adds to every dQ tile in ascending order of key blocks, and any
// order that starts at the diagonal would make the shorter blocks wait for the longest. Otherwise: heads outside and ascending
// tiles, which spread concurrent blocks over different dQ tiles.
template <bool kInStep>
struct TileWalk {
    int m, head, m_min, m_end, head_begin, head_end;
    __device__ __forceinline__ void start(BwdParams const& p, BwdItem const& t) {
        m_min = t.m_min, m_end = t.m_min + t.m_count;
        head_begin = t.kv_head * p.heads_per_kv, head_end = head_begin + p.heads_per_kv;
        m = kInStep ? m_end - 1 : m_min;
        head = head_begin;
    }
    __device__ __forceinline__ void next() {
        if constexpr (kInStep) {
            if (++head == head_end) {
                head = head_begin;
                --m;
            }
        } else if (++m == m_end) {
            m = m_min;
            ++head;
        }
    }
};

}  // namespace sink_fa3
