// Backward of the window kernels: one pass over the queries, every product computed once, no atomics.
//
// A CTA walks along a chunk of tiles of one KV head. Two warpgroups compute, each for its 8 tokens x 8 heads (64 rows):
//   S = Q K^T, dP = dO V^T (64 x 136), P = exp2(S - lse), delta = rowsum(P * dP), dS = P * (dP - delta), dQ = dS K.
// With all keys of a row present, delta needs no O. P and dS go to shared memory, transposed; warpgroup 0 then accumulates
// dV^T += dO^T P and warpgroup 1 dK^T += Q^T dS (64 x 144, in registers) over the 128 rows of the tile. The 144 columns are a
// ring of 9 key blocks: when a tile is done, no later query sees the oldest block, which is written out and cleared.
// Only key blocks seen from two chunks (8 at each border) go through fp32 scratch; a second small kernel adds the two parts in
// a fixed order and reduces dsinks. So the result is bit-identical from run to run.
#include <cudaTypedefs.h>

#include "window_host.cuh"

namespace sink_fa3::window {
namespace {

constexpr int kThreads = 3 * 128;
constexpr int kHalo = kBlocks - 1;                       // key blocks shared by neighbouring chunks
constexpr int kBlockElements = kTileTokens * kHeadDim;
constexpr int kPanelBytes = kBlocks * kBlockBytes;       // 144 keys x 64 rows of P^T or dS^T

struct BwdParams {
    CUtensorMap q, k, v, dout;
    float const* lse;
    float const* sinks;
    int const* cu_seqlens;
    void *dq, *dk, *dv;
    float* border;        // (2: dV, dK; 2: head, tail; chunks; kv_heads; kHalo; kBlockElements), accumulator order
    float* dsinks_parts;  // (chunks, heads)
    int num_seqs, seq_length;
    int total, kv_heads, window;
    int tiles, per_chunk, chunks;
    float scale, scale_log2;
};

struct BwdSmem {
    uint8_t k[kRingMirrored * kBlockBytes];
    uint8_t v[kRingMirrored * kBlockBytes];
    uint8_t q[kStages][kTileBytes];
    uint8_t dout[kStages][kTileBytes];
    uint8_t p[2][kPanelBytes];   // P^T: rows are keys in accumulator order, one panel for the rows of each warpgroup
    uint8_t ds[2][kPanelBytes];
    uint8_t flush[2][kBlockBytes];
    uint64_t full[kStages], empty[kStages], consumed;  // consumed: the products that read p and ds are done
};
constexpr int kSmemBytes = sizeof(BwdSmem) + 1024;

__device__ __forceinline__ float* border_block(BwdParams const& p, int which, int tail, int chunk, int kv_head, int block) {
    return p.border + ((((which * 2 + tail) * static_cast<int64_t>(p.chunks) + chunk) * p.kv_heads + kv_head) * kHalo + block) *
                          kBlockElements;
}

__device__ __forceinline__ void produce(BwdParams const& p, BwdSmem& smem, int kv_head, int first, int count) {
    int const block0 = first - kHalo;
    for (int n = 0; n < count; ++n) {
        int const stage = n % kStages, from = n == 0 ? 0 : n + kHalo;
        uint64_t* const bar = &smem.full[stage];
        mbar_wait(&smem.empty[stage], (n / kStages & 1) ^ 1);
        int bytes = 2 * kTileBytes;
        for (int b = from; b < n + kBlocks; ++b) bytes += 2 * key_block_bytes(b, true);
        mbar_arrive_tx(bar, bytes);
        tma_load_3d(smem.q[stage], &p.q, bar, 0, kv_head * kGroup, (first + n) * kTileTokens);
        for (int b = from; b < n + kBlocks; ++b) load_key_block<true>(smem.k, &p.k, bar, kv_head, block0 + b, b);
        tma_load_3d(smem.dout[stage], &p.dout, bar, 0, kv_head * kGroup, (first + n) * kTileTokens);
        for (int b = from; b < n + kBlocks; ++b) load_key_block<true>(smem.v, &p.v, bar, kv_head, block0 + b, b);
    }
}

// Takes ring slot `slot` out of the accumulators and clears it.
__device__ __forceinline__ void take_slot(float (&acc)[kBlocks * 8], int slot, float (&x)[8]) {
#pragma unroll
    for (int s = 0; s < kBlocks; ++s) {
        if (s == slot) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x[i] = acc[8 * s + i];
                acc[8 * s + i] = 0.f;
            }
        }
    }
}

