// Host side: what is asked of the runtime once and remembered, since a window layer takes no longer than a dozen such calls.
#pragma once

#include <cuda_runtime.h>
#include <atomic>
#include <cstdint>

namespace sink_fa3 {

constexpr int kRemembered = 64;  // devices; further ones are asked every time

inline int multiprocessors() {
    static std::atomic<int> counts[kRemembered];
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 1;
    if (device < kRemembered && (count = counts[device].load(std::memory_order_relaxed)) > 0) return count;
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
    if (device < kRemembered) counts[device].store(count, std::memory_order_relaxed);
    return count;
}

// Lets `kernel` use `bytes` of dynamic shared memory on the current device. `done` has a bit a device and belongs to the kernel.
template <typename Kernel>
cudaError_t allow_shared_memory(std::atomic<uint64_t>& done, Kernel* kernel, int bytes) {
    int device = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e != cudaSuccess) return e;
    uint64_t const bit = device < kRemembered ? uint64_t(1) << device : 0;
    if ((done.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
    return e;
}

}  // namespace sink_fa3
