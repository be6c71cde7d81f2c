// C interface for benchmarks/tune_full.py: the full kernels in several configurations, without torch.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -I../csrc --shared -Xcompiler -fPIC -o libtune.so tune_full.cu
#include "bwd_launch.cuh"

using namespace sink_fa3;

template <typename T>
static char const* fwd(Problem const& p, FwdArgs const& a, cudaStream_t s, int variant) {
    switch (variant) {
        case 0: return fwd_launch_config<FwdConfig<T, 3, 2>>(p, a, {}, s);
        case 1: return fwd_launch_config<FwdConfig<T, 3, 3>>(p, a, {}, s);
    }
    return "no such variant";
}

template <typename T>
static char const* bwd(Problem const& p, BwdArgs const& a, cudaStream_t s, int variant) {
    if (a.deterministic) {
        switch (variant) {
            case 0: return bwd_launch_config<BwdConfig<T, 4, true, true, 2>>(p, a, s);
            case 1: return bwd_launch_config<BwdConfig<T, 4, true, true, 3>>(p, a, s);
            case 2: return bwd_launch_config<BwdConfig<T, 4, false, true, 3>>(p, a, s);
        }
        return "no such variant";
    }
    switch (variant) {
        case 0: return bwd_launch_config<BwdConfig<T, 4, true, false, 2>>(p, a, s);
        case 1: return bwd_launch_config<BwdConfig<T, 4, true, false, 3>>(p, a, s);
        case 2: return bwd_launch_config<BwdConfig<T, 4, false, false, 2>>(p, a, s);
    }
    return "no such variant";
}

extern "C" char const* sink_fa3_fwd(Problem const* p, FwdArgs const* a, cudaStream_t s, int variant) {
    return p->dtype == Dtype::kBf16 ? fwd<__nv_bfloat16>(*p, *a, s, variant) : fwd<__half>(*p, *a, s, variant);
}
extern "C" char const* sink_fa3_bwd(Problem const* p, BwdArgs const* a, cudaStream_t s, int variant) {
    return p->dtype == Dtype::kBf16 ? bwd<__nv_bfloat16>(*p, *a, s, variant) : bwd<__half>(*p, *a, s, variant);
}
extern "C" int64_t sink_fa3_fwd_workspace(Problem const* p) { return fwd_workspace(*p, {}, 1).bytes; }
extern "C" int64_t sink_fa3_bwd_workspace(Problem const* p) { return bwd_workspace(*p).bytes; }
