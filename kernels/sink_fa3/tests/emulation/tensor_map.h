// Stands in for csrc/tensor_map.h: a descriptor is what it was made of.
#pragma once

#include "cuda_runtime.h"

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
struct CUtensorMap {
    uint8_t const* base;
    int rank;
    uint64_t dims[4], strides[4];  // of elements of two bytes; strides in bytes, the innermost is 2
    uint32_t box[2];
};
enum {
    CUDA_SUCCESS,
    CUDA_ERROR_INVALID_VALUE,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    CU_TENSOR_MAP_INTERLEAVE_NONE,
    CU_TENSOR_MAP_SWIZZLE_128B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
};

namespace sink_fa3 {

// The demands of cuTensorMapEncodeTiled.
inline int encode_map(CUtensorMap* map, int, int rank, void* base, cuuint64_t const* dims, cuuint64_t const* strides, cuuint32_t const* box,
                      cuuint32_t const* steps, int, int, int, int) {
    bool ok = base != nullptr && reinterpret_cast<uintptr_t>(base) % 16 == 0 && box[0] * 2 <= 128;
    for (int i = 0; i < rank; ++i) ok &= dims[i] > 0 && dims[i] <= uint64_t(1) << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
    for (int i = 0; i + 1 < rank; ++i) ok &= strides[i] % 16 == 0 && strides[i] < uint64_t(1) << 40;
    for (int i = 2; i < rank; ++i) ok &= box[i] == 1;  // what this emulation copies
    if (!ok) return CUDA_ERROR_INVALID_VALUE;
    *map = {static_cast<uint8_t const*>(base), rank, {}, {2}, {box[0], box[1]}};
    std::copy(dims, dims + rank, map->dims);
    std::copy(strides, strides + rank - 1, map->strides + 1);
    return CUDA_SUCCESS;
}
inline auto tensor_map_encoder() { return &encode_map; }

}  // namespace sink_fa3
