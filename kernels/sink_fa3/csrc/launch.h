// What the binding calls: plain pointers, sizes and strides, no torch.
#pragma once

#include <cuda_runtime.h>
#include <cstdint>

#include "sinks.h"

namespace sink_fa3 {

enum class Dtype : int { kBf16 = 0, kFp16 = 1 };

// Sizes are in elements, strides too (the last dimension is contiguous). `window` 0 is full attention.
struct Problem {
    Dtype dtype;
    int total_q, total_k, heads, kv_heads, head_dim, batch;
    int max_seqlen_q, max_seqlen_k;
    bool causal;
    int window;
    float scale;
    int const* cu_seqlens_q;
    int const* cu_seqlens_k;
};

struct FwdArgs {
    void const *q, *k, *v;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;
    Sinks sinks;
    void* out;        // contiguous (total_q, heads, head_dim)
    float* lse;       // (heads, total_q)
    void* workspace;  // fwd_workspace_bytes() bytes, 256-byte aligned, need not be cleared
};

struct BwdArgs {
    void const *dout, *q, *k, *v, *out;
    int64_t do_token, do_head, q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head;
    float const* lse;
    Sinks sinks;
    void *dq, *dk, *dv;  // contiguous
    void* dsinks;        // (heads,) in the type of the sinks, untouched without sinks
    void* workspace;     // bwd_workspace_bytes() bytes, 1024-byte aligned
    bool deterministic;
};

// Null on success, otherwise a message (static storage) that says what the kernels cannot take.
char const* fwd_launch(Problem const& p, FwdArgs const& a, cudaStream_t stream);
char const* bwd_launch(Problem const& p, BwdArgs const& a, cudaStream_t stream);
int64_t fwd_workspace_bytes(Problem const& p);
int64_t bwd_workspace_bytes(Problem const& p);

}  // namespace sink_fa3
