// Stands in for csrc/ptx.cuh and csrc/cluster.cuh: what the instructions do to the emulated machine. Asynchronous ones do it at a
// random later time, in any order that the hardware may choose.
#pragma once

#include "machine.h"

namespace sink_fa3 {

using emulation::self;

inline uint32_t smem_addr(void const* p) { return emulation::shared_address(p); }
inline bool elect_one() { return self->thread % 32 == 0; }
inline uint32_t uniform(uint32_t x) { return emulation::shuffle(x, 0); }
inline uint32_t sw128(uint32_t row, uint32_t chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
template <int kRegs>
void reg_inc() {}
template <int kRegs>
void reg_dec() {}
template <int N>
void keep(float (&)[N]) {}
template <typename T>
uint32_t pack2(float lo, float hi) {
    return __float2bfloat16(lo).bits | uint32_t(__float2bfloat16(hi).bits) << 16;
}

inline void fence_barrier_init() {}
inline void fence_proxy_async() { emulation::publish_copies(); }
inline void mbar_init(uint64_t* bar, uint32_t count) { emulation::barrier_init(smem_addr(bar), count); }
inline void mbar_arrive(uint64_t* bar) { emulation::arrive(self->block, smem_addr(bar), 0); }
inline void mbar_arrive_tx(uint64_t* bar, uint32_t bytes) { emulation::arrive(self->block, smem_addr(bar), bytes); }
inline void mbar_wait(uint64_t* bar, uint32_t parity) { emulation::wait(smem_addr(bar), parity); }

inline uint32_t cluster_rank() { return self->block; }
inline void cluster_sync() { emulation::cluster_sync(); }
inline void mbar_arrive_at(uint64_t* bar, uint32_t rank) { emulation::arrive(rank, smem_addr(bar), 0); }
template <bool kBoth>
void load_3d(uint32_t dst, CUtensorMap const* map, uint32_t bar, int c0, int c1, int c2) {
    emulation::load(kBoth, dst, *map, bar, {c0, c1, c2, 0});
}
template <bool kBoth>
void load_4d(uint32_t dst, CUtensorMap const* map, uint32_t bar, int c0, int c1, int c2, int c3) {
    emulation::load(kBoth, dst, *map, bar, {c0, c1, c2, c3});
}
inline void copy_chunk(uint32_t dst, void const* src, bool there) { emulation::copy(dst, src, there); }
inline void copy_commit() { emulation::copy_commit(); }
template <int kPending>
void copy_wait() {
    emulation::copy_wait(kPending);
}

inline void wgmma_fence() {}
inline void wgmma_commit() { emulation::product_commit(); }
template <int kPending>
void wgmma_wait() {
    emulation::product_wait(kPending);
}
inline uint64_t smem_desc_sw128(uint32_t addr, uint32_t block_bytes = 16) {
    return (addr & 0x3FFFF) >> 4 | uint64_t(block_bytes >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
inline uint64_t desc_from(uint32_t low, uint64_t like) { return like >> 32 << 32 | low; }
template <typename T, int N, int kTransB, int kTransA = 0>
struct Wgmma {
    static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
        emulation::product(d, N, a, b, kTransA != 0, kTransB != 0, accumulate != 0);
    }
};

}  // namespace sink_fa3

template <typename Read>
struct Special {
    struct {
        operator int() const { return Read()(); }
    } x;
};
struct ReadThread {
    int operator()() const { return emulation::self->thread; }
};
struct ReadBlock {
    int operator()() const { return emulation::block_index(); }
};
struct ReadGrid {
    int operator()() const { return emulation::grid(); }
};
inline Special<ReadThread> threadIdx;
inline Special<ReadBlock> blockIdx;
inline Special<ReadGrid> gridDim;
#define __syncthreads emulation::sync_threads
#define __syncwarp emulation::sync_warp
#define __shfl_sync(mask, value, lane) emulation::shuffle(value, lane)
#define __shfl_xor_sync(mask, value, lanes) emulation::shuffle(value, emulation::self->thread % 32 ^ (lanes))
