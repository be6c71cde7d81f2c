// Host interface of the window kernels (causal, window <= 128, head_dim 64, 8 query heads per KV head, q and k the same
// tokens). All pointers are device pointers; strides are in elements, the last dimension is contiguous, every stride and base
// a multiple of 16 bytes. out, dq, dk, dv, lse and dsinks are contiguous.
#pragma once

#include <cuda_runtime.h>
#include <cstddef>
#include <cstdint>

#include "sinks.h"

namespace sink_fa3::window {

struct Tensor3 {
    void const* data;
    int64_t stride_token, stride_head;
};

struct Problem {
    int total;                // tokens
    int heads, kv_heads;      // heads == 8 * kv_heads
    int const* cu_seqlens;    // (num_seqs + 1,) or nullptr: equal sequences of `seq_length` tokens
    int num_seqs, seq_length;
    int window;               // keys seen, itself included, 1..128
    float scale;
    bool fp16;                // else bf16
    Sinks sinks;              // (heads,)
};

// out (total, heads, 64), lse (heads, total) natural logarithm, sink included.
cudaError_t forward(Problem const& p, Tensor3 q, Tensor3 k, Tensor3 v, void* out, float* lse, cudaStream_t stream);

// Bytes of scratch `backward` needs (16-byte aligned, need not be cleared).
size_t backward_workspace(Problem const& p);
// dq (total, heads, 64), dk and dv (total, kv_heads, 64), dsinks (heads,) in the type of the sinks, or nullptr. Bit-identical from run to run.
cudaError_t backward(Problem const& p, Tensor3 q, Tensor3 k, Tensor3 v, Tensor3 dout, float const* lse, void* dq, void* dk,
                     void* dv, void* dsinks, void* workspace, cudaStream_t stream);

}  // namespace sink_fa3::window
