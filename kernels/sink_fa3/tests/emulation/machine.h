// A cluster of thread blocks on the host: every thread a fiber, picked at random. Barriers count as mbarriers do; bulk copies,
// copies of 16 bytes and matrix products happen at random later times, but no later than their waits. Ends the process with a message
// when no thread can go on, a barrier gets more arrivals than it awaits, or something is still under way at the end.
#pragma once

#include <array>

#include "cuda_runtime.h"
#include "tensor_map.h"

namespace emulation {

struct Fiber {
    int block, thread;
};
extern Fiber* self;

int block_index();
int grid();
uint32_t shared_address(void const* p);

uint32_t exchange(uint32_t value, int lane);  // the value of that lane of this warp
template <typename T>
T shuffle(T value, int lane) {
    static_assert(sizeof(T) == 4);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = exchange(bits, lane);
    std::memcpy(&value, &bits, 4);
    return value;
}
void sync_warp();
void sync_threads();
void cluster_sync();

void barrier_init(uint32_t address, uint32_t count);
void arrive(int block, uint32_t address, uint32_t bytes);
void wait(uint32_t address, uint32_t parity);

void load(bool both, uint32_t to, CUtensorMap const& map, uint32_t barrier, std::array<int, 4> at);
void copy(uint32_t to, void const* from, bool there);
void copy_commit();
void copy_wait(int pending);
void publish_copies();  // what was waited for becomes visible to products
void product(float* d, int columns, uint64_t a, uint64_t b, bool a_transposed, bool b_transposed, bool accumulate);
void product_commit();
void product_wait(int pending);

void seed(uint64_t value);
uint64_t random();

}  // namespace emulation
