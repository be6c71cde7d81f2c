// torch.ops.sink_fa3.{fwd,bwd}: argument checks, results and workspaces. The only file that includes torch, and of torch
// only the stable ABI, so that one library serves every version from 2.11 on.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "launch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

cudaStream_t current_stream(Tensor const& t) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    return static_cast<cudaStream_t>(stream);
}

void check_rows(char const* name, Tensor const& t, Tensor const& like) {
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index(), "sink_fa3: ", name,
                    " must be on the CUDA device of q");
    STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), "sink_fa3: ", name, " must have the dtype of q");
    STD_TORCH_CHECK(t.dim() == 3, "sink_fa3: ", name, " must be (tokens, heads, head_dim), found ", t.dim(), " dimensions");
    STD_TORCH_CHECK(t.size(2) == like.size(2), "sink_fa3: ", name, " has head_dim ", t.size(2), ", q has ", like.size(2));
    STD_TORCH_CHECK(t.stride(2) == 1 && t.stride(0) % 8 == 0 && t.stride(1) % 8 == 0 &&
                        reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0,
                    "sink_fa3: ", name, " needs a contiguous last dimension, other strides in multiples of 8 and a 16-byte ",
                    "aligned base");
}

void check_lengths(char const* name, Tensor const& cu, Tensor const& like) {
    STD_TORCH_CHECK(cu.is_cuda() && cu.get_device_index() == like.get_device_index() && cu.scalar_type() == ScalarType::Int &&
                        cu.dim() == 1 && cu.size(0) >= 2 && cu.is_contiguous(),
                    "sink_fa3: ", name, " must be a contiguous int32 tensor (batch + 1,) on the device of q");
}

sink_fa3::Problem problem(Tensor const& q, Tensor const& k, Tensor const& v, std::optional<Tensor> const& sinks,
                          Tensor const& cu_q, Tensor const& cu_k, int64_t max_q, int64_t max_k, bool causal, int64_t window,
                          double scale) {
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
    if (sinks) {
        STD_TORCH_CHECK(sinks->is_cuda() && sinks->get_device_index() == q.get_device_index() &&
                            sinks->scalar_type() == ScalarType::Float && sinks->dim() == 1 && sinks->size(0) == q.size(1) &&
                            sinks->is_contiguous(),
                        "sink_fa3: sinks must be contiguous float32 (heads,) on the device of q");
    }
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

float const* sink_pointer(std::optional<Tensor> const& sinks) {
    return sinks ? static_cast<float const*>(sinks->data_ptr()) : nullptr;
}

void raise(char const* error) { STD_TORCH_CHECK(error == nullptr, error); }

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> sinks, Tensor cu_seqlens_q,
                               Tensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal, int64_t window,
                               double scale) {
    sink_fa3::Problem const p =
        problem(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale);
    torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
    Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)});
    Tensor lse = torch::stable::new_empty(q, {q.size(1), q.size(0)}, ScalarType::Float);
    Tensor workspace = torch::stable::new_empty(q, {sink_fa3::fwd_workspace_bytes(p)}, ScalarType::Byte);
    sink_fa3::FwdArgs a{};
    a.q = q.data_ptr(), a.k = k.data_ptr(), a.v = v.data_ptr();
    a.q_token = q.stride(0), a.q_head = q.stride(1);
    a.k_token = k.stride(0), a.k_head = k.stride(1);
    a.v_token = v.stride(0), a.v_head = v.stride(1);
    a.sinks = sink_pointer(sinks);
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
        problem(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale);
    check_rows("dout", dout, q);
    check_rows("out", out, q);
    STD_TORCH_CHECK(dout.size(0) == q.size(0) && dout.size(1) == q.size(1) && out.size(0) == q.size(0) && out.size(1) == q.size(1),
                    "sink_fa3: dout and out must have the shape of q");
    STD_TORCH_CHECK(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() && lse.dim() == 2 && lse.size(0) == q.size(1) &&
                        lse.size(1) == q.size(0),
                    "sink_fa3: lse must be contiguous float32 (heads, tokens)");
    torch::stable::accelerator::DeviceGuard const guard(q.get_device_index());
    Tensor dq = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)});
    Tensor dk = torch::stable::new_empty(k, {k.size(0), k.size(1), k.size(2)});
    Tensor dv = torch::stable::new_empty(v, {v.size(0), v.size(1), v.size(2)});
    Tensor dsinks = torch::stable::new_empty(q, {sinks ? q.size(1) : 0}, ScalarType::Float);
    // torch aligns an allocation to 512 bytes; the kernels want 1024.
    Tensor workspace = torch::stable::new_empty(q, {sink_fa3::bwd_workspace_bytes(p) + 1024}, ScalarType::Byte);
    sink_fa3::BwdArgs a{};
    a.dout = dout.data_ptr(), a.q = q.data_ptr(), a.k = k.data_ptr(), a.v = v.data_ptr(), a.out = out.data_ptr();
    a.do_token = dout.stride(0), a.do_head = dout.stride(1);
    a.q_token = q.stride(0), a.q_head = q.stride(1);
    a.k_token = k.stride(0), a.k_head = k.stride(1);
    a.v_token = v.stride(0), a.v_head = v.stride(1);
    a.o_token = out.stride(0), a.o_head = out.stride(1);
    a.lse = static_cast<float const*>(lse.data_ptr());
    a.sinks = sink_pointer(sinks);
    a.dq = dq.data_ptr(), a.dk = dk.data_ptr(), a.dv = dv.data_ptr();
    a.dsinks = static_cast<float*>(dsinks.data_ptr());
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
