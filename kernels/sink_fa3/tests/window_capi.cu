// Plain C entry points of the window kernels, so that tests and benchmarks need no torch extension.
#include "../csrc/window.h"

using namespace sink_fa3::window;

extern "C" {
struct WindowArgs {
    void const *q, *k, *v, *dout;
    void *out, *dq, *dk, *dv, *workspace;
    float* lse;
    float const* sinks;
    float* dsinks;
    int const* cu_seqlens;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head;  // strides in elements
    int total, heads, kv_heads, num_seqs, seq_length, window, fp16;
    float scale;
};

static Problem problem(WindowArgs const& a) {
    return {a.total, a.heads, a.kv_heads, a.cu_seqlens, a.num_seqs, a.seq_length, a.window, a.scale, a.fp16 != 0, a.sinks};
}
int window_forward(WindowArgs const* a, void* stream) {
    return forward(problem(*a), {a->q, a->q_token, a->q_head}, {a->k, a->k_token, a->k_head}, {a->v, a->v_token, a->v_head},
                   a->out, a->lse, static_cast<cudaStream_t>(stream));
}
size_t window_backward_workspace(WindowArgs const* a) { return backward_workspace(problem(*a)); }
int window_backward(WindowArgs const* a, void* stream) {
    return backward(problem(*a), {a->q, a->q_token, a->q_head}, {a->k, a->k_token, a->k_head}, {a->v, a->v_token, a->v_head},
                    {a->dout, a->do_token, a->do_head}, a->lse, a->dq, a->dk, a->dv, a->dsinks, a->workspace,
                    static_cast<cudaStream_t>(stream));
}
char const* window_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
}
