// Backward of the window kernels: one pass over the queries, every product computed once, no atomics.
//
// A CTA walks along a chunk of tiles of one KV head. Two warpgroups compute, each for its 8 tokens x 8 heads (64 rows):
//   S = Q K^T, dP = dO V^T (64 x 136), P = exp2(S - lse), delta = rowsum(P * dP), dS = P * (dP - delta), dQ = dS K.
// With all keys of a row present, delta needs no O. P and dS go to shared memory, transposed; warpgroup 0 then accumulates
// dV^T += dO^T P and warpgroup 1 dK^T += Q^T dS (64 x 144, in registers) over the 128 rows of the tile. When a tile is done, no
// later query sees the oldest of its 9 key blocks: it is written out, and the other columns move up.
// Only key blocks seen from two chunks (8 at each border) go through fp32 scratch; a second small kernel adds the two parts in
// a fixed order and reduces dsinks. So the result is bit-identical from run to run.
#include "window_border.cuh"
#include "window_host.cuh"

namespace sink_fa3::window {
namespace {

constexpr int kThreads = 3 * 128;
constexpr int kPanelBytes = kBlocks * kBlockBytes;  // 144 keys x 64 rows of P^T or dS^T

struct BwdSmem {
    uint8_t k[kRingMirrored * kBlockBytes];
    uint8_t v[kRingMirrored * kBlockBytes];
    uint8_t q[kStages][kTileBytes];
    uint8_t dout[kStages][kTileBytes];
    uint8_t p[2][kPanelBytes];   // P^T: rows are keys in accumulator order, one panel for the rows of each warpgroup
    uint8_t ds[2][kPanelBytes];
    uint8_t out[2][kTileBytes / 2];  // dQ of a warpgroup's tile, then a finished block of dV or dK, on their way out
    float lse2[kStages][kGroup][kTileTokens];  // in units of log2; 0 for an empty row, whose scores are all -inf
    uint64_t full[kStages], empty[kStages], consumed;  // consumed: the products that read p and ds are done
};
constexpr int kSmemBytes = sizeof(BwdSmem);

// The loading warp. Its lanes bring the lse of the tile (a thread 4 tokens of one head): consumers with loads from global
// memory in flight would wait for them at every fence.
__device__ __forceinline__ void produce(BwdParams const& p, BwdSmem& smem, int kv_head, int first, int count) {
    int const lane = threadIdx.x % 32, block0 = first - kHalo, in_tile = lane % 4 * 4;
    float const* const lse_row = p.lse + static_cast<int64_t>(kv_head * kGroup + lane / 4) * p.total;
    for (int n = 0; n < count; ++n) {
        int const stage = n % kStages, from = n == 0 ? 0 : n + kHalo, token = (first + n) * kTileTokens + in_tile;
        uint64_t* const bar = &smem.full[stage];
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = token + i < p.total ? lse_row[token + i] : INFINITY;
        mbar_wait(&smem.empty[stage], (n / kStages & 1) ^ 1);
        if (lane == 0) {
            int bytes = 2 * kTileBytes;
            for (int b = from; b < n + kBlocks; ++b) bytes += 2 * key_block_bytes(b, true);
            mbar_arrive_tx(bar, bytes);
            tma_load_3d(smem.q[stage], &p.q, bar, 0, kv_head * kGroup, (first + n) * kTileTokens);
            for (int b = from; b < n + kBlocks; ++b) load_key_block<true>(smem.k, &p.k, bar, kv_head, block0 + b, b);
            tma_load_3d(smem.dout[stage], &p.dout, bar, 0, kv_head * kGroup, (first + n) * kTileTokens);
            for (int b = from; b < n + kBlocks; ++b) load_key_block<true>(smem.v, &p.v, bar, kv_head, block0 + b, b);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            smem.lse2[stage][lane / 4][in_tile + i] = x[i] == -INFINITY ? 0.f : x[i] * kLog2e;
        mbar_arrive(bar);
    }
}

// Takes the oldest key block out of the accumulators and moves the others up. (Leaving them in place and clearing a ring
// slot known at run time only costs 70 spilled registers, and index arithmetic at every store of P and dS.)
__device__ __forceinline__ void take_oldest(float (&acc)[kBlocks * 8], float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = acc[i];
#pragma unroll
    for (int i = 0; i < kBlocks * 8; ++i) acc[i] = i + 8 < kBlocks * 8 ? acc[i + 8] : 0.f;
}

// A warp's part of a finished key block of dV or dK (16 d x 16 keys): accumulator order -> `rows` [key][d].
template <typename T>
__device__ __forceinline__ void stage_block(uint8_t* rows, float const (&x)[8], float scale, int lane) {
    stmatrix_x4_trans(smem_addr(rows) + (lane % 8 + lane / 16 * 8) * 32 + (lane / 8 & 1) * 16, pack2<T>(x[0] * scale, x[1] * scale),
                      pack2<T>(x[2] * scale, x[3] * scale), pack2<T>(x[4] * scale, x[5] * scale),
                      pack2<T>(x[6] * scale, x[7] * scale));
}

// Stores a warp's 16 rows (2 tokens x 8 heads) of dQ through `rows`, 2048 bytes of shared memory.
template <typename T>
__device__ __forceinline__ void store_dq(CUtensorMap const* map, uint8_t* rows, float const (&dq)[kHeadDim / 2], float scale,
                                         int head, int token, int lane) {
    if (lane == 0) bulk_wait_read<0>();  // what was stored from `rows` before has left
    __syncwarp();
    uint32_t const to = smem_addr(rows) + (lane % 16) * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = pack2<T>(dq[8 * j + 2 * i] * scale, dq[8 * j + 2 * i + 1] * scale);
        stmatrix_x4(to + (((2 * j + lane / 16) ^ (lane & 7)) << 4), x[0], x[1], x[2], x[3]);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
        tma_store_3d(map, rows, 0, head, token);
        bulk_commit();
    }
}

// P carries the error of an lse in float32, 1e-3 for scores of 1e4. Dividing by what a row really sums to removes that from delta,
// and so from rows that are almost one-hot, whose dS is what the difference dP - delta leaves. A branch, because for scores of
// ordinary size there is nothing to gain, and the additions would cost 15 % of the kernel's time.
__device__ __forceinline__ void normalise_delta(float (&delta)[2], float const (&s)[kCols / 2], float const (&lse2)[2], float sink2) {
    constexpr float kLarge = 128.f;  // the last bit of a larger one is 1.5e-5 or more
    if (!__any_sync(0xffffffff, fabsf(lse2[0]) > kLarge || fabsf(lse2[1]) > kLarge)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float all = 0.f;
#pragma unroll
        for (int b = 0; b < kColBlocks; ++b) all += s[4 * b + 2 * r] + s[4 * b + 2 * r + 1];
        all = quad_sum(all) + (sink2 == lse2[r] ? 1.f : exp2_approx(sink2 - lse2[r]));
        if (all > 0.f) delta[r] *= __frcp_rn(all);
    }
}

template <typename T, int kWG>
__device__ __forceinline__ void consume(BwdParams const& p, BwdSmem& smem, int first, int count) {
    int const thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, quad = lane % 4;
    int const kv_head = blockIdx.y, chunk = blockIdx.x;
    // The two tokens of this thread in tile n: 16 * (first + n) + offset, + 1; its head is kv_head * 8 + lane / 4.
    int const offset = kWG * 8 + 2 * warp;
    float const sink2 = p.sinks.data == nullptr ? -INFINITY : load_sink(p.sinks, kv_head * kGroup + lane / 4) * kLog2e;
    SequenceCursor cursor(p.seqs, first * kTileTokens + offset);
    uint8_t* const rows = smem.out[kWG] + warp * 2048;
    // Rows of P^T and dS^T are keys; this lane's row and 16-byte chunk of each stmatrix.
    uint32_t const to = smem_addr(smem.p[kWG]) + sw128(lane % 8 + lane / 16 * 8, 2 * warp + (lane / 8 & 1));
    constexpr uint32_t kToDs = 2 * kPanelBytes;  // from p to ds

    float acc[kBlocks * 8];  // dV^T (warpgroup 0) or dK^T (1): rows d, columns the keys of the tile
#pragma unroll
    for (int i = 0; i < kBlocks * 8; ++i) acc[i] = 0.f;
    float dsink = 0.f;

    // The products of tile n - 1 over P and dS run under the exponentials of tile n. Before the first tile both are zero.
    for (int i = thread; i < 2 * kPanelBytes / 16; i += 128)
        reinterpret_cast<uint4*>(kWG == 0 ? smem.p[0] : smem.ds[0])[i] = make_uint4(0, 0, 0, 0);
    uint32_t ds[kBlocks][4];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[j][i] = 0;
    fence_proxy_async();
    bar_sync(3, 256);

    for (int n = 0;; ++n) {
        int const now = min(n, count - 1), before = max(n - 1, 0);
        mbar_wait(&smem.full[now % kStages], now / kStages & 1);
        float dq[kHeadDim / 2];
        {
            Operand const k(smem_addr(smem.k) + before % kRing * kBlockBytes);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < kBlocks; ++j) Wgmma<T, kHeadDim, 1>::rs(dq, ds[j], k.at(j * kBlockBytes), j > 0);
        }
        float s[kCols / 2];
        {
            Operand const q(smem_addr(smem.q[now % kStages]) + kWG * 8192);
            Operand const k(smem_addr(smem.k) + now % kRing * kBlockBytes + kWG * 1024);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) Wgmma<T, kCols, 0>::ss(s, q.at(i * 32), k.at(i * 32), i > 0);
            wgmma_commit();
        }
        {
            Operand const a(smem_addr(kWG == 0 ? smem.dout[before % kStages] : smem.q[before % kStages]));
            Operand const b(smem_addr(kWG == 0 ? smem.p[0] : smem.ds[0]));
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; ++i)  // 16 rows each, 4 steps in a panel
                Wgmma<T, kBlocks * kTileTokens, 0, 1>::ss(acc, a.at(i * 2048), b.at(i / 4 * kPanelBytes + i % 4 * 32), 1);
            wgmma_commit();
        }
        int lo[2], hi[2];
        float lse2[2] = {0.f, 0.f};
        if (quad == 0) {  // the lanes that will arrive at `empty`
            lse2[0] = smem.lse2[now % kStages][lane / 4][offset];
            lse2[1] = smem.lse2[now % kStages][lane / 4][offset + 1];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) lse2[r] = __shfl_sync(0xffffffff, lse2[r], lane & ~3);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int const token = (first + n) * kTileTokens + offset + r;
            hi[r] = kMaxWindow + 2 * warp + r;
            lo[r] = hi[r] - min(p.window - 1, token - cursor.start(p.seqs, token));
        }
        wgmma_wait<1>();
        keep(dq);
        keep(s);
        if (n > 0)
            store_dq<T>(&p.dq, rows, dq, p.scale, kv_head * kGroup, (first + n - 1) * kTileTokens + offset, lane);
        float dp[kCols / 2];
        {
            Operand const o(smem_addr(smem.dout[now % kStages]) + kWG * 8192);
            Operand const v(smem_addr(smem.v) + now % kRing * kBlockBytes + kWG * 1024);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) Wgmma<T, kCols, 0>::ss(dp, o.at(i * 32), v.at(i * 32), i > 0);
            wgmma_commit();
        }
        mask_scores(s, lo, hi, 2 * warp, quad);
