// torch.ops.sink_fa3.{fwd,bwd}: argument checks, results and workspaces.
#include <tuple>

#include "binding.h"
#include "launch.h"

namespace {

using namespace sink_fa3::binding;

void check_rows(char const* name, Tensor const& t, Tensor const& like) {
    STD_TORCH_CHECK(beside(t, like), "sink_fa3: ", name, " must be on the CUDA device of q");
    STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), "sink_fa3: ", name, " must have the dtype of q");
    STD_TORCH_CHECK(t.dim() == 3, "sink_fa3: ", name, " must be (tokens, heads, head_dim), found ", t.dim(), " dimensions");
    STD_TORCH_CHECK(t.size(2) == like.size(2), "sink_fa3: ", name, " has head_dim ", t.size(2), ", q has ", like.size(2));
    check_alignment(name, t);
}

sink_fa3::Problem problem(Tensor const& q, Tensor const& k, Tensor const& v, Tensor const& cu_q, Tensor const& cu_k,
                          int64_t max_q, int64_t max_k, bool causal, int64_t window, double scale) {
    STD_TORCH_CHECK(q.scalar_type() == ScalarType::BFloat16 || q.scalar_type() == ScalarType::Half,
                    "sink_fa3: q must be bfloat16 or float16");
    check_rows("q", q, q);
    check_rows("k", k, q);
    check_rows("v", v, q);
    STD_TORCH_CHECK(k.size(0) == v.size(0) && k.size(1) == v.size(1), "sink_fa3: k and v must have the same tokens and heads");
    STD_TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "sink_fa3: ", q.size(1),
                    " query heads are no multiple of ", k.size(1), " key heads");
    check_lengths("cu_seqlens_q", cu_q, q);
    check_lengths("cu_seqlens_k", cu_k, q);
    STD_TORCH_CHECK(cu_q.size(0) == cu_k.size(0), "sink_fa3: cu_seqlens_q and cu_seqlens_k must have the same length");
    STD_TORCH_CHECK(window >= 0 && (window == 0 || causal), "sink_fa3: window must be >= 0 and needs causal, found ", window);
    STD_TORCH_CHECK(scale > 0, "sink_fa3: scale must be positive, found ", scale);
    return {q.scalar_type() == ScalarType::BFloat16 ? sink_fa3::Dtype::kBf16 : sink_fa3::Dtype::kFp16,
            int(q.size(0)),
            int(k.size(0)),
            int(q.size(1)),
            int(k.size(1)),
            int(q.size(2)),
            int(cu_q.size(0) - 1),
            int(max_q),
            int(max_k),
            causal,
            int(window),
            float(scale),
            static_cast<int const*>(cu_q.data_ptr()),
            static_cast<int const*>(cu_k.data_ptr())};
}

void raise(char const* error) { STD_TORCH_CHECK(error == nullptr, error); }

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> sinks, Tensor cu_seqlens_q,
                               Tensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal, int64_t window,
                               double scale) {
    sink_fa3::Problem const p =
        problem(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale);
    sink_fa3::Sinks const s = check_sinks(sinks, q);
    int32_t const dtype = dtype_of(q);
    torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
    Tensor out = empty(q, {p.total_q, p.heads, p.head_dim}, dtype);
    Tensor lse = empty(q, {p.heads, p.total_q}, aoti_torch_dtype_float32());
    Tensor workspace = empty(q, {sink_fa3::fwd_workspace_bytes(p)}, aoti_torch_dtype_uint8());
    sink_fa3::FwdArgs a{};
    a.q = q.data_ptr(), a.k = k.data_ptr(), a.v = v.data_ptr();
    a.q_token = q.stride(0), a.q_head = q.stride(1);
    a.k_token = k.stride(0), a.k_head = k.stride(1);
    a.v_token = v.stride(0), a.v_head = v.stride(1);
    a.sinks = s;
    a.out = out.data_ptr();
    a.lse = static_cast<float*>(lse.data_ptr());
    a.workspace = workspace.data_ptr();
    raise(sink_fa3::fwd_launch(p, a, current_stream(q)));
    return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                                               std::optional<Tensor> sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                               int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal, int64_t window,
                                               double scale, bool deterministic) {
    sink_fa3::Problem const p =
        problem(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale);
    sink_fa3::Sinks const s = check_sinks(sinks, q);
    int32_t const dtype = dtype_of(q);
    check_rows("dout", dout, q);
    check_rows("out", out, q);
    STD_TORCH_CHECK(dout.size(0) == q.size(0) && dout.size(1) == q.size(1) && out.size(0) == q.size(0) && out.size(1) == q.size(1),
                    "sink_fa3: dout and out must have the shape of q");
    check_lse(lse, q);
    torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
    Tensor dq = empty(q, {p.total_q, p.heads, p.head_dim}, dtype);
    Tensor dk = empty(q, {p.total_k, p.kv_heads, p.head_dim}, dtype);
    Tensor dv = empty(q, {p.total_k, p.kv_heads, p.head_dim}, dtype);
    Tensor dsinks = empty_sink_gradient(sinks, q);
    // torch aligns an allocation to 512 bytes; the kernels want 1024.
    Tensor workspace = empty(q, {sink_fa3::bwd_workspace_bytes(p) + 1024}, aoti_torch_dtype_uint8());
    sink_fa3::BwdArgs a{};
    a.dout = dout.data_ptr(), a.q = q.data_ptr(), a.k = k.data_ptr(), a.v = v.data_ptr(), a.out = out.data_ptr();
    a.do_token = dout.stride(0), a.do_head = dout.stride(1);
    a.q_token = q.stride(0), a.q_head = q.stride(1);
    a.k_token = k.stride(0), a.k_head = k.stride(1);
    a.v_token = v.stride(0), a.v_head = v.stride(1);
    a.o_token = out.stride(0), a.o_head = out.stride(1);
    a.lse = static_cast<float const*>(lse.data_ptr());
    a.sinks = s;
    a.dq = dq.data_ptr(), a.dk = dk.data_ptr(), a.dv = dv.data_ptr();
    a.dsinks = dsinks.data_ptr();
    a.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data_ptr()) + 1023) & ~uintptr_t(1023));
    a.deterministic = deterministic;
    raise(sink_fa3::bwd_launch(p, a, current_stream(q)));
    return {dq, dk, dv, dsinks};
}

}  // namespace

STABLE_TORCH_LIBRARY(sink_fa3, m) {
    m.def(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
        "int max_seqlen_k, bool causal, int window, float scale) -> (Tensor out, Tensor lse)");
    m.def(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, Tensor cu_seqlens_q, "
        "Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, bool causal, int window, float scale, bool deterministic) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
}

STABLE_TORCH_LIBRARY_IMPL(sink_fa3, CUDA, m) {
    m.impl("fwd", TORCH_BOX(&fwd));
    m.impl("bwd", TORCH_BOX(&bwd));
}
