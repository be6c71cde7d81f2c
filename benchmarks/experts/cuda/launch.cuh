// Host side of a variant: descriptors and the launch.
#pragma once

#include "grouped.cuh"
#include "grouped.h"
#include "tensor_map.h"

namespace experts {

inline bool encode(CUtensorMap* map, void const* base, int rank, cuuint64_t const* dims, cuuint64_t const* strides, cuuint32_t const* box) {
    auto const fn = tensor_map_encoder();
    cuuint32_t const steps[5] = {1, 1, 1, 1, 1};
    return fn != nullptr && fn(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(base), dims, strides, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Contiguous rows whose bound slides: row x of dimension 1 exists if x < kSlide, and address x + y + kSlide (2^34 - pitch) wraps to
// row x + y - kSlide.
inline bool encode_ragged(CUtensorMap* map, void const* base, int64_t width, int box_width, int box_rows) {
    cuuint64_t const dims[4] = {cuuint64_t(width), kSlide, 0x7FFF0000, 0x7FFF0000};
    cuuint64_t const pitch = width * 2, strides[3] = {pitch, pitch, (cuuint64_t(1) << 35) - pitch};
    cuuint32_t const box[4] = {cuuint32_t(box_width), cuuint32_t(box_rows), 1, 1};
    return encode(map, base, 4, dims, strides, box);
}

inline bool encode_matrices(CUtensorMap* map, void const* base, int64_t width, int64_t height, int64_t count, int box_width, int box_rows) {
    cuuint64_t const dims[3] = {cuuint64_t(width), cuuint64_t(height), cuuint64_t(count)};
    cuuint64_t const strides[2] = {cuuint64_t(width) * 2, cuuint64_t(width) * height * 2};
    cuuint32_t const box[3] = {cuuint32_t(box_width), cuuint32_t(box_rows), 1};
    return encode(map, base, 3, dims, strides, box);
}

template <typename C>
cudaLaunchConfig_t launch_config(cudaLaunchAttribute* attribute, int blocks, cudaStream_t stream) {
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim = {C::kCluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks / C::kCluster * C::kCluster;
    config.blockDim = C::kThreads;
    config.dynamicSmemBytes = C::kSharedBytes;
    config.stream = stream;
    config.attrs = attribute;
    config.numAttrs = 1;
    return config;
}

template <typename C>
int launch(Call const& c) {
    CUtensorMap map_a, map_b;
    constexpr int kHalfA = C::kShare == kShareA ? 2 : 1, kHalfB = C::kShare == kShareB ? 2 : 1;
    bool const a = C::kAMn ? encode_ragged(&map_a, c.a, c.a_width, 64, kStep / kHalfA)
                           : encode_ragged(&map_a, c.a, c.a_width, kStep, C::kRows / kHalfA);
    bool b;
    if constexpr (C::kWeightGradient) b = encode_ragged(&map_b, c.b, c.b_width, 64, kStep / kHalfB);
    else if constexpr (C::kBMn) b = encode_matrices(&map_b, c.b, c.columns, c.contraction, c.experts, 64, kStep / kHalfB);
    else b = encode_matrices(&map_b, c.b, c.contraction, c.columns, c.experts, kStep, C::kColumns / kHalfB);
    if (!a || !b) return -1;
    Params const p = {static_cast<int const*>(c.offsets), c.experts, c.columns, c.height, c.contraction, c.group,
                      static_cast<bf16*>(c.out), c.pitch, c.expert_pitch, static_cast<bf16*>(c.gated), c.gated_pitch,
                      static_cast<bf16 const*>(c.bias), static_cast<int const*>(c.order), static_cast<bf16 const*>(c.weight), c.alpha,
                      c.limit};
    cudaError_t e = cudaFuncSetAttribute(grouped_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
    if (e != cudaSuccess) return e;
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t const config = launch_config<C>(&attribute, c.blocks, static_cast<cudaStream_t>(c.stream));
    e = cudaLaunchKernelEx(&config, grouped_kernel<C>, map_a, map_b, p);
    return e != cudaSuccess ? e : cudaGetLastError();
}

template <typename C>
int clusters() {
    int count = -1;
    if (cudaFuncSetAttribute(grouped_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes) != cudaSuccess) return -1;
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t const config = launch_config<C>(&attribute, 132, nullptr);
    return cudaOccupancyMaxActiveClusters(&count, grouped_kernel<C>, &config) == cudaSuccess ? count : -1;
}

}  // namespace experts

#define VARIANT(NAME, ...) {NAME, experts::launch<experts::Config<__VA_ARGS__>>, experts::clusters<experts::Config<__VA_ARGS__>>}