// Writes a finished key block of dV or dK: accumulator order -> shared memory [key][d] -> 16 bytes a thread.
template <typename T>
__device__ __forceinline__ void write_block(T* out, uint8_t* stage, float const (&x)[8], float scale, int token, int total,
                                            int kv_head, int kv_heads, int barrier) {
    int const thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    uint32_t const key = lane % 8 + (lane / 16) * 8;
    stmatrix_x4_trans(smem_addr(stage) + sw128(key, 2 * warp + (lane / 8 & 1)), pack2<T>(x[0] * scale, x[1] * scale),
                      pack2<T>(x[2] * scale, x[3] * scale), pack2<T>(x[4] * scale, x[5] * scale),
                      pack2<T>(x[6] * scale, x[7] * scale));
    bar_sync(barrier, 128);
    int const row = thread / 8, chunk = thread % 8;
    if (token + row < total) {
        T* const to = out + (static_cast<int64_t>(token + row) * kv_heads + kv_head) * kHeadDim + chunk * 8;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(stage + sw128(row, chunk));
    }
}

// 4 x 4 transpose over the 4 lanes of a quad: lane q ends up with x[q] of lanes 0..3.
__device__ __forceinline__ uint4 quad_transpose(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3, int quad) {
    bool const odd = quad & 1, high = quad & 2;
    uint32_t const r01 = __shfl_xor_sync(0xffffffffu, odd ? x0 : x1, 1);
    uint32_t const r23 = __shfl_xor_sync(0xffffffffu, odd ? x2 : x3, 1);
    uint32_t const a0 = odd ? r01 : x0, a1 = odd ? x1 : r01;  // x0 or x1 of the lane pair, in lane order
    uint32_t const b0 = odd ? r23 : x2, b1 = odd ? x3 : r23;  // x2 or x3
    uint32_t const s0 = __shfl_xor_sync(0xffffffffu, high ? a0 : b0, 2);
    uint32_t const s1 = __shfl_xor_sync(0xffffffffu, high ? a1 : b1, 2);
    return high ? make_uint4(s0, s1, b0, b1) : make_uint4(a0, a1, s0, s1);
}

// dQ rows of a thread pair by quad: 16 bytes a thread, 64 contiguous bytes a quad.
template <typename T>
__device__ __forceinline__ void write_dq(T* row, float const (&dq)[kHeadDim / 2], int r, float scale, int quad, bool inside) {
    uint32_t x[8];
#pragma unroll
    for (int b = 0; b < 8; ++b) x[b] = pack2<T>(dq[4 * b + 2 * r] * scale, dq[4 * b + 2 * r + 1] * scale);
    uint4 const left = quad_transpose(x[0], x[1], x[2], x[3], quad), right = quad_transpose(x[4], x[5], x[6], x[7], quad);
    if (inside) {
        *reinterpret_cast<uint4*>(row + quad * 8) = left;
        *reinterpret_cast<uint4*>(row + 32 + quad * 8) = right;
    }
}

