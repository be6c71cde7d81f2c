// Host side: TMA descriptors for (token, head, dim) tensors.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>

#include "launch.h"

namespace sink_fa3 {

// cuTensorMapEncodeTiled through the runtime, so that nothing links against libcuda.
using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);
inline TensorMapEncoder tensor_map_encoder() {
    static TensorMapEncoder const fn = [] {
        void* p = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaError_t const e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &found);
        return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<TensorMapEncoder>(p)
                                                                        : nullptr;
    }();
    return fn;
}

// A box is `tokens` x `heads` rows of 64 elements (128 bytes), swizzled by 128 bytes. Strides in elements.
inline bool encode_rows(CUtensorMap* map, Dtype dtype, void const* base, int total, int heads, int head_dim, int64_t token_stride,
                        int64_t head_stride, int box_tokens, int box_heads) {
    auto const encode = tensor_map_encoder();
    if (encode == nullptr) return false;
    CUtensorMapDataType const type =
        dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    cuuint64_t const dims[3] = {cuuint64_t(head_dim), cuuint64_t(heads), cuuint64_t(total > 0 ? total : 1)};
    // The stride of a dimension of size 1 may be anything in torch, but TMA wants a multiple of 16 bytes in any case.
    cuuint64_t const strides[2] = {cuuint64_t(heads > 1 ? head_stride : head_dim) * 2,
                                   cuuint64_t(total > 1 ? token_stride : int64_t(heads) * head_dim) * 2};
    cuuint32_t const box[3] = {64, cuuint32_t(box_heads), cuuint32_t(box_tokens)};
    cuuint32_t const step[3] = {1, 1, 1};
    return encode(map, type, 3, const_cast<void*>(base), dims, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A box is one row of a contiguous (rows, columns) array of floats.
inline bool encode_floats(CUtensorMap* map, float const* base, int64_t rows, int columns) {
    auto const encode = tensor_map_encoder();
    if (encode == nullptr) return false;
    cuuint64_t const dims[2] = {cuuint64_t(columns), cuuint64_t(rows)};
    cuuint64_t const strides[1] = {cuuint64_t(columns) * 4};
    cuuint32_t const box[2] = {cuuint32_t(columns), 1};
    cuuint32_t const step[2] = {1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<float*>(base), dims, strides, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace sink_fa3
