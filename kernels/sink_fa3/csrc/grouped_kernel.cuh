// Products of rows sorted by expert, persistent and warp-specialised for sm_90a: one warpgroup loads, `kWarpgroups` warpgroups of 64
// rows multiply. Two blocks form a cluster and share one operand, of which each loads one half for both.
//
// kWeightGradient = false: out[rows of e] = a[rows of e] W[e]; a (M, K) contiguous along K, W (E, K, N) or, kTransposed, (E, N, K).
// kWeightGradient = true:  out[e] = a[rows of e]^T b[rows of e]; a (M, H), b (M, N). `height` is H.
//
// kGather: row r of a is row order[r] / top_k of `rows`; the four warps of the loading warpgroup copy them by cp.async, because TMA on
// sm_90 takes no list of rows. What else is loaded comes by TMA from one thread.
//
// Rows past an expert's end arrive as zeros: the descriptors of row operands have an inner bound that slides with the expert
// (`ragged`, the wrap-around trick of triton.tools.ragged_tma). A warpgroup without rows multiplies nothing.
#pragma once

#include "cluster.cuh"
#include "grouped.h"

namespace sink_fa3::grouped {

using bf16 = __nv_bfloat16;

enum Share { kShareA, kShareB };
enum Epilogue { kPlain, kGated, kScattered };

constexpr int kStep = 64;            // contraction of a pipeline stage
constexpr int kPad = 64;             // `PAD` of experts/tiles.py
constexpr int kSlide = 0x40000000;  // bound of the sliding dimension

struct Params {
    int const* offsets;  // (E + 1,)
    int experts, columns, height, contraction, group;
    bool padded_a, padded_b;  // every expert's rows start at a multiple of kPad
    bf16* out;
    int64_t pitch, expert_pitch;  // of `out`, in elements
    bf16* gated;
    int64_t gated_pitch;
    bf16 const* bias;
    int64_t bias_pitch;  // of an expert
    int const* order;    // (M,): kScattered writes row r to order[r], times weight[order[r]]; kGather reads it
    bf16 const* weight;
    bf16 const* rows;
    int64_t rows_pitch;
    int top_k;
    float alpha, limit;
};

template <int kWarpgroups_, int kColumns_, int kStages_, Share kShare_, bool kTransposed_, bool kWeightGradient_, Epilogue kEpilogue_,
          bool kGather_ = false>
struct Config {
    static constexpr int kWarpgroups = kWarpgroups_, kColumns = kColumns_, kStages = kStages_;
    static constexpr Share kShare = kShare_;
    static constexpr bool kTransposed = kTransposed_, kWeightGradient = kWeightGradient_, kGather = kGather_;
    static constexpr Epilogue kEpilogue = kEpilogue_;
    static constexpr int kCluster = 2;
    static constexpr bool kAMn = kWeightGradient, kBMn = kWeightGradient || !kTransposed;  // contiguous along rows / columns
    static constexpr int kRows = 64 * kWarpgroups;
    static constexpr int kRowUnit = kRows * (kShare == kShareB ? 2 : 1);
    static constexpr int kColumnUnit = kColumns * (kShare == kShareA ? 2 : 1);
    static constexpr int kBBlocks = (kColumns + 63) / 64;  // of 64 columns, where those are contiguous
    static constexpr int kABytes = kRows * kStep * 2;
    static constexpr int kBBytes = (kBMn ? 64 * kBBlocks : kColumns) * kStep * 2;
    static constexpr int kStageBytes = kABytes + kBBytes;
    static constexpr int kLoadedBytes = kGather ? kBBytes : kStageBytes;  // by TMA
    static constexpr int kFullCount = kGather ? 5 : 1;
    static constexpr int kThreads = 128 * (kWarpgroups + 1);
    static constexpr int kConsumerRegs = kWarpgroups == 2 ? 232 : 152;
    static constexpr int kProducerRegs = kWarpgroups == 2 ? 40 : 56;
    // Four warpgroups have 128 registers a thread at entry, and ptxas takes no single product that needs more, whatever
    // setmaxnreg says: 240 columns in two of 128 and 112.
    static constexpr bool kSplit = kWarpgroups > 2 && kColumns > 192;
    static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStages * 16;
    static_assert(!kGather || (kShare == kShareB && !kAMn && kStages >= 3), "a gathered operand is not shared");
    static_assert(kSharedBytes <= 232448);
    static_assert(kABytes % 2048 == 0 && kBBytes % 2048 == 0, "halves start at multiples of 1024 bytes");
};

// ------------------------------------------------------------------------------------------------ tiles
// Walks over the tiles of this block's cluster. All tiles of an expert come one after another, so that its matrix is read from
// memory once; up to `group` of its row tiles share a column before the next column starts.
template <typename C>
struct Walk {
    int tile, expert = 0, before = 0;
    int start, end;   // rows of the expert
    int padded = 0;   // its first row where every expert starts at a multiple of kPad
    int row, column;  // first of this block's tile; rows count within the expert (or the weight gradient)
    uint32_t rank;

