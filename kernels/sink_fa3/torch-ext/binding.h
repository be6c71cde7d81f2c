// What both bindings share. Of torch only the stable ABI, so that one library serves every version from 2.11 on.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "sinks.h"

namespace sink_fa3::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline cudaStream_t current_stream(Tensor const& t) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    return static_cast<cudaStream_t>(stream);
}

// Contiguous and uninitialised, on the device of `like`. Past the dispatcher's boxed calls, which take as long as the allocation.
inline Tensor empty(Tensor const& like, std::initializer_list<int64_t> sizes, int32_t dtype) {
    int64_t strides[4], stride = 1;
    for (int64_t i = static_cast<int64_t>(sizes.size()) - 1; i >= 0; --i) {
        strides[i] = stride;
        stride *= sizes.begin()[i] > 0 ? sizes.begin()[i] : 1;
    }
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                                                    aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
    return Tensor(handle);
}

inline int32_t dtype_of(Tensor const& t) {
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    return dtype;
}

inline bool beside(Tensor const& t, Tensor const& q) { return t.is_cuda() && t.get_device_index() == q.get_device_index(); }

// The bulk copy engine reads it.
inline void check_alignment(char const* name, Tensor const& t) {
    STD_TORCH_CHECK(t.stride(2) == 1 && t.stride(0) % 8 == 0 && t.stride(1) % 8 == 0 &&
                        reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0,
                    "sink_fa3: ", name, " needs a contiguous last dimension, other strides in multiples of 8 and a 16-byte ",
                    "aligned base");
}

inline void check_lengths(char const* name, Tensor const& cu, Tensor const& q) {
    STD_TORCH_CHECK(beside(cu, q) && cu.scalar_type() == ScalarType::Int && cu.dim() == 1 && cu.size(0) >= 2 && cu.is_contiguous(),
                    "sink_fa3: ", name, " must be a contiguous int32 tensor (batch + 1,) on the device of q");
}

inline void check_lse(Tensor const& lse, Tensor const& q) {
    STD_TORCH_CHECK(beside(lse, q) && lse.scalar_type() == ScalarType::Float && lse.is_contiguous() && lse.dim() == 2 &&
                        lse.size(0) == q.size(1) && lse.size(1) == q.size(0),
                    "sink_fa3: lse must be contiguous float32 (heads, tokens) on the device of q");
}

inline Sinks check_sinks(std::optional<Tensor> const& sinks, Tensor const& q) {
    if (!sinks) return {nullptr, SinkType::kFp32};
    ScalarType const type = sinks->scalar_type();
    STD_TORCH_CHECK(beside(*sinks, q) && (type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half) &&
                        sinks->dim() == 1 && sinks->size(0) == q.size(1) && sinks->is_contiguous(),
                    "sink_fa3: sinks must be contiguous float32, bfloat16 or float16 (heads,) on the device of q");
    return {sinks->data_ptr(), type == ScalarType::Float      ? SinkType::kFp32
                               : type == ScalarType::BFloat16 ? SinkType::kBf16
                                                              : SinkType::kFp16};
}

// Like the sinks; (0,) in float32 without them.
inline Tensor empty_sink_gradient(std::optional<Tensor> const& sinks, Tensor const& q) {
    return sinks ? empty(q, {q.size(1)}, dtype_of(*sinks)) : empty(q, {0}, aoti_torch_dtype_float32());
}

}  // namespace sink_fa3::binding
