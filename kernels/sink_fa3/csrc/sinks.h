// Sinks and their gradient: one value a head, in float32 or in one of the two-byte types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace sink_fa3 {

enum class SinkType : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

struct Sinks {
    void const* data;  // null: none
    SinkType type;
};

#ifdef __CUDACC__
__device__ __forceinline__ float load_sink(Sinks const& s, int head) {
    if (s.type == SinkType::kFp32) return static_cast<float const*>(s.data)[head];
    if (s.type == SinkType::kBf16) return __bfloat162float(static_cast<__nv_bfloat16 const*>(s.data)[head]);
    return __half2float(static_cast<__half const*>(s.data)[head]);
}

__device__ __forceinline__ void store_sink_gradient(void* gradients, SinkType type, int head, float x) {
    if (type == SinkType::kFp32) static_cast<float*>(gradients)[head] = x;
    else if (type == SinkType::kBf16) static_cast<__nv_bfloat16*>(gradients)[head] = __float2bfloat16_rn(x);
    else static_cast<__half*>(gradients)[head] = __float2half_rn(x);
}
#endif

inline int sink_bytes(SinkType type) { return type == SinkType::kFp32 ? 4 : 2; }

}  // namespace sink_fa3
