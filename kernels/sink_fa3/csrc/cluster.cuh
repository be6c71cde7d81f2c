// Thin wrappers, as in ptx.cuh, over what two blocks of a cluster need to share an operand, and over cp.async.
#pragma once

#include "ptx.cuh"

namespace sink_fa3 {

// ------------------------------------------------------------------------------------------------ clusters of two blocks
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Arrives at the barrier of the block `rank` of the cluster.
__device__ __forceinline__ void mbar_arrive_at(uint64_t* bar, uint32_t rank) {
    asm volatile(
        "{.reg .b32 a;\n"
        "mapa.shared::cluster.u32 a, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [a];}" ::"r"(smem_addr(bar)),
        "r"(rank)
        : "memory");
}
// A box to this block, or, kBoth, to both blocks at the same addresses; each one's own barrier `bar` gets its bytes.
template <bool kBoth>
__device__ __forceinline__ void load_3d(uint32_t dst, CUtensorMap const* map, uint32_t bar, int c0, int c1, int c2) {
    if constexpr (kBoth) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
            "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "h"(static_cast<uint16_t>(3))
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
            "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
            : "memory");
    }
}
template <bool kBoth>
__device__ __forceinline__ void load_4d(uint32_t dst, CUtensorMap const* map, uint32_t bar, int c0, int c1, int c2, int c3) {
    if constexpr (kBoth) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
            "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<uint16_t>(3))
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                dst),
            "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
            : "memory");
    }
}

// ------------------------------------------------------------------------------------------------ cp.async
// 16 bytes, or zeros.
__device__ __forceinline__ void copy_chunk(uint32_t dst, void const* src, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace sink_fa3