    __device__ __forceinline__ Walk() {
        rank = cluster_rank();
        tile = blockIdx.x / C::kCluster;
    }
    __device__ __forceinline__ bool find(Params const& p) {
        int const column_tiles = (p.columns + C::kColumnUnit - 1) / C::kColumnUnit;
        int row_tiles;
        while (true) {
            if (expert >= p.experts) return false;
            start = __ldg(p.offsets + expert);
            end = __ldg(p.offsets + expert + 1);
            row_tiles = ((C::kWeightGradient ? p.height : end - start) + C::kRowUnit - 1) / C::kRowUnit;
            if (tile < before + row_tiles * column_tiles) break;
            before += row_tiles * column_tiles;
            padded += (end - start + kPad - 1) / kPad * kPad;
            ++expert;
        }
        int const rest = tile - before;
        int const groups = (row_tiles + p.group - 1) / p.group;
        int const group = (row_tiles + groups - 1) / groups;
        int const first = rest / (group * column_tiles) * group;
        int const inside = rest - first * column_tiles;
        int const rows = min(row_tiles - first, group);
        row = (first + inside % rows) * C::kRowUnit + (C::kShare == kShareB ? rank * C::kRows : 0);
        column = inside / rows * C::kColumnUnit + (C::kShare == kShareA ? rank * C::kColumns : 0);
        return true;
    }
    __device__ __forceinline__ void next() { tile += gridDim.x / C::kCluster; }
    __device__ __forceinline__ int steps(Params const& p) const {
        return ((C::kWeightGradient ? end - start : p.contraction) + kStep - 1) / kStep;
    }
};

// ------------------------------------------------------------------------------------------------ loads
// `row` of the rows that end at `end` (there are `count` of them), see `encode_ragged`.
template <bool kBoth>
__device__ __forceinline__ void load_ragged(uint32_t dst, CUtensorMap const* map, uint32_t bar, int column, int row, int count, int end) {
    load_4d<kBoth>(dst, map, bar, column, kSlide - count + row, end, kSlide);
}

template <typename C>
__device__ __forceinline__ void load_b(Params const& p, Walk<C> const& at, CUtensorMap const* map, uint32_t b, uint32_t bar, int k) {
    constexpr bool kBoth = C::kShare == kShareB;
    int const half = kBoth ? at.rank : 0;
    if constexpr (C::kWeightGradient) {
        int const count = at.end - at.start, end = p.padded_b ? at.padded + count : at.end;
#pragma unroll
        for (int i = 0; i < C::kBBlocks; ++i)
            load_ragged<kBoth>(b + i * 8192 + half * 4096, map, bar, at.column + 64 * i, k + 32 * half, count, end);
    } else if constexpr (C::kBMn) {
#pragma unroll
        for (int i = 0; i < C::kBBlocks; ++i)
            load_3d<kBoth>(b + i * 8192 + half * 4096, map, bar, at.column + 64 * i, k + 32 * half, at.expert);
    } else {
        load_3d<kBoth>(b + half * (C::kBBytes / 2), map, bar, k, at.column + half * (C::kColumns / 2), at.expert);
    }
}

// One thread.
template <typename C>
__device__ __forceinline__ void produce(Params const& p, CUtensorMap const* map_a, CUtensorMap const* map_b, uint32_t stages,
                                        uint64_t* full, uint64_t* empty) {
    constexpr bool kBoth = C::kShare == kShareA;
    int stage = 0;
    uint32_t phase = 1;
    Walk<C> at;
    for (; at.find(p); at.next()) {
        int const steps = at.steps(p), count = at.end - at.start, end = p.padded_a ? at.padded + count : at.end;
        int const half = kBoth ? at.rank : 0;
        for (int step = 0; step < steps; ++step) {
            int const k = step * kStep;
            mbar_wait(&empty[stage], phase);
            mbar_arrive_tx(&full[stage], C::kLoadedBytes);
            uint32_t const bar = smem_addr(&full[stage]);
            uint32_t const a = stages + stage * C::kStageBytes;
            if constexpr (C::kAMn) {
#pragma unroll
                for (int i = 0; i < C::kWarpgroups; ++i)
                    load_ragged<kBoth>(a + i * 8192 + half * 4096, map_a, bar, at.row + 64 * i, k + 32 * half, count, end);
            } else {
                load_ragged<kBoth>(a + half * (C::kABytes / 2), map_a, bar, k, at.row + half * (C::kRows / 2), count, end);
            }
            load_b<C>(p, at, map_b, a + C::kABytes, bar, k);
            if (++stage == C::kStages) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}

// All 128 threads of the loading warpgroup. Eight of them copy the 128 bytes of a row, as TMA would swizzle them. A stage is
// announced once its copies have arrived, kAhead steps after they were issued. A stage is free again when the products of the step
// after it have been issued, so that step must have been announced before this thread waits for the stage: kAhead <= kStages - 2.
template <typename C>
__device__ __forceinline__ void produce_gathered(Params const& p, CUtensorMap const* map_b, uint32_t stages, uint64_t* full,
                                                 uint64_t* empty) {
    constexpr int kAhead = C::kStages - 2, kCopies = C::kRows / 16;
    int const thread = threadIdx.x & 127, chunk = thread & 7, first = thread >> 3;
    uint32_t const place = stages + sw128(first, chunk);  // 16 rows further the swizzle is the same
    auto announce = [&](int stage) {
        fence_proxy_async();  // this thread's copies, before the products read them
        __syncwarp();
        if ((thread & 31) == 0) mbar_arrive(&full[stage]);
    };
    int stage = 0, next = 0, pending = 0;
    uint32_t phase = 1;
    Walk<C> at;
    for (; at.find(p); at.next()) {
        int const steps = at.steps(p);
        int source[kCopies];  // all loads first, without branches: one latency, not twelve
        int const row = at.start + at.row + first;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) source[i] = __ldg(p.order + min(row + 16 * i, at.end - 1));
#pragma unroll
        for (int i = 0; i < kCopies; ++i) source[i] = row + 16 * i < at.end ? source[i] / p.top_k : -1;
        for (int step = 0; step < steps; ++step) {
            int const k = step * kStep, column = k + 8 * chunk;
            mbar_wait(&empty[stage], phase);
            if (thread == 0) {
                mbar_arrive_tx(&full[stage], C::kLoadedBytes);
                load_b<C>(p, at, map_b, stages + stage * C::kStageBytes + C::kABytes, smem_addr(&full[stage]), k);
            }
            __syncwarp();
            bool const inside = column < p.contraction;
            bf16 const* const from = p.rows + (inside ? column : 0);
#pragma unroll
            for (int i = 0; i < kCopies; ++i)
                copy_chunk(place + stage * C::kStageBytes + i * 2048, from + max(source[i], 0) * p.rows_pitch, inside && source[i] >= 0);
            copy_commit();
            if (++stage == C::kStages) {
                stage = 0;
                phase ^= 1;
            }
            if (pending < kAhead) {
                ++pending;
                continue;
            }
            copy_wait<kAhead>();
            announce(next);
            if (++next == C::kStages) next = 0;
        }
    }
    copy_wait<0>();
    for (; pending > 0; --pending) {
        announce(next);
        if (++next == C::kStages) next = 0;
    }
}

// ------------------------------------------------------------------------------------------------ stores
// Word i of lane j of a quad changes places with word j of lane i.
__device__ __forceinline__ void exchange(uint32_t& a, uint32_t& b, bool upper, int mask) {
    uint32_t const got = __shfl_xor_sync(0xffffffff, upper ? a : b, mask);
    if (upper) a = got;
    else b = got;
}
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
    exchange(w[0], w[1], lane & 1, 1);
    exchange(w[2], w[3], lane & 1, 1);
    exchange(w[0], w[2], lane & 2, 2);
    exchange(w[1], w[3], lane & 2, 2);
}

// Accumulators 4 j + 2 half + {0, 1} of a thread are columns 8 j + 2 quad + {0, 1} of row `half`. `valid`: the row exists.
template <int kBlocks>
__device__ __forceinline__ void store_row(float const* d, int half, bf16* row, bool valid, int columns, int lane) {
#pragma unroll
    for (int g = 0; g < (kBlocks + 3) / 4; ++g) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int const j = 4 * g + i;
            w[i] = j < kBlocks ? pack2<bf16>(d[4 * (j < kBlocks ? j : 0) + 2 * half], d[4 * (j < kBlocks ? j : 0) + 2 * half + 1]) : 0;
        }
        transpose_quad(w, lane);
        int const j = 4 * g + (lane & 3);
        if (valid && j < kBlocks && 8 * j < columns) *reinterpret_cast<uint4*>(row + 8 * j) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

// GPT-OSS's clamped SwiGLU of interleaved columns (gate even, linear odd): half as many columns.
template <int kBlocks>
__device__ __forceinline__ void store_gated(float const* d, int half, bf16* row, bool valid, int columns, int lane, float alpha,
                                            float limit) {
    auto activate = [&](int j) {
        float const gate = fminf(d[4 * j + 2 * half], limit);
        float const linear = fminf(fmaxf(d[4 * j + 2 * half + 1], -limit), limit);
        return __fdividef((linear + 1.f) * gate, 1.f + __expf(-alpha * gate));
    };
    static_assert(kBlocks % 2 == 0);
#pragma unroll
    for (int g = 0; g < (kBlocks + 7) / 8; ++g) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int const j = 8 * g + 2 * i;
            w[i] = 0;
            if (j < kBlocks) {
                float const even = activate(j), odd = activate(j + 1);
                float const got = __shfl_xor_sync(0xffffffff, lane & 1 ? even : odd, 1);
                w[i] = lane & 1 ? pack2<bf16>(got, odd) : pack2<bf16>(even, got);
            }
        }
        transpose_quad(w, lane);
        int const j = 8 * g + 2 * (lane & 3);
        if (valid && j < kBlocks && 8 * j < columns) *reinterpret_cast<uint4*>(row + 4 * j) = make_uint4(w[0], w[2], w[1], w[3]);
    }
}

