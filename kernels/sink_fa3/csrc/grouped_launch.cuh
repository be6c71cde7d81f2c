// Host side of the grouped products: descriptors, made anew for every call (a microsecond), and the launch of a cluster kernel.
#pragma once

#include "grouped_kernel.cuh"
#include "host.h"
#include "tensor_map.h"

namespace sink_fa3::grouped {

inline bool encode(CUtensorMap* map, void const* base, int rank, cuuint64_t const* dims, cuuint64_t const* strides, int width, int rows) {
    auto const fn = tensor_map_encoder();
    cuuint32_t const steps[4] = {1, 1, 1, 1}, box[4] = {cuuint32_t(width), cuuint32_t(rows), 1, 1};
    return fn != nullptr && fn(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(base), dims, strides, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Rows whose bound slides: row x of dimension 1 exists if x < kSlide, and address x + y + kSlide (2^34 - pitch) wraps to row
// x + y - kSlide.
inline bool encode_ragged(CUtensorMap* map, void const* base, int64_t columns, int64_t pitch, int width, int rows) {
    cuuint64_t const dims[4] = {cuuint64_t(columns), kSlide, 0x7FFF0000, 0x7FFF0000};
    cuuint64_t const bytes = pitch * 2, strides[3] = {bytes, bytes, (cuuint64_t(1) << 35) - bytes};
    return encode(map, base, 4, dims, strides, width, rows);
}

inline bool encode_matrices(CUtensorMap* map, void const* base, int64_t columns, int64_t height, int64_t count, int64_t pitch,
                            int64_t expert_pitch, int width, int rows) {
    cuuint64_t const dims[3] = {cuuint64_t(columns), cuuint64_t(height), cuuint64_t(count)};
    cuuint64_t const strides[2] = {cuuint64_t(pitch) * 2, cuuint64_t(expert_pitch) * 2};
    return encode(map, base, 3, dims, strides, width, rows);
}

template <typename C>
char const* launch(CUtensorMap const& map_a, CUtensorMap const& map_b, Params const& p, cudaStream_t stream) {
    static std::atomic<uint64_t> allowed;
    cudaError_t e = allow_shared_memory(allowed, grouped_kernel<C>, C::kSharedBytes);
    if (e != cudaSuccess) return cudaGetErrorString(e);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {C::kCluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = multiprocessors() / C::kCluster * C::kCluster;
    config.blockDim = C::kThreads;
    config.dynamicSmemBytes = C::kSharedBytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    e = cudaLaunchKernelEx(&config, grouped_kernel<C>, map_a, map_b, p);
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

constexpr char const* kNoDescriptor = "sink_fa3: the driver makes no TMA descriptor for an operand of a grouped product";

template <typename C>
char const* launch_rows(RowsCall const& c, cudaStream_t stream) {
    static_assert(C::kShare == kShareB && !C::kWeightGradient);
    CUtensorMap map_a{}, map_b;
    bool ok = C::kGather || encode_ragged(&map_a, c.a, c.contraction, c.a_pitch, kStep, C::kRows);
    if constexpr (C::kBMn) ok &= encode_matrices(&map_b, c.b, c.columns, c.contraction, c.experts, c.b_pitch, c.b_expert_pitch, 64, kStep / 2);
    else ok &= encode_matrices(&map_b, c.b, c.contraction, c.columns, c.experts, c.b_pitch, c.b_expert_pitch, kStep, C::kColumns / 2);
    if (!ok) return kNoDescriptor;
    Params p{};
    p.offsets = c.offsets, p.experts = c.experts, p.columns = c.columns, p.contraction = c.contraction, p.group = 16;
    p.padded_a = c.padded_a;
    p.out = static_cast<bf16*>(c.out), p.pitch = c.out_pitch;
    p.gated = static_cast<bf16*>(c.gated), p.gated_pitch = c.gated_pitch;
    p.bias = static_cast<bf16 const*>(c.bias), p.bias_pitch = c.bias_pitch;
    p.order = c.order, p.weight = static_cast<bf16 const*>(c.weight);
    p.rows = static_cast<bf16 const*>(c.a), p.rows_pitch = c.a_pitch, p.top_k = c.top_k;
    p.alpha = c.alpha, p.limit = c.limit;
    return launch<C>(map_a, map_b, p, stream);
}

}  // namespace sink_fa3::grouped