#pragma unroll
        for (int i = 0; i < kCols / 2; ++i) s[i] = exp2_approx(fmaf(s[i], p.scale_log2, -lse2[i / 2 % 2]));
        keep(s);

        wgmma_wait<1>();
        keep(acc);
        __syncwarp();
        if (lane == 0) mbar_arrive(&smem.consumed);
        if (n > 0 && quad == 0) mbar_arrive(&smem.empty[before % kStages]);
        mbar_wait(&smem.consumed, n & 1);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            uint32_t a[4];
            key_fragment<T, kWG>(s, j, a);
            stmatrix_x4_trans(to + j * kBlockBytes, a[0], a[1], a[2], a[3]);
        }
        wgmma_wait<0>();
        keep(dp);
        keep(acc);
        // Accumulators are touched only when no product is in flight: the compiler copies them otherwise.
        float x[8];
        take_oldest(acc, x);
        auto const store_block = [&] {
            if (n > kHalo && lane == 0) {
                tma_store_3d(kWG == 0 ? &p.dv : &p.dk, rows, 16 * warp, kv_head, (first + n - 1 - kHalo) * kTileTokens);
                bulk_commit();
            }
        };
        if (n > kHalo) {
            if (lane == 0) bulk_wait_read<0>();  // dQ has left
            __syncwarp();
            stage_block<T>(rows, x, kWG == 0 ? 1.f : p.scale, lane);
        } else if (n > 0) {
            float* const border = border_block(p, kWG, 0, chunk, kv_head, n - 1) + thread;
#pragma unroll
            for (int i = 0; i < 8; ++i) border[i * 128] = x[i];
        }
        if (n == count) {
            fence_proxy_async();
            __syncwarp();
            store_block();
            break;
        }

        float delta[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
            for (int b = 0; b < kColBlocks; ++b) {
                sum0 = fmaf(s[4 * b + 2 * r], dp[4 * b + 2 * r], sum0);
                sum1 = fmaf(s[4 * b + 2 * r + 1], dp[4 * b + 2 * r + 1], sum1);
            }
            delta[r] = quad_sum(sum0 + sum1);
            dsink -= (sink2 == lse2[r] ? 1.f : exp2_approx(sink2 - lse2[r])) * delta[r];
        }
        normalise_delta(delta, s, lse2, sink2);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int const e = 8 * j - 4 * kWG + i;
                if (e >= 0 && e < kCols / 2) s[e] *= dp[e] - delta[e / 2 % 2];
            }
            key_fragment<T, kWG>(s, j, ds[j]);
            stmatrix_x4_trans(to + kToDs + j * kBlockBytes, ds[j][0], ds[j][1], ds[j][2], ds[j][3]);
        }
        fence_proxy_async();
        bar_sync(3, 256);
        store_block();
    }
    if (lane == 0) bulk_wait_read<0>();

    // What is left: the key blocks that the next chunk sees as well. In a chunk shorter than the halo some of them still
    // belong to the chunk before.