template <typename T, int kWG>
__device__ __forceinline__ void consume(BwdParams const& p, BwdSmem& smem, int chunk, int kv_head, int first, int count) {
    int const thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, quad = lane % 4;
    int const head = kv_head * kGroup + lane / 4, heads = p.kv_heads * kGroup;
    float const sink2 = p.sinks == nullptr ? -INFINITY : p.sinks[head] * kLog2e;
    int const offset = kWG * 8 + 2 * warp;
    SequenceCursor cursor(p.cu_seqlens, p.num_seqs, p.seq_length, first * kTileTokens + offset);
    float const* const lse_row = p.lse + static_cast<int64_t>(head) * p.total;
    T* const dkv = static_cast<T*>(kWG == 0 ? p.dv : p.dk);
    float const dkv_scale = kWG == 0 ? 1.f : p.scale;

    // Rows of P^T and dS^T are keys; this lane's row and 16-byte chunk of each stmatrix.
    uint32_t const store = sw128(lane % 8 + (lane / 16) * 8, 2 * warp + (lane / 8 & 1));
    uint32_t const p_addr = smem_addr(smem.p[kWG]) + store, ds_addr = smem_addr(smem.ds[kWG]) + store;
    uint64_t const desc_k = smem_desc_sw128(smem_addr(smem.k)), desc_v = smem_desc_sw128(smem_addr(smem.v));
    uint64_t const desc_b = smem_desc_sw128(smem_addr(kWG == 0 ? smem.p[0] : smem.ds[0]));

    float acc[kBlocks * 8];  // dV^T (warpgroup 0) or dK^T (1): rows d, columns keys of the ring
#pragma unroll
    for (int i = 0; i < kBlocks * 8; ++i) acc[i] = 0.f;
    float dsink = 0.f;
    int acc_slot = 0;  // ring slot of the tile's first key block in the accumulators

    auto const load_lse = [&](int n, int r) {
        int const token = (first + n) * kTileTokens + offset + r;
        return token < p.total ? lse_row[token] : INFINITY;
    };
    // Tile n - 1 ends (its products over P and dS) under the scores of tile n. Before the first tile P and dS are zero.
    uint32_t ds[kBlocks][4];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[j][i] = 0;
    for (int i = thread; i < 2 * kPanelBytes / 16; i += 128)
        reinterpret_cast<uint4*>(kWG == 0 ? smem.p[0] : smem.ds[0])[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
    bar_sync(3, 256);
    float lse_next[2] = {load_lse(0, 0), load_lse(0, 1)};
    mbar_wait(&smem.full[0], 0);

    for (int n = 0;; ++n) {
        int const now = min(n, count - 1), before = max(n - 1, 0);
        int const token = (first + n) * kTileTokens + offset;
        float dq[kHeadDim / 2];
        {
            uint8_t* const rows = kWG == 0 ? smem.dout[before % kStages] : smem.q[before % kStages];
            uint64_t const desc_a = smem_desc_sw128(smem_addr(rows));
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 8; ++k)  // 16 rows each, 4 steps in a panel
                Wgmma<T, kBlocks * kTileTokens, 0, 1>::ss(acc, desc_advance(desc_a, k * 2048),
                                                          desc_advance(desc_b, k / 4 * kPanelBytes + k % 4 * 32), 1);
#pragma unroll
            for (int j = 0; j < kBlocks; ++j)
                Wgmma<T, kHeadDim, 1>::rs(dq, ds[j], desc_advance(desc_k, (before % kRing + j) * kBlockBytes), j > 0);
            wgmma_commit();
        }
        mbar_wait(&smem.full[now % kStages], now / kStages & 1);
        float s[kCols / 2];
        {
            uint64_t const desc_q = smem_desc_sw128(smem_addr(smem.q[now % kStages]) + kWG * 8192);
            uint64_t const desc = desc_advance(desc_k, now % kRing * kBlockBytes + kWG * 1024);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) Wgmma<T, kCols, 0>::ss(s, desc_advance(desc_q, k * 32), desc_advance(desc, k * 32), k > 0);
            wgmma_commit();
        }
        wgmma_wait<1>();
        keep(dq);
        keep(acc);
        if (n > 0) {
            __syncwarp();
            if (lane == 0) {
                mbar_arrive(&smem.consumed);
                mbar_arrive(&smem.empty[before % kStages]);
            }
            int const t = token - kTileTokens;
            T* const row = static_cast<T*>(p.dq) + (static_cast<int64_t>(t) * heads + head) * kHeadDim;
            write_dq(row, dq, 0, p.scale, quad, t < p.total);
            write_dq(row + static_cast<int64_t>(heads) * kHeadDim, dq, 1, p.scale, quad, t + 1 < p.total);

            float x[8];
            take_slot(acc, acc_slot, x);
            acc_slot = acc_slot + 1 == kBlocks ? 0 : acc_slot + 1;
            if (n > kHalo) {
                write_block(dkv, smem.flush[kWG], x, dkv_scale, (first + n - 1 - kHalo) * kTileTokens, p.total, kv_head,
                            p.kv_heads, 1 + kWG);
            } else {
                float* const to = border_block(p, kWG, 0, chunk, kv_head, n - 1) + thread;
#pragma unroll
                for (int i = 0; i < 8; ++i) to[i * 128] = x[i];
            }
        }
        float dp[kCols / 2];
        {
            uint64_t const desc_do = smem_desc_sw128(smem_addr(smem.dout[now % kStages]) + kWG * 8192);
            uint64_t const desc = desc_advance(desc_v, now % kRing * kBlockBytes + kWG * 1024);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                Wgmma<T, kCols, 0>::ss(dp, desc_advance(desc_do, k * 32), desc_advance(desc, k * 32), k > 0);
            wgmma_commit();
        }
        wgmma_wait<1>();
        keep(s);
        if (n == count) {
            wgmma_wait<0>();
            break;
        }

        int const column0 = (first + n) * kTileTokens - kMaxWindow + kWG * 8;
        int lo[2], hi[2];
        float lse2[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            lo[r] = max(token + r - p.window + 1, cursor.start(token + r)) - column0;
            hi[r] = token + r - column0;
            lse2[r] = lse_next[r] * kLog2e;
            lse_next[r] = load_lse(min(n + 1, count - 1), r);
        }
        mask_scores(s, lo, hi, 2 * warp, quad);
        float psink[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float const base = lse2[r] == -INFINITY ? 0.f : lse2[r];  // an empty row: every score is -inf, P = 0
            psink[r] = sink2 == base ? 1.f : exp2_approx(sink2 - base);
#pragma unroll
            for (int b = 0; b < kColBlocks; ++b) {
                s[4 * b + 2 * r] = exp2_approx(fmaf(s[4 * b + 2 * r], p.scale_log2, -base));
                s[4 * b + 2 * r + 1] = exp2_approx(fmaf(s[4 * b + 2 * r + 1], p.scale_log2, -base));
            }
        }
        if (n > 0) mbar_wait(&smem.consumed, (n & 1) ^ 1);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            int const at = acc_slot + j < kBlocks ? acc_slot + j : acc_slot + j - kBlocks;
            uint32_t a[4];
            key_fragment<T, kWG>(s, j, a);
            stmatrix_x4_trans(p_addr + at * kBlockBytes, a[0], a[1], a[2], a[3]);
        }
        wgmma_wait<0>();
        keep(dp);

