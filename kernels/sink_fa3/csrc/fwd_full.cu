// The forward for any causal/window/GQA combination: picks the instantiation.
#include "fwd_launch.cuh"

namespace sink_fa3 {

namespace {

template <typename T>
char const* launch(Problem const& p, FwdArgs const& a, cudaStream_t stream) {
    // Long rows run into the power limit, where taking turns at the tensor cores is 3-5 % faster; elsewhere it is 1-6 % slower.
    return p.max_seqlen_k >= 16384 ? fwd_launch_config<FwdConfig<T, 64, 3, 2, 0, true>>(p, a, stream)
                                   : fwd_launch_config<FwdConfig<T, 64, 3, 2, 0, false>>(p, a, stream);
}

}  // namespace

char const* fwd_launch(Problem const& p, FwdArgs const& a, cudaStream_t stream) {
    if (p.head_dim != 64) return "sink_fa3 fwd: head_dim must be 64";
    return p.dtype == Dtype::kBf16 ? launch<__nv_bfloat16>(p, a, stream) : launch<__half>(p, a, stream);
}

}  // namespace sink_fa3
