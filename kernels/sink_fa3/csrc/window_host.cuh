// Host helpers of the window kernels: tensor maps and the split of the token axis over CTAs.
#pragma once

#include <cuda.h>
#include <algorithm>

#include "window.h"
#include "window_common.cuh"

namespace sink_fa3::window {

// cuTensorMapEncodeTiled, looked up at run time so that the library does not link against the driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
    static PFN_cuTensorMapEncodeTiled_v12000 const encoder = [] {
        void* fn = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &fn, cudaEnableDefault, &found);
#endif
        return found == cudaDriverEntryPointSuccess ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(fn) : nullptr;
    }();
    return encoder;
}

// Map of (tokens, heads, 64) with boxes of `box_tokens` x `box_heads` x `box_dim`: whole rows (64) in the 128-byte swizzle,
// parts of rows unswizzled.
inline cudaError_t make_map(CUtensorMap& map, Tensor3 const& t, bool fp16, int tokens, int heads, int box_tokens, int box_heads,
                            int box_dim = kHeadDim) {
    auto const encode = tensor_map_encoder();
    if (encode == nullptr) return cudaErrorNotSupported;
    cuuint64_t const dims[3] = {kHeadDim, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens)};
    cuuint64_t const strides[2] = {static_cast<cuuint64_t>(t.stride_head) * 2, static_cast<cuuint64_t>(t.stride_token) * 2};
    cuuint32_t const box[3] = {static_cast<cuuint32_t>(box_dim), static_cast<cuuint32_t>(box_heads),
                               static_cast<cuuint32_t>(box_tokens)};
    cuuint32_t const steps[3] = {1, 1, 1};
    CUresult const r = encode(&map, fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                              const_cast<void*>(t.data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              box_dim == kHeadDim ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline int multiprocessors() {
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 1;
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
    return count;
}

// Chunks of consecutive tiles, one CTA each, as many as keep all CTAs of all KV heads resident at once.
struct Chunks {
    int tiles, per_chunk, count;
};
inline Chunks split(int total, int kv_heads, int resident, int least) {
    int const tiles = (total + kTileTokens - 1) / kTileTokens;
    int const wanted = std::max(1, resident / kv_heads);
    int const per = std::max(least, (tiles + wanted - 1) / wanted);
    return {tiles, per, (tiles + per - 1) / per};
}

inline bool supported(Problem const& p) {
    return p.total > 0 && p.kv_heads > 0 && p.heads == kGroup * p.kv_heads && p.window >= 1 && p.window <= kMaxWindow &&
           (p.cu_seqlens != nullptr ? p.num_seqs > 0 : p.seq_length > 0);
}

}  // namespace sink_fa3::window