#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float delta0 = 0.f, delta1 = 0.f;
#pragma unroll
            for (int b = 0; b < kColBlocks; ++b) {
                delta0 = fmaf(s[4 * b + 2 * r], dp[4 * b + 2 * r], delta0);
                delta1 = fmaf(s[4 * b + 2 * r + 1], dp[4 * b + 2 * r + 1], delta1);
            }
            float const delta = quad_sum(delta0 + delta1);
            dsink -= psink[r] * delta;
#pragma unroll
            for (int b = 0; b < kColBlocks; ++b) {
                s[4 * b + 2 * r] *= dp[4 * b + 2 * r] - delta;
                s[4 * b + 2 * r + 1] *= dp[4 * b + 2 * r + 1] - delta;
            }
        }
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            int const at = acc_slot + j < kBlocks ? acc_slot + j : acc_slot + j - kBlocks;
            key_fragment<T, kWG>(s, j, ds[j]);
            stmatrix_x4_trans(ds_addr + at * kBlockBytes, ds[j][0], ds[j][1], ds[j][2], ds[j][3]);
        }
        fence_proxy_async();
        bar_sync(3, 256);
    }

    // What is left: the key blocks that the next chunk sees as well. In a chunk shorter than the halo some of them still
    // belong to the chunk before.
