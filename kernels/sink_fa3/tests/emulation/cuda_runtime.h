// Stands in for CUDA's headers where kernels run in the emulation: no qualifiers, the runtime's calls as far as they are used.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

using std::max;
using std::min;
template <typename T>
T __ldg(T const* p) {
    return *p;
}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

struct float2 {
    float x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 v) {
    uint32_t const bits = uint32_t(v.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline __nv_bfloat16 __float2bfloat16(float f) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return {0x7FFF};
    return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

// ------------------------------------------------------------------------------------------------ runtime
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum { cudaDevAttrMultiProcessorCount, cudaFuncAttributeMaxDynamicSharedMemorySize, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
    int id;
    struct {
        struct {
            int x, y, z;
        } clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    int gridDim, blockDim, dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    int numAttrs;
};
namespace emulation {
int multiprocessors();
void run(int blocks, int cluster, int threads, int shared_bytes, std::function<void()> const& kernel);
}  // namespace emulation
inline char const* cudaGetErrorString(cudaError_t) { return "error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = emulation::multiprocessors(), cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, int, int) {
    return cudaSuccess;
}
template <typename... Wanted, typename... Given>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const* config, void (*kernel)(Wanted...), Given const&... arguments) {
    emulation::run(config->gridDim, config->attrs[0].val.clusterDim.x, config->blockDim, config->dynamicSmemBytes,
                   [&] { kernel(arguments...); });
    return cudaSuccess;
}