template <typename C>
__device__ __forceinline__ void finish(Params const& p, Walk<C> const& at, float (&d)[C::kColumns / 2], int wg) {
    constexpr int kBlocks = C::kColumns / 8;
    int const lane = threadIdx.x & 31, columns = p.columns - at.column;
    int const first = at.row + wg * 64 + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
    int const rows = C::kWeightGradient ? p.height : at.end - at.start;
    if (C::kEpilogue != kPlain && p.bias != nullptr) {
        bf16 const* bias = p.bias + at.expert * p.bias_pitch + at.column + 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            if (8 * j < columns) {
                float2 const b = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 const*>(bias + 8 * j));
                d[4 * j] += b.x;
                d[4 * j + 1] += b.y;
                d[4 * j + 2] += b.x;
                d[4 * j + 3] += b.y;
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int const row = first + 8 * half;
        bool const valid = row < rows;
        int64_t place = C::kWeightGradient ? row : at.start + row;
        if constexpr (C::kEpilogue == kScattered) {
            place = valid ? p.order[place] : 0;
            if (p.weight != nullptr) {
                float const weight = __bfloat162float(p.weight[place]);
#pragma unroll
                for (int j = 0; j < kBlocks; ++j) {
                    d[4 * j + 2 * half] *= weight;
                    d[4 * j + 2 * half + 1] *= weight;
                }
            }
        }
        bf16* const out = p.out + (C::kWeightGradient ? at.expert * p.expert_pitch : 0) + place * p.pitch + at.column;
        if (C::kEpilogue != kGated || p.out != nullptr) store_row<kBlocks>(d, half, out, valid, columns, lane);
        if (C::kEpilogue == kGated && p.gated != nullptr)
            store_gated<kBlocks>(d, half, p.gated + place * p.gated_pitch + at.column / 2, valid, columns, lane, p.alpha, p.limit);
    }
}