#pragma unroll
    for (int j = 0; j < kHalo; ++j) {
        int const local = count + j;
        float* const to = local < kHalo ? border_block(p, kWG, 0, chunk, kv_head, local) + thread
                                        : border_block(p, kWG, 1, chunk, kv_head, j) + thread;
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i * 128] = acc[8 * j + i];
    }

    float* const red = reinterpret_cast<float*>(smem.out);  // (8 warps, 8 heads)
    bar_sync(3, 256);
    if (thread % 4 == 0) red[(kWG * 4 + thread / 32) * 8 + thread % 32 / 4] = dsink;
    bar_sync(3, 256);
    if (kWG == 0 && thread < kGroup) {
        float sum = 0.f;
        for (int w = 0; w < 8; ++w) sum += red[w * 8 + thread];
        p.dsinks_parts[(chunk * p.kv_heads + kv_head) * kGroup + thread] = sum;
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(__grid_constant__ BwdParams const p) {
    extern __shared__ __align__(1024) uint8_t raw[];
    BwdSmem& smem = *reinterpret_cast<BwdSmem*>(raw);
    if (smem_addr(raw) % 1024 != 0) __trap();  // the swizzle needs it
    int const chunk = blockIdx.x, kv_head = blockIdx.y;
    int const first = chunk * p.per_chunk, count = min(p.per_chunk, p.tiles - first);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            mbar_init(&smem.full[i], 1 + 32);  // bytes announced, and the lse of each lane
            mbar_init(&smem.empty[i], 8 * 8);  // eight lanes of every consumer warp
        }
        mbar_init(&smem.consumed, 8);
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        reg_dec<24>();  // 24 * 128 + 240 * 256 is all that 384 threads with 168 registers hold
        if (threadIdx.x < 256 + 32) produce(p, smem, kv_head, first, count);
    } else if (threadIdx.x < 128) {
        reg_inc<240>();
        consume<T, 0>(p, smem, first, count);
    } else {
        reg_inc<240>();
        consume<T, 1>(p, smem, first, count);
    }
}