#pragma unroll
    for (int s9 = 0; s9 < kBlocks; ++s9) {
        int const j = (s9 - acc_slot + kBlocks) % kBlocks, local = count + j;
        if (j == kHalo) continue;
        float* const to = local < kHalo ? border_block(p, kWG, 0, chunk, kv_head, local) + thread
                                        : border_block(p, kWG, 1, chunk, kv_head, j) + thread;
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i * 128] = acc[8 * s9 + i];
    }

    float* const red = reinterpret_cast<float*>(smem.flush);  // (8 warps, 8 heads)
    bar_sync(3, 256);
    if (quad == 0) red[(kWG * 4 + warp) * 8 + lane / 4] = dsink;
    bar_sync(3, 256);
    if (kWG == 0 && thread < kGroup) {
        float sum = 0.f;
        for (int w = 0; w < 8; ++w) sum += red[w * 8 + thread];
        p.dsinks_parts[chunk * heads + kv_head * kGroup + thread] = sum;
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(__grid_constant__ BwdParams const p) {
    extern __shared__ uint8_t raw[];
    BwdSmem& smem = *reinterpret_cast<BwdSmem*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    int const chunk = blockIdx.x, kv_head = blockIdx.y;
    int const first = chunk * p.per_chunk, count = min(p.per_chunk, p.tiles - first);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            mbar_init(&smem.full[i], 1);
            mbar_init(&smem.empty[i], 8);  // one arrival a consumer warp
        }
        mbar_init(&smem.consumed, 8);
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        reg_dec<24>();
        if (threadIdx.x == 256) produce(p, smem, kv_head, first, count);
    } else if (threadIdx.x < 128) {
        reg_inc<240>();
        consume<T, 0>(p, smem, chunk, kv_head, first, count);
    } else {
        reg_inc<240>();
        consume<T, 1>(p, smem, chunk, kv_head, first, count);
    }
}

// One CTA adds a chunk's tail to the next chunk's head for one KV head, for dV (z = 0) or dK (1).
template <typename T>
__global__ void __launch_bounds__(128) border_kernel(__grid_constant__ BwdParams const p, float* dsinks) {
    int const chunk = blockIdx.x, kv_head = blockIdx.y, which = blockIdx.z, heads = p.kv_heads * kGroup;
    int const first = chunk * p.per_chunk, count = min(p.per_chunk, p.tiles - first);
    int const key = threadIdx.x / 8, d0 = threadIdx.x % 8 * 8;
    float const scale = which == 0 ? 1.f : p.scale;
    T* const out = static_cast<T*>(which == 0 ? p.dv : p.dk);
    for (int j = max(0, kHalo - count); j < kHalo; ++j) {
        int const token = (first + count - kHalo + j) * kTileTokens + key;
        float const* const tail = border_block(p, which, 1, chunk, kv_head, j);
        float const* const head = chunk + 1 < p.chunks ? border_block(p, which, 0, chunk + 1, kv_head, j) : nullptr;
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float y[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                // Accumulator order: element (key / 8, d / 8 % 2, key % 2) of thread (d / 16, d % 8, key % 8 / 2).
                int const d = d0 + 2 * i + e;
                int const at = (key / 8 * 4 + d / 8 % 2 * 2 + key % 2) * 128 + d / 16 * 32 + d % 8 * 4 + key % 8 / 2;
                y[e] = (tail[at] + (head == nullptr ? 0.f : head[at])) * scale;
            }
            x[i] = pack2<T>(y[0], y[1]);
        }
        if (token < p.total)
            *reinterpret_cast<uint4*>(out + (static_cast<int64_t>(token) * p.kv_heads + kv_head) * kHeadDim + d0) =
                make_uint4(x[0], x[1], x[2], x[3]);
    }
    if (dsinks != nullptr && chunk == 0 && which == 0 && threadIdx.x < kGroup) {
        int const head = kv_head * kGroup + threadIdx.x;
        float sum = 0.f;
        for (int c = 0; c < p.chunks; ++c) sum += p.dsinks_parts[c * heads + head];
        dsinks[head] = sum;
    }
}

