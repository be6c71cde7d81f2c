// The backward for any causal/window/GQA combination: picks the instantiation.
#include "bwd_launch.cuh"

namespace sink_fa3 {

namespace {

template <typename T>
char const* launch(Problem const& p, BwdArgs const& a, cudaStream_t stream) {
    return a.deterministic ? bwd_launch_config<BwdConfig<T, 4, true, true, 3>>(p, a, stream)
                           : bwd_launch_config<BwdConfig<T, 4, true, false, 2>>(p, a, stream);
}

}  // namespace

int64_t bwd_workspace_bytes(Problem const& p) { return bwd_workspace(p).bytes; }

char const* bwd_launch(Problem const& p, BwdArgs const& a, cudaStream_t stream) {
    if (p.head_dim != 64) return "sink_fa3 bwd: head_dim must be 64";
    return p.dtype == Dtype::kBf16 ? launch<__nv_bfloat16>(p, a, stream) : launch<__half>(p, a, stream);
}

}  // namespace sink_fa3
