// torch.ops.sink_fa3.{window_fwd,window_bwd}: the one-shot kernels behind the signatures of fwd and bwd.
#include <tuple>

#include "binding.h"
#include "window.h"

namespace {

namespace window_kernels = sink_fa3::window;
using namespace sink_fa3::binding;

constexpr int64_t kHeadDim = 64, kGroup = 8, kMaxWindow = 128;

void check_rows(char const* name, Tensor const& t, Tensor const& q, int64_t heads) {
    STD_TORCH_CHECK(beside(t, q) && t.scalar_type() == q.scalar_type(),
                    "sink_fa3: ", name, " must have the device and dtype of q");
    STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == q.size(0) && t.size(1) == heads && t.size(2) == kHeadDim, "sink_fa3: ", name,
                    " must be (", q.size(0), ", ", heads, ", ", kHeadDim, "): the window kernels take the same tokens for queries ",
                    "and keys and 8 query heads per key head");
    check_alignment(name, t);
}

window_kernels::Problem problem(Tensor const& q, Tensor const& k, Tensor const& v, std::optional<Tensor> const& sinks,
                                Tensor const& cu_q, Tensor const& cu_k, bool causal, int64_t window, double scale) {
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::BFloat16 || q.scalar_type() == ScalarType::Half,
                    "sink_fa3: q must be bfloat16 or float16");
    STD_TORCH_CHECK(causal && window >= 1 && window <= kMaxWindow,
                    "sink_fa3: the window kernels are causal with a window of 1 to 128, found ", window);
    STD_TORCH_CHECK(scale > 0, "sink_fa3: scale must be positive, found ", scale);
    check_rows("q", q, q, q.size(1));
    STD_TORCH_CHECK(q.size(1) % kGroup == 0, "sink_fa3: the window kernels need 8 query heads per key head, found ", q.size(1));
    check_rows("k", k, q, q.size(1) / kGroup);
    check_rows("v", v, q, q.size(1) / kGroup);
    check_lengths("cu_seqlens_q", cu_q, q);
    STD_TORCH_CHECK(cu_k.data_ptr() == cu_q.data_ptr() && cu_k.size(0) == cu_q.size(0),
                    "sink_fa3: the window kernels need one cu_seqlens for queries and keys");
    window_kernels::Problem p{};
    p.total = int(q.size(0));
    p.heads = int(q.size(1));
    p.kv_heads = int(k.size(1));
    p.cu_seqlens = static_cast<int const*>(cu_q.data_ptr());
    p.num_seqs = int(cu_q.size(0) - 1);
    p.window = int(window);
    p.scale = float(scale);
    p.fp16 = q.scalar_type() == ScalarType::Half;
    p.sinks = check_sinks(sinks, q);
    return p;
}

window_kernels::Tensor3 view(Tensor const& t) { return {t.data_ptr(), t.stride(0), t.stride(1)}; }

void raise(cudaError_t error) {
    STD_TORCH_CHECK(error == cudaSuccess, "sink_fa3: window kernel: ", cudaGetErrorString(error));
}

std::tuple<Tensor, Tensor> window_fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> sinks, Tensor cu_seqlens_q,
                                      Tensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
                                      int64_t window, double scale) {
    window_kernels::Problem const p = problem(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, causal, window, scale);
    torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
    Tensor out = empty(q, {p.total, p.heads, kHeadDim}, dtype_of(q));
    Tensor lse = empty(q, {p.heads, p.total}, aoti_torch_dtype_float32());
    if (p.total > 0) {
        raise(window_kernels::forward(p, view(q), view(k), view(v), out.data_ptr(), static_cast<float*>(lse.data_ptr()),
                                      current_stream(q)));
    }
    return {out, lse};
}

// The kernels take the same order of sums in every run, so `deterministic` changes nothing.
std::tuple<Tensor, Tensor, Tensor, Tensor> window_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                                                      std::optional<Tensor> sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                                      int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal, int64_t window,
                                                      double scale, bool deterministic) {
    window_kernels::Problem const p = problem(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, causal, window, scale);
    check_rows("dout", dout, q, q.size(1));
    check_lse(lse, q);
    torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
    int32_t const dtype = dtype_of(q);
    Tensor dq = empty(q, {p.total, p.heads, kHeadDim}, dtype);
    Tensor dk = empty(q, {p.total, p.kv_heads, kHeadDim}, dtype);
    Tensor dv = empty(q, {p.total, p.kv_heads, kHeadDim}, dtype);
    Tensor dsinks = empty_sink_gradient(sinks, q);
    if (p.total > 0) {
        Tensor workspace = empty(q, {static_cast<int64_t>(window_kernels::backward_workspace(p))}, aoti_torch_dtype_uint8());
        raise(window_kernels::backward(p, view(q), view(k), view(v), view(dout), static_cast<float const*>(lse.data_ptr()),
                                       dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), sinks ? dsinks.data_ptr() : nullptr,
                                       workspace.data_ptr(), current_stream(q)));
    } else {
        torch::stable::zero_(dsinks);
    }
    return {dq, dk, dv, dsinks};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sink_fa3, m) {
    m.def(
        "window_fwd(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
        "int max_seqlen_k, bool causal, int window, float scale) -> (Tensor out, Tensor lse)");
    m.def(
        "window_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, Tensor cu_seqlens_q, "
        "Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, bool causal, int window, float scale, bool deterministic) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
}

STABLE_TORCH_LIBRARY_IMPL(sink_fa3, CUDA, m) {
    m.impl("window_fwd", TORCH_BOX(&window_fwd));
    m.impl("window_bwd", TORCH_BOX(&window_bwd));
}
