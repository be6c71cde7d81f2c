// Host side: TMA descriptors. The driver encodes them; those of the last calls are kept, because a model's tensors come back at the
// same addresses.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstring>

#include "launch.h"

namespace sink_fa3 {

// cuTensorMapEncodeTiled through the runtime, so that nothing links against libcuda.
using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);
inline TensorMapEncoder tensor_map_encoder() {
    static TensorMapEncoder const fn = [] {
        void* p = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        cudaError_t const e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &found);
#else
        cudaError_t const e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &p, cudaEnableDefault, &found);
#endif
        return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<TensorMapEncoder>(p)
                                                                        : nullptr;
    }();
    return fn;
}

// Everything a descriptor says, innermost dimension first. Compared byte by byte: no padding.
struct TiledArray {
    void const* base;
    cuuint64_t dims[3];
    cuuint64_t strides[2];  // bytes
    cuuint32_t box[3];
    uint16_t type, swizzle;
};
static_assert(sizeof(TiledArray) == 64);

// False if the driver cannot. A third dimension of size 0 means two dimensions.
inline bool encode_tiled(CUtensorMap* map, TiledArray const& array) {
    struct Entry {
        CUtensorMap map;
        TiledArray array;
    };
    constexpr int kEntries = 128;
    thread_local Entry entries[kEntries];
    uint64_t const mixed = (reinterpret_cast<uintptr_t>(array.base) ^ uint64_t(array.box[1]) << 40 ^ uint64_t(array.box[2]) << 48) *
                           0x9E3779B97F4A7C15ull;
    Entry& entry = entries[mixed >> 57];
    if (std::memcmp(&entry.array, &array, sizeof(array)) != 0) {
        auto const encode = tensor_map_encoder();
        if (encode == nullptr) return false;
        cuuint32_t const steps[3] = {1, 1, 1};
        entry.array = {};  // stays so if encoding fails
        if (encode(&entry.map, static_cast<CUtensorMapDataType>(array.type), array.dims[2] > 0 ? 3 : 2, const_cast<void*>(array.base),
                   array.dims, array.strides, array.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   static_cast<CUtensorMapSwizzle>(array.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
            return false;
        entry.array = array;
    }
    *map = entry.map;
    return true;
}

inline uint16_t tensor_map_type(Dtype dtype) {
    return dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// A box is `tokens` x `heads` rows of 64 elements (128 bytes), swizzled by 128 bytes. Strides in elements.
inline bool encode_rows(CUtensorMap* map, Dtype dtype, void const* base, int total, int heads, int head_dim, int64_t token_stride,
                        int64_t head_stride, int box_tokens, int box_heads) {
    TiledArray const array = {base,
                              {cuuint64_t(head_dim), cuuint64_t(heads), cuuint64_t(total > 0 ? total : 1)},
                              // The stride of a dimension of size 1 may be anything in torch, but TMA wants a multiple of 16
                              // bytes in any case.
                              {cuuint64_t(heads > 1 ? head_stride : head_dim) * 2,
                               cuuint64_t(total > 1 ? token_stride : int64_t(heads) * head_dim) * 2},
                              {64, cuuint32_t(box_heads), cuuint32_t(box_tokens)},
                              tensor_map_type(dtype),
                              CU_TENSOR_MAP_SWIZZLE_128B};
    return encode_tiled(map, array);
}

// A box is one row of a contiguous (rows, columns) array of floats.
inline bool encode_floats(CUtensorMap* map, float const* base, int64_t rows, int columns) {
    TiledArray const array = {base,
                              {cuuint64_t(columns), cuuint64_t(rows), 0},
                              {cuuint64_t(columns) * 4, 0},
                              {cuuint32_t(columns), 1, 0},
                              CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                              CU_TENSOR_MAP_SWIZZLE_NONE};
    return encode_tiled(map, array);
}

}  // namespace sink_fa3