// ------------------------------------------------------------------------------------------------ products
template <typename C>
__device__ __forceinline__ void release(uint64_t* bar) {
    int const lane = threadIdx.x & 31;
    if (lane < 2) mbar_arrive_at(bar, lane);
}

// d += a b for 16 of the contraction.
template <typename C>
__device__ __forceinline__ void multiply(float (&d)[C::kColumns / 2], uint64_t a, uint32_t b_low, uint64_t b_desc, int accumulate) {
    if constexpr (C::kSplit) {
        constexpr int kRest = C::kColumns - 128;  // 128 columns are two blocks of 8192 bytes or 128 rows of 128 bytes
        Wgmma<bf16, 128, C::kBMn, C::kAMn>::ss(reinterpret_cast<float(&)[64]>(d[0]), a, desc_from(b_low, b_desc), accumulate);
        Wgmma<bf16, kRest, C::kBMn, C::kAMn>::ss(reinterpret_cast<float(&)[kRest / 2]>(d[64]), a, desc_from(b_low + 16384 / 16, b_desc),
                                                 accumulate);
    } else {
        Wgmma<bf16, C::kColumns, C::kBMn, C::kAMn>::ss(d, a, desc_from(b_low, b_desc), accumulate);
    }
}

template <typename C>
__device__ __forceinline__ void consume(Params const& p, uint32_t stages, uint64_t* full, uint64_t* empty, int wg) {
    constexpr uint32_t kNextA = (C::kAMn ? 2048 : 32) / 16, kNextB = (C::kBMn ? 2048 : 32) / 16;
    uint64_t const a_desc = smem_desc_sw128(stages + wg * 8192);
    uint64_t const b_desc = smem_desc_sw128(stages + C::kABytes, C::kBMn ? 8192 : 16);
    uint32_t const a_low = uniform(static_cast<uint32_t>(a_desc)), b_low = uniform(static_cast<uint32_t>(b_desc));
    int stage = 0;
    uint32_t phase = 0;
    float d[C::kColumns / 2];
    Walk<C> at;
    for (; at.find(p); at.next()) {
        int const steps = at.steps(p);
        bool const active = at.row + wg * 64 < (C::kWeightGradient ? p.height : at.end - at.start) && at.column < p.columns;
        if (!active) {
            for (int step = 0; step < steps; ++step) {
                mbar_wait(&full[stage], phase);
                __syncwarp();  // a lane that has not yet looked must not find the next phase but one, and wait for ever
                release<C>(&empty[stage]);
                if (++stage == C::kStages) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            continue;
        }
        if (C::kWeightGradient && steps == 0) {
#pragma unroll
            for (int i = 0; i < C::kColumns / 2; ++i) d[i] = 0.f;
        }
        int previous = 0;
        for (int step = 0; step < steps; ++step) {
            uint32_t const low = uniform(stage * (C::kStageBytes / 16));
            mbar_wait(&full[stage], phase);
            wgmma_fence();
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
                multiply<C>(d, desc_from(a_low + low + i * kNextA, a_desc), b_low + low + i * kNextB, b_desc, step > 0 || i > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release<C>(&empty[previous]);
            previous = stage;
            if (++stage == C::kStages) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait<0>();
        keep(d);
        if (steps > 0) release<C>(&empty[previous]);
        finish<C>(p, at, d, wg);
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    grouped_kernel(__grid_constant__ CUtensorMap const map_a, __grid_constant__ CUtensorMap const map_b, __grid_constant__ Params const p) {
    extern __shared__ uint8_t raw[];
    uint8_t* const base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    uint64_t* const full = reinterpret_cast<uint64_t*>(base + C::kStages * C::kStageBytes);
    uint64_t* const empty = full + C::kStages;
    int const warpgroup = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kStages; ++i) {
            mbar_init(&full[i], C::kFullCount);
            mbar_init(&empty[i], 4 * C::kWarpgroups * C::kCluster);
        }
        fence_barrier_init();
    }
    __syncthreads();
    cluster_sync();
    if (warpgroup == C::kWarpgroups) {
        reg_dec<C::kProducerRegs>();
        if constexpr (C::kGather) {
            produce_gathered<C>(p, &map_b, smem_addr(base), full, empty);
        } else if (threadIdx.x < 128 * C::kWarpgroups + 32 && elect_one()) {
            produce<C>(p, &map_a, &map_b, smem_addr(base), full, empty);
        }
        __syncwarp();
    } else {
        reg_inc<C::kConsumerRegs>();
        consume<C>(p, smem_addr(base), full, empty, warpgroup);
    }
    cluster_sync();  // the other block may still write or arrive here
}

}  // namespace sink_fa3::grouped
