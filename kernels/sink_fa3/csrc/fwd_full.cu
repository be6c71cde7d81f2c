// The forward for any causal/window/GQA combination: picks the instantiation.
#include "fwd_launch.cuh"

namespace sink_fa3 {

namespace {

template <typename T>
char const* launch(Problem const& p, FwdArgs const& a, cudaStream_t stream) {
    FwdPlan const plan = fwd_plan(p, multiprocessors());
    if (plan.few_rows) return fwd_launch_config<FwdConfig<T, 1, 3, true>>(p, a, plan, stream);
    if (plan.splits > 1) return fwd_launch_config<FwdConfig<T, 3, 2, true>>(p, a, plan, stream);
    return fwd_launch_config<FwdConfig<T, 3, 2>>(p, a, plan, stream);
}

}  // namespace

int64_t fwd_workspace_bytes(Problem const& p) { return fwd_workspace(p, fwd_plan(p, multiprocessors()), 1).bytes; }

char const* fwd_launch(Problem const& p, FwdArgs const& a, cudaStream_t stream) {
    if (p.head_dim != 64) return "sink_fa3 fwd: head_dim must be 64";
    return p.dtype == Dtype::kBf16 ? launch<__nv_bfloat16>(p, a, stream) : launch<__half>(p, a, stream);
}

}  // namespace sink_fa3