// Chunks of at least the halo's length (the last may be shorter), so that a key block is seen from two chunks at most.
Chunks chunks_of(Problem const& p) { return split(p.total, p.kv_heads, multiprocessors(), kHalo); }

size_t border_elements(Problem const& p, Chunks const& c) {
    return static_cast<size_t>(4) * c.count * p.kv_heads * kHalo * kBlockElements;
}

template <typename T>
cudaError_t launch(BwdParams const& b, Problem const& p, void* dsinks, cudaStream_t stream) {
    static std::atomic<uint64_t> allowed;
    cudaError_t const e = allow_shared_memory(allowed, backward_kernel<T>, kSmemBytes);
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
                     void* dv, void* dsinks, void* workspace, cudaStream_t stream) {
    if (!supported(p)) return cudaErrorInvalidValue;
    BwdParams b{};
    cudaError_t e = make_map(b.q, q, p.fp16, p.total, p.heads, kTileTokens, kGroup);
    if (e == cudaSuccess) e = make_map(b.k, k, p.fp16, p.total, p.kv_heads, kTileTokens, 1);
    if (e == cudaSuccess) e = make_map(b.v, v, p.fp16, p.total, p.kv_heads, kTileTokens, 1);
    if (e == cudaSuccess) e = make_map(b.dout, dout, p.fp16, p.total, p.heads, kTileTokens, kGroup);
    Tensor3 const dq_rows{dq, static_cast<int64_t>(p.heads) * kHeadDim, kHeadDim};
    int64_t const kv_row = static_cast<int64_t>(p.kv_heads) * kHeadDim;
    if (e == cudaSuccess) e = make_map(b.dq, dq_rows, p.fp16, p.total, p.heads, 2, kGroup);
    if (e == cudaSuccess) e = make_map(b.dk, {dk, kv_row, kHeadDim}, p.fp16, p.total, p.kv_heads, kTileTokens, 1, 16);
    if (e == cudaSuccess) e = make_map(b.dv, {dv, kv_row, kHeadDim}, p.fp16, p.total, p.kv_heads, kTileTokens, 1, 16);
    if (e != cudaSuccess) return e;
    Chunks const c = chunks_of(p);
    b.lse = lse;
    b.sinks = p.sinks;
    b.seqs = {p.cu_seqlens, p.num_seqs, p.seq_length};
    b.dk_rows = dk;
    b.dv_rows = dv;
    b.border = static_cast<float*>(workspace);
    b.dsinks_parts = b.border + border_elements(p, c);
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
