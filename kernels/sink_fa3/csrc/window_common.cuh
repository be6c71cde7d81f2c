// What the window kernels share. They serve causal attention with a window of at most 128 keys, head_dim 64 and 8 query
// heads per KV head, on packed (or equal-length) sequences whose queries and keys are the same tokens.
//
// The packed batch is treated as ONE sequence of `total` tokens in which token i sees keys max(i - window + 1, start(i))
// .. i, start(i) being the first token of its sequence: sequence borders are a mask, never a tile shape, so ragged batches
// cost nothing and the host never reads cu_seqlens.
//
// A tile is 16 tokens x 8 heads = 128 rows (row = token * 8 + head), two warpgroups of 8 tokens each. A warpgroup sees
// 8 + 127 keys: 136 columns, in which token a of the warpgroup sees columns a + 1 .. a + 128. In the accumulator layout of
// wgmma the two rows of a thread are the same head (lane / 4) of two neighbouring tokens (2 * warp, 2 * warp + 1), so the
// mask bounds are uniform in a warp.
#pragma once

#include "ptx.cuh"

namespace sink_fa3::window {

constexpr int kHeadDim = 64;
constexpr int kGroup = 8;        // query heads per KV head
constexpr int kTileTokens = 16;  // tokens per tile, also the keys per block
constexpr int kMaxWindow = 128;
constexpr int kBlocks = kMaxWindow / kTileTokens + 1;  // key blocks a tile sees: 9
constexpr int kCols = 136;                             // keys a warpgroup sees
constexpr int kColBlocks = kCols / 8;
constexpr int kBlockBytes = kTileTokens * kHeadDim * 2;             // one key block in shared memory
constexpr int kTileBytes = kTileTokens * kGroup * kHeadDim * 2;     // one tile of Q or dO
constexpr int kStages = 2;
// Ring of key blocks: the 9 of a tile and one more for the tile that is being prefetched. The first 8 are stored twice,
// `kRing` blocks apart, so that the 9 blocks of every tile lie contiguously (wgmma's N needs that).
constexpr int kRing = kBlocks + kStages - 1;
constexpr int kRingMirrored = kRing + kBlocks - 1;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kNoSequence = 1 << 30;  // start() of a token outside every sequence: it sees no key

struct Sequences {
    int const* cu;  // (count + 1,) or nullptr: sequences of `length` tokens each
    int count, length;
};

// First token of the sequence a token belongs to, for tokens asked in ascending order.
struct SequenceCursor {
    int index, begin, end;

    __device__ __forceinline__ SequenceCursor(Sequences const& seqs, int token) : index(0) {
        if (seqs.cu == nullptr) {
            begin = token / seqs.length * seqs.length;
            end = begin + seqs.length;
            return;
        }
        int hi = seqs.count;  // first index whose end lies beyond the token
        while (index < hi) {
            int const mid = (index + hi) >> 1;
            if (seqs.cu[mid + 1] > token) hi = mid;
            else index = mid + 1;
        }
        load(seqs);
    }
    __device__ __forceinline__ void load(Sequences const& seqs) {
        bool const inside = index < seqs.count;
        begin = inside ? seqs.cu[index] : kNoSequence;
        end = inside ? seqs.cu[index + 1] : 2 * (kNoSequence - 1);
    }
    __device__ __forceinline__ int start(Sequences const& seqs, int token) {
        while (token >= end) {
            if (seqs.cu == nullptr) {
                begin = end;
                end += seqs.length;
            } else {
                ++index;
                load(seqs);
            }
        }
        return begin;
    }
};

// Start address field of a descriptor (see smem_desc_sw128) as 32-bit arithmetic: the compiler then needs one uniform
// register move a product, where 64-bit sums take six instructions.
struct Operand {
    uint32_t low;
    __device__ __forceinline__ explicit Operand(uint32_t addr) : low(addr >> 4 | 1u << 16) {}
    __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
        return static_cast<uint64_t>(0x40000040u) << 32 | (low + (bytes >> 4));
    }
};

// Masks the scores of one warpgroup: row r (0, 1) of a thread keeps columns lo[r] .. hi[r], hi[r] >= 128.
__device__ __forceinline__ void mask_scores(float (&s)[kCols / 2], int const (&lo)[2], int const (&hi)[2], int first_token,
                                            int quad) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int const col = 2 * quad + (i & 1);
        if (col < lo[i >> 1]) s[i] = -INFINITY;
        if (col + kCols - 8 > hi[i >> 1] || col + kCols - 8 < lo[i >> 1]) s[4 * (kColBlocks - 1) + i] = -INFINITY;
    }
    // Only a sequence that starts inside the window, or a window below 128, masks anything between.
    if (lo[0] > first_token + 1 || lo[1] > first_token + 2) {
#pragma unroll
        for (int b = 1; b < kColBlocks - 1; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (8 * b + 2 * quad + (i & 1) < lo[i >> 1]) s[4 * b + i] = -INFINITY;
    }
}

// The A operand (16 keys, step j of 9) of a warpgroup's 136 columns laid over the tile's 144 keys: warpgroup 0 owns keys
// 0 .. 135, warpgroup 1 keys 8 .. 143, the rest is zero.
template <typename T, int kWG>
__device__ __forceinline__ void key_fragment(float const (&p)[kCols / 2], int j, uint32_t (&a)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int const b = 2 * j + half - kWG;
        bool const owned = b >= 0 && b < kColBlocks;
        a[2 * half] = owned ? pack2<T>(p[owned ? 4 * b : 0], p[owned ? 4 * b + 1 : 0]) : 0u;
        a[2 * half + 1] = owned ? pack2<T>(p[owned ? 4 * b + 2 : 0], p[owned ? 4 * b + 3 : 0]) : 0u;
    }
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Loads key block `block` (any sign: rows before the first or after the last token arrive as zeros) into its ring slot and,
// with kMirror, its second place. `local` counts blocks from the first one of this CTA.
template <bool kMirror>
__device__ __forceinline__ void load_key_block(uint8_t* ring, CUtensorMap const* map, uint64_t* bar, int kv_head, int block,
                                               int local) {
    int const slot = local % kRing;
    tma_load_3d(ring + slot * kBlockBytes, map, bar, 0, kv_head, block * kTileTokens);
    if (kMirror && slot < kBlocks - 1)
        tma_load_3d(ring + (slot + kRing) * kBlockBytes, map, bar, 0, kv_head, block * kTileTokens);
}
__device__ __forceinline__ int key_block_bytes(int local, bool mirror) {
    return mirror && local % kRing < kBlocks - 1 ? 2 * kBlockBytes : kBlockBytes;
}

}  // namespace sink_fa3::window