// Chunks of at least the halo's length (the last may be shorter), so that a key block is seen from two chunks at most.
Chunks chunks_of(Problem const& p) { return split(p.total, p.kv_heads, multiprocessors(), kHalo); }

size_t border_elements(Problem const& p, Chunks const& c) {
    return static_cast<size_t>(4) * c.count * p.kv_heads * kHalo * kBlockElements;
}

template <typename T>
cudaError_t launch(BwdParams const& b, Problem const& p, float* dsinks, cudaStream_t stream) {
    cudaError_t const e =
        cudaFuncSetAttribute(backward_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
    if (e != cudaSuccess) return e;
    backward_kernel<T><<<dim3(b.chunks, b.kv_heads), kThreads, kSmemBytes, stream>>>(b);
    border_kernel<T><<<dim3(b.chunks, b.kv_heads, 2), 128, 0, stream>>>(b, dsinks);
    return cudaGetLastError();
}

}  // namespace

size_t backward_workspace(Problem const& p) {
    if (!supported(p)) return 0;
    Chunks const c = chunks_of(p);
    return (border_elements(p, c) + static_cast<size_t>(c.count) * p.heads) * sizeof(float);
}

cudaError_t backward(Problem const& p, Tensor3 q, Tensor3 k, Tensor3 v, Tensor3 dout, float const* lse, void* dq, void* dk,
                     void* dv, float* dsinks, void* workspace, cudaStream_t stream) {
    if (!supported(p)) return cudaErrorInvalidValue;
    BwdParams b{};
    cudaError_t e = make_map(b.q, q, p.fp16, p.total, p.heads, kTileTokens, kGroup);
    if (e == cudaSuccess) e = make_map(b.k, k, p.fp16, p.total, p.kv_heads, kTileTokens, 1);
    if (e == cudaSuccess) e = make_map(b.v, v, p.fp16, p.total, p.kv_heads, kTileTokens, 1);
    if (e == cudaSuccess) e = make_map(b.dout, dout, p.fp16, p.total, p.heads, kTileTokens, kGroup);
    if (e != cudaSuccess) return e;
    Chunks const c = chunks_of(p);
    b.lse = lse;
    b.sinks = p.sinks;
    b.cu_seqlens = p.cu_seqlens;
    b.dq = dq;
    b.dk = dk;
    b.dv = dv;
    b.border = static_cast<float*>(workspace);
    b.dsinks_parts = b.border + border_elements(p, c);
    b.num_seqs = p.num_seqs;
    b.seq_length = p.seq_length;
    b.total = p.total;
    b.kv_heads = p.kv_heads;
    b.window = p.window;
    b.tiles = c.tiles;
    b.per_chunk = c.per_chunk;
    b.chunks = c.count;
    b.scale = p.scale;
    b.scale_log2 = p.scale * kLog2e;
    return p.fp16 ? launch<__half>(b, p, dsinks, stream) : launch<__nv_bfloat16>(b, p, dsinks, stream);
}

}  // namespace sink_fa3::window
