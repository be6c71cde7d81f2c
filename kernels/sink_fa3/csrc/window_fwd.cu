// Forward of the window kernels: one-shot softmax, no loop over keys.
//
// A CTA walks along a chunk of tiles of one KV head. One thread loads ahead Q of the next tile and the one key block that
// the next tile sees and the present one does not (K and V rings in shared memory: every key is read from L2 once per chunk,
// K twice for its mirror). Two warpgroups compute S = Q K^T (64 x 136), the softmax with the sink, O = P V, and each warp stores its own 16 rows through
// TMA. Two CTAs share an SM, so the exponentials of one warpgroup run under the products of the others.
#include "window_host.cuh"

namespace sink_fa3::window {
namespace {

constexpr int kThreads = 2 * 128;

struct FwdParams {
    CUtensorMap q, k, v, out;
    float* lse;
    Sinks sinks;
    Sequences seqs;
    int total, window;
    int tiles, per_chunk;
    float scale_log2;
};

struct FwdSmem {
    uint8_t k[kRingMirrored * kBlockBytes];
    uint8_t v[kRing * kBlockBytes];
    uint8_t q[kStages][kTileBytes];
    uint8_t out[kTileBytes];
    float lse[kStages][kGroup][kTileTokens];
    uint64_t full[kStages], empty[kStages];
};
constexpr int kSmemBytes = sizeof(FwdSmem);

// Starts the loads of tile n: its Q, and the key blocks no earlier tile of this CTA has seen.
__device__ __forceinline__ void load_tile(FwdParams const& p, FwdSmem& smem, int kv_head, int first, int n) {
    uint64_t* const bar = &smem.full[n % kStages];
    int const from = n == 0 ? 0 : n + kBlocks - 1, block0 = first - (kBlocks - 1);
    int bytes = kTileBytes;
    for (int b = from; b < n + kBlocks; ++b) bytes += key_block_bytes(b, true) + key_block_bytes(b, false);
    mbar_arrive_tx(bar, bytes);
    tma_load_3d(smem.q[n % kStages], &p.q, bar, 0, kv_head * kGroup, (first + n) * kTileTokens);
    for (int b = from; b < n + kBlocks; ++b) {
        load_key_block<true>(smem.k, &p.k, bar, kv_head, block0 + b, b);
        load_key_block<false>(smem.v, &p.v, bar, kv_head, block0 + b, b);
    }
}

// When all warps are done with tile n, one warp stores its lse (a thread 4 tokens of one head: the consumers' own 4-byte stores
// cost a quarter of a sector each and a wait at every fence) and starts the loads of the tile that takes its stage.
__device__ __forceinline__ void finish_tile(FwdParams const& p, FwdSmem& smem, int kv_head, int first, int count, int n) {
    int const stage = n % kStages, lane = threadIdx.x % 32, token = (first + n) * kTileTokens + lane % 4 * 4;
    mbar_wait(&smem.empty[stage], n / kStages & 1);
    float const* const x = &smem.lse[stage][lane / 4][lane % 4 * 4];
    float* const to = p.lse + static_cast<int64_t>(kv_head * kGroup + lane / 4) * p.total + token;
    if (p.total % 4 == 0) {
        if (token < p.total) *reinterpret_cast<float4*>(to) = *reinterpret_cast<float4 const*>(x);
    } else {
        for (int i = 0; i < 4; ++i)
            if (token + i < p.total) to[i] = x[i];
    }
    __syncwarp();
    if (lane == 0 && n + kStages < count) load_tile(p, smem, kv_head, first, n + kStages);
    __syncwarp();
}

// Softmax in place of the scores of a thread's two rows: s becomes exp2(s * scale - max). Returns log2 of the row sums, sink
// included, in lse2 and their reciprocals in inv. An empty row without a sink gives -inf and 0.
__device__ __forceinline__ void softmax(float (&s)[kCols / 2], float scale_log2, float sink2, float (&lse2)[2],
                                        float (&inv)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float top = -INFINITY;
#pragma unroll
        for (int b = 0; b < kColBlocks; ++b) top = fmaxf(top, fmaxf(s[4 * b + 2 * r], s[4 * b + 2 * r + 1]));
        top = fmaxf(quad_max(top) * scale_log2, sink2);
        float const base = top == -INFINITY ? 0.f : top;
        float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
        for (int b = 0; b < kColBlocks; ++b) {
            s[4 * b + 2 * r] = exp2_approx(fmaf(s[4 * b + 2 * r], scale_log2, -base));
            s[4 * b + 2 * r + 1] = exp2_approx(fmaf(s[4 * b + 2 * r + 1], scale_log2, -base));
            sum0 += s[4 * b + 2 * r];
            sum1 += s[4 * b + 2 * r + 1];
        }
        // sink2 == base also where both are +inf, which would otherwise give NaN.
        float const sum = quad_sum(sum0 + sum1) + (sink2 == base ? 1.f : exp2_approx(sink2 - base));
        lse2[r] = base + __log2f(sum);  // sum is 0 (-inf) or at least 1: the largest term is exp2(0)
        inv[r] = sum == 0.f ? 0.f : __fdividef(1.f, sum);
    }
}

template <typename T, int kWG>
__device__ __forceinline__ void consume(FwdParams const& p, FwdSmem& smem, int kv_head, int first, int count) {
    int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, quad = lane % 4;
    float const sink2 = p.sinks.data == nullptr ? -INFINITY : load_sink(p.sinks, kv_head * kGroup + lane / 4) * kLog2e;
    int const offset = kWG * 8 + 2 * warp;  // this warp's two tokens in the tile
    SequenceCursor cursor(p.seqs, first * kTileTokens + offset);
    uint8_t* const out_rows = smem.out + (kWG * 4 + warp) * 2048;
    uint32_t const out_addr = smem_addr(out_rows) + (lane % 16) * 128;  // stmatrix: lanes 0-15 left halves, 16-31 right
    int slot = 0;  // ring slot of the tile's first key block

    for (int n = 0; n < count; ++n) {
        int const stage = n % kStages;
        mbar_wait(&smem.full[stage], n / kStages & 1);
        float s[kCols / 2];
        {
            Operand const q(smem_addr(smem.q[stage]) + kWG * 8192), k(smem_addr(smem.k) + slot * kBlockBytes + kWG * 1024);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) Wgmma<T, kCols, 0>::ss(s, q.at(i * 32), k.at(i * 32), i > 0);
            wgmma_commit();
        }
        if (kWG == 0 && warp == 0 && n > 0) finish_tile(p, smem, kv_head, first, count, n - 1);
        int const token = (first + n) * kTileTokens + offset;
        int const column0 = (first + n) * kTileTokens - kMaxWindow + kWG * 8;
        int lo[2], hi[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            lo[r] = max(token + r - p.window + 1, cursor.start(p.seqs, token + r)) - column0;
            hi[r] = offset % 8 + r + kMaxWindow;
        }
        wgmma_wait<0>();
        keep(s);

        mask_scores(s, lo, hi, 2 * warp, quad);
        float lse2[2], inv[2];
        softmax(s, p.scale_log2, sink2, lse2, inv);

        uint32_t a[kBlocks][4];
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) key_fragment<T, kWG>(s, j, a[j]);
        float o[kHeadDim / 2];
        Operand const v(smem_addr(smem.v));
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            int const at = slot + j < kRing ? slot + j : slot + j - kRing;
            Wgmma<T, kHeadDim, 1>::rs(o, a[j], v.at(at * kBlockBytes), j > 0);
        }
        wgmma_commit();
        if (quad == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) smem.lse[stage][lane / 4][offset + r] = lse2[r] * kLn2;
        }
        wgmma_wait<0>();
        keep(o);
        if (quad == 0) mbar_arrive(&smem.empty[stage]);  // those that wrote lse; the products are the whole warp's
        if (lane == 0) bulk_wait_read<0>();              // the previous tile's store has left shared memory
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t const chunk = 2 * j + lane / 16;
            stmatrix_x4(out_addr + ((chunk ^ (lane & 7)) << 4), pack2<T>(o[8 * j] * inv[0], o[8 * j + 1] * inv[0]),
                        pack2<T>(o[8 * j + 2] * inv[1], o[8 * j + 3] * inv[1]),
                        pack2<T>(o[8 * j + 4] * inv[0], o[8 * j + 5] * inv[0]),
                        pack2<T>(o[8 * j + 6] * inv[1], o[8 * j + 7] * inv[1]));
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0 && token < p.total) {
            tma_store_3d(&p.out, out_rows, 0, kv_head * kGroup, token);
            bulk_commit();
        }
        slot = slot + 1 == kRing ? 0 : slot + 1;
    }
    if (kWG == 0 && warp == 0) finish_tile(p, smem, kv_head, first, count, count - 1);
    if (lane == 0) bulk_wait_read<0>();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(__grid_constant__ FwdParams const p) {
    extern __shared__ __align__(1024) uint8_t raw[];
    FwdSmem& smem = *reinterpret_cast<FwdSmem*>(raw);
    if (smem_addr(raw) % 1024 != 0) __trap();  // the swizzle needs it
    int const kv_head = blockIdx.y, first = blockIdx.x * p.per_chunk, count = min(p.per_chunk, p.tiles - first);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            mbar_init(&smem.full[i], 1);
            mbar_init(&smem.empty[i], 8 * 8);  // eight lanes of every warp
        }
        fence_barrier_init();
        for (int n = 0; n < min(count, kStages); ++n) load_tile(p, smem, kv_head, first, n);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        consume<T, 0>(p, smem, kv_head, first, count);
    } else {
        consume<T, 1>(p, smem, kv_head, first, count);
    }
}

}  // namespace

