// torch.ops.sink_fa3.{grouped_rows,grouped_wgrad}: argument checks. Results go where the caller says.
#include "binding.h"
#include "grouped.h"

namespace {

namespace grouped = sink_fa3::grouped;
using namespace sink_fa3::binding;

// The bulk copy engine reads it, or stores of 16 bytes write it.
void check_matrix(char const* name, Tensor const& t, Tensor const& like, int64_t dims) {
    STD_TORCH_CHECK(beside(t, like) && t.scalar_type() == ScalarType::BFloat16, "grouped: ", name,
                    " must be bfloat16 on the CUDA device of a");
    STD_TORCH_CHECK(t.dim() == dims, "grouped: ", name, " must have ", dims, " dimensions, found ", t.dim());
    bool aligned = t.stride(dims - 1) == 1 && reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
    for (int64_t i = 0; i + 1 < dims; ++i) aligned = aligned && t.stride(i) % 8 == 0;
    STD_TORCH_CHECK(aligned, "grouped: ", name,
                    " needs a contiguous last dimension, other strides in multiples of 8 and a 16-byte aligned base");
}

void check_offsets(Tensor const& offsets, Tensor const& a, int64_t experts) {
    STD_TORCH_CHECK(beside(offsets, a) && offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 && offsets.is_contiguous() &&
                        offsets.size(0) == experts + 1,
                    "grouped: offsets must be contiguous int32 (experts + 1,) on the device of a");
}

void raise(char const* error) { STD_TORCH_CHECK(error == nullptr, error); }

void grouped_rows(Tensor a, Tensor b, Tensor offsets, Tensor order, std::optional<Tensor> out, std::optional<Tensor> gated,
                  std::optional<Tensor> bias, std::optional<Tensor> weight, int64_t top_k, bool gather, bool padded_a, bool scatter,
                  bool transpose_b, int64_t column_begin, int64_t column_end, double alpha, double limit) {
    check_matrix("a", a, a, 2);
    check_matrix("b", b, a, 3);
    int64_t const experts = b.size(0), inner = b.size(transpose_b ? 2 : 1), width = b.size(transpose_b ? 1 : 2);
    int64_t const columns = column_end - column_begin, rows = order.size(0);
    STD_TORCH_CHECK(a.size(1) == inner, "grouped: a has ", a.size(1), " columns, the matrices take ", inner);
    STD_TORCH_CHECK(inner > 0 && inner % 8 == 0 && width % 8 == 0, "grouped: ", inner, " x ", width, " is no multiple of 8");
    STD_TORCH_CHECK(0 <= column_begin && column_begin < column_end && column_end <= width && column_begin % 8 == 0 && columns % 8 == 0,
                    "grouped: columns ", column_begin, ":", column_end, " of ", width, " must be within it and multiples of 8");
    check_offsets(offsets, a, experts);
    STD_TORCH_CHECK(beside(order, a) && order.scalar_type() == ScalarType::Int && order.dim() == 1 && order.is_contiguous(),
                    "grouped: order must be contiguous int32 (rows,) on the device of a");
    STD_TORCH_CHECK(top_k >= 1 && rows % top_k == 0, "grouped: ", rows, " assignments are no multiple of top_k ", top_k);
    STD_TORCH_CHECK(a.size(0) >= (gather ? rows / top_k : rows), "grouped: a has ", a.size(0), " rows, too few for ", rows, " assignments");
    if (out) {
        check_matrix("out", *out, a, 2);
        STD_TORCH_CHECK(out->size(0) == rows && out->size(1) == columns, "grouped: out must be (", rows, ", ", columns, ")");
    }
    if (gated) {
        check_matrix("gated", *gated, a, 2);
        STD_TORCH_CHECK(columns % 16 == 0 && gated->size(0) == rows && gated->size(1) == columns / 2, "grouped: gated must be (", rows,
                        ", ", columns, " / 2), with a multiple of 16 columns");
    }
    if (bias) {
        check_matrix("bias", *bias, a, 2);
        STD_TORCH_CHECK(bias->size(0) == experts && bias->size(1) == width, "grouped: bias must be (", experts, ", ", width, ")");
    }
    if (weight) {
        STD_TORCH_CHECK(beside(*weight, a) && weight->scalar_type() == ScalarType::BFloat16 && weight->is_contiguous() &&
                            weight->numel() == rows,
                        "grouped: weight must be contiguous bfloat16 with ", rows, " elements on the device of a");
    }
    bool const plain = !gated && !bias && !weight;
    bool const first = !transpose_b && !scatter && !weight && (out || gated);
    auto const launch = first && gather && !padded_a                                                 ? grouped::first_launch
                        : !transpose_b && !gather && scatter && !padded_a && !gated && out          ? grouped::second_launch
                        : transpose_b && gather && !scatter && !padded_a && plain && out            ? grouped::grad_hidden_gathered_launch
                        : transpose_b && !gather && !scatter && plain && out                        ? grouped::grad_hidden_launch
                        : transpose_b && !gather && scatter && !padded_a && plain && out            ? grouped::grad_input_launch
                                                                                                    : nullptr;
    STD_TORCH_CHECK(launch != nullptr, "grouped: this combination of options is not among the compiled products");
    if (rows == 0) return;
    torch::stable::accelerator::DeviceGuard const guard(a.get_device_index());
    auto const bf16 = [](void* p) { return static_cast<uint16_t*>(p); };
    grouped::RowsCall c{};
    c.a = a.data_ptr(), c.a_pitch = a.stride(0);
    c.b = bf16(b.data_ptr()) + column_begin * b.stride(transpose_b ? 1 : 2);
    c.b_pitch = b.stride(1), c.b_expert_pitch = b.stride(0);
    c.offsets = static_cast<int const*>(offsets.data_ptr());
    c.experts = int(experts), c.columns = int(columns), c.contraction = int(inner);
    c.padded_a = padded_a;
    if (out) c.out = out->data_ptr(), c.out_pitch = out->stride(0);
    if (gated) c.gated = gated->data_ptr(), c.gated_pitch = gated->stride(0);
    if (bias) c.bias = bf16(bias->data_ptr()) + column_begin, c.bias_pitch = bias->stride(0);
    c.order = static_cast<int const*>(order.data_ptr());
    c.top_k = int(top_k);
    if (weight) c.weight = weight->data_ptr();
    c.alpha = float(alpha), c.limit = float(limit);
    raise(launch(c, current_stream(a)));
}

void grouped_wgrad(Tensor a, Tensor b, Tensor offsets, Tensor out, bool padded_a, bool padded_b) {
    check_matrix("a", a, a, 2);
    check_matrix("b", b, a, 2);
    check_matrix("out", out, a, 3);
    check_offsets(offsets, a, out.size(0));
    STD_TORCH_CHECK(out.size(1) == a.size(1) && out.size(2) == b.size(1), "grouped: out must be (experts, ", a.size(1), ", ", b.size(1),
                    ")");
    STD_TORCH_CHECK(out.size(1) % 8 == 0 && out.size(2) % 8 == 0, "grouped: ", out.size(1), " x ", out.size(2), " is no multiple of 8");
    if (out.numel() == 0) return;
    torch::stable::accelerator::DeviceGuard const guard(a.get_device_index());
    grouped::WgradCall c{};
    c.a = a.data_ptr(), c.a_pitch = a.stride(0);
    c.b = b.data_ptr(), c.b_pitch = b.stride(0);
    c.offsets = static_cast<int const*>(offsets.data_ptr());
    c.experts = int(out.size(0)), c.height = int(out.size(1)), c.columns = int(out.size(2));
    c.padded_a = padded_a, c.padded_b = padded_b;
    c.out = out.data_ptr(), c.out_pitch = out.stride(1), c.out_expert_pitch = out.stride(0);
    raise(grouped::wgrad_launch(c, current_stream(a)));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sink_fa3, m) {
    m.def(
        "grouped_rows(Tensor a, Tensor b, Tensor offsets, Tensor order, Tensor(a!)? out, Tensor(b!)? gated, Tensor? bias, "
        "Tensor? weight, int top_k, bool gather, bool padded_a, bool scatter, bool transpose_b, int column_begin, int column_end, "
        "float alpha, float limit) -> ()");
    m.def("grouped_wgrad(Tensor a, Tensor b, Tensor offsets, Tensor(a!) out, bool padded_a, bool padded_b) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sink_fa3, CUDA, m) {
    m.impl("grouped_rows", TORCH_BOX(&grouped_rows));
    m.impl("grouped_wgrad", TORCH_BOX(&grouped_wgrad));
}
