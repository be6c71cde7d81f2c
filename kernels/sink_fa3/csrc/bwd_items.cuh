// Backward, what a block works on: configuration, shared memory, the tickets and the order of query tiles.
#pragma once

#include "bwd_params.cuh"
#include "fwd_mainloop.cuh"  // Ring

namespace sink_fa3 {

template <typename T_, int kStages_, bool kPingPong_, bool kDeterministic_, int kDsBuffers_>
struct BwdConfig {
    using T = T_;
    static constexpr int kStages = kStages_;
    static constexpr bool kPingPong = kPingPong_;  // the two warpgroups take turns at the tensor cores
    static constexpr bool kDeterministic = kDeterministic_;
    static constexpr int kDsBuffers = kDsBuffers_;
    static constexpr int kThreads = 384;
    static constexpr int kDqRegs = 72;
    static constexpr int kConsumerRegs = 216;
};

// Zeroed where it is made, padding too: ptxas 13.0 gives a vector store with an undefined tail the registers beyond the limit
// that setmaxnreg set, and the hardware refuses them ("illegal instruction" or "out-of-range address").
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
    alignas(1024) uint8_t ds[C::kDsBuffers][kBwdKeys * 128];  // rows are keys, 64 queries each
    alignas(1024) uint8_t staging[kBwdKeys * 128];
    alignas(128) float rows[C::kStages][2 * kBwdRows];
    uint64_t kv_full, item_empty;
    uint64_t full[C::kStages], empty[C::kStages];
    uint64_t ds_full[C::kDsBuffers], ds_empty[C::kDsBuffers];
    BwdItem item;
};

constexpr int kQueriesInL2 = (24 << 20) / 512;  // whose Q, dO and dQ accumulators of one head fill half of L2

__host__ __device__ __forceinline__ BwdItem bwd_item(BwdParams const& p, int ticket) {
    Place const at = place_of(p.order, ticket);
    BwdItem t{};
    t.kv_head = at.unit;
    int const b = at.sequence;
    t.k_begin = p.cu_k[b];
    t.k_len = p.cu_k[b + 1] - t.k_begin;
    t.n = (t.k_len + kBwdKeys - 1) / kBwdKeys - 1 - at.level;  // the first keys are seen by the most queries
    int const k0 = t.n * kBwdKeys;
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
    return t;
}

// The order in which a block walks over its query tiles: the last tiles first, heads inside. All blocks of a unit start at the same
// tile and stay close, so that what they read and add to is in L2. Deterministic mode needs it too: it adds to every dQ tile
// in ascending order of key blocks, and any order that starts at the diagonal would make the shorter blocks wait for the longest.
struct TileWalk {
    int m, head, head_begin, head_end;
    __device__ __forceinline__ void start(BwdParams const& p, BwdItem const& t) {
        head_begin = t.kv_head * p.heads_per_kv, head_end = head_begin + p.heads_per_kv;
        m = t.m_min + t.m_count - 1;
        head = head_begin;
    }
    __device__ __forceinline__ void next() {
        if (++head == head_end) {
            head = head_begin;
            --m;
        }
    }
};

}  // namespace sink_fa3
