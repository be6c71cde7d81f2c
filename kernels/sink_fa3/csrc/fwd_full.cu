// The forward for any causal/window/GQA combination: picks the instantiation.
#include "fwd_launch.cuh"

namespace sink_fa3 {

char const* fwd_launch(Problem const& p, FwdArgs const& a, cudaStream_t stream) {
    if (p.head_dim != 64) return "sink_fa3 fwd: head_dim must be 64";
    return p.dtype == Dtype::kBf16 ? fwd_launch_config<FwdConfig<__nv_bfloat16, 3, 2>>(p, a, stream)
                                   : fwd_launch_config<FwdConfig<__half, 3, 2>>(p, a, stream);
}

}  // namespace sink_fa3
