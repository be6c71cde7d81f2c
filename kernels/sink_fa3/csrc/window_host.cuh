// Host helpers of the window kernels: tensor maps and the split of the token axis over CTAs.
#pragma once

#include <algorithm>

#include "host.h"
#include "tensor_map.h"
#include "window.h"
#include "window_common.cuh"

namespace sink_fa3::window {

// Map of (tokens, heads, 64) with boxes of `box_tokens` x `box_heads` x `box_dim`: whole rows (64) in the 128-byte swizzle,
// parts of rows unswizzled.
inline cudaError_t make_map(CUtensorMap& map, Tensor3 const& t, bool fp16, int tokens, int heads, int box_tokens, int box_heads,
                            int box_dim = kHeadDim) {
    if (tensor_map_encoder() == nullptr) return cudaErrorNotSupported;
    TiledArray const array = {t.data,
                              {kHeadDim, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens)},
                              {static_cast<cuuint64_t>(t.stride_head) * 2, static_cast<cuuint64_t>(t.stride_token) * 2},
                              {static_cast<cuuint32_t>(box_dim), static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_tokens)},
                              tensor_map_type(fp16 ? Dtype::kFp16 : Dtype::kBf16),
                              static_cast<uint16_t>(box_dim == kHeadDim ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE)};
    return encode_tiled(&map, array) ? cudaSuccess : cudaErrorInvalidValue;
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