cudaError_t forward(Problem const& p, Tensor3 q, Tensor3 k, Tensor3 v, void* out, float* lse, cudaStream_t stream) {
    if (!supported(p)) return cudaErrorInvalidValue;
    FwdParams f{};
    Tensor3 const o{out, static_cast<int64_t>(p.heads) * kHeadDim, kHeadDim};
    cudaError_t e = make_map(f.q, q, p.fp16, p.total, p.heads, kTileTokens, kGroup);
    if (e == cudaSuccess) e = make_map(f.k, k, p.fp16, p.total, p.kv_heads, kTileTokens, 1);
    if (e == cudaSuccess) e = make_map(f.v, v, p.fp16, p.total, p.kv_heads, kTileTokens, 1);
    if (e == cudaSuccess) e = make_map(f.out, o, p.fp16, p.total, p.heads, 2, kGroup);
    if (e != cudaSuccess) return e;
    Chunks const c = split(p.total, p.kv_heads, 2 * multiprocessors(), 1);
    f.lse = lse;
    f.sinks = p.sinks;
    f.seqs = {p.cu_seqlens, p.num_seqs, p.seq_length};
    f.total = p.total;
    f.window = p.window;
    f.tiles = c.tiles;
    f.per_chunk = c.per_chunk;
    f.scale_log2 = p.scale * kLog2e;
    static std::atomic<uint64_t> allowed[2];
    auto const kernel = p.fp16 ? &forward_kernel<__half> : &forward_kernel<__nv_bfloat16>;
    e = allow_shared_memory(allowed[p.fp16], kernel, kSmemBytes);
    if (e != cudaSuccess) return e;
    kernel<<<dim3(c.count, p.kv_heads), kThreads, kSmemBytes, stream>>>(f);
    return cudaGetLastError();
}

}  // namespace sink_fa3::window
