// What the binding of the grouped products calls: plain pointers, sizes and strides, no torch. bfloat16; strides in elements.
#pragma once

#include <cuda_runtime.h>
#include <cstdint>

namespace sink_fa3::grouped {

// Columns `0:columns` of rows times matrices. `b` and `bias` already point at the first of them.
struct RowsCall {
    void const *a, *b;
    int64_t a_pitch, b_pitch, b_expert_pitch;
    int const* offsets;  // (experts + 1,)
    int experts, columns, contraction;
    bool padded_a;
    void* out;
    int64_t out_pitch;
    void* gated;  // of the first product, which writes either or both
    int64_t gated_pitch;
    void const* bias;  // may be null
    int64_t bias_pitch;
    int const* order;
    int top_k;
    void const* weight;  // of the second product, may be null
    float alpha, limit;
};

// out[e] = a[rows of e]^T b[rows of e]; `height` and `columns` of it.
struct WgradCall {
    void const *a, *b;
    int64_t a_pitch, b_pitch;
    int const* offsets;
    int experts, height, columns;
    bool padded_a, padded_b;
    void* out;
    int64_t out_pitch, out_expert_pitch;
};

// Null on success, otherwise a message (static storage).
char const* first_launch(RowsCall const& call, cudaStream_t stream);
char const* second_launch(RowsCall const& call, cudaStream_t stream);
char const* grad_hidden_launch(RowsCall const& call, cudaStream_t stream);
char const* grad_hidden_gathered_launch(RowsCall const& call, cudaStream_t stream);
char const* grad_input_launch(RowsCall const& call, cudaStream_t stream);
char const* wgrad_launch(WgradCall const& call, cudaStream_t stream);

}  // namespace sink_fa3::grouped
