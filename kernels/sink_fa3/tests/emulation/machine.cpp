#include "machine.h"

#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

namespace sink_fa3::grouped {
alignas(1024) uint8_t raw[232448];  // addresses only: every block has its own memory
}

namespace emulation {
namespace {

constexpr size_t kStack = 64 << 10;

[[noreturn]] void fail(char const* what) {
    std::printf("EMULATION: %s", what);
    if (self) std::printf(" (block %d, thread %d)", self->block, self->thread);
    std::printf("\n");
    std::fflush(stdout);
    std::_Exit(3);
}

struct Group {  // of threads that meet
    int expected = 32, arrived = 0;
    char kind = 0;
    uint64_t times = 0;
    uint32_t values[2][32];
    std::vector<struct Thread*> waiting;
};
struct Barrier {
    int count = 0, pending = 0;
    int64_t bytes = 0;
    uint32_t phase = 0;
    std::vector<struct Thread*> waiting;
};
struct Copy {
    uint32_t to;
    uint8_t const* from;  // null: zeros
};
struct Product {
    float* d[32];
    uint64_t a, b;
    int columns, joined = 0, group;
    bool a_transposed, b_transposed, accumulate;
};
struct Warp {
    Group meeting;
    std::deque<Product> products;
    int finished = 0;
};
struct Thread : Fiber {
    ucontext_t context;
    std::unique_ptr<uint8_t[]> stack;
    bool done = false;
    std::vector<std::vector<Copy>> copies{1};  // groups, the last is open
    std::vector<std::pair<uint32_t, std::array<uint8_t, 16>>> landed;
    int products = 0, groups = 0;  // issued in the open group; closed groups
    uint64_t joined = 0;
};
struct Block {
    std::vector<uint8_t> memory;
    std::vector<Barrier> barriers;
    std::vector<Warp> warps;
    Group all;
    int alive;  // threads
};
struct Load {
    int block;
    uint32_t to, barrier;
    CUtensorMap map;
    std::array<int, 4> at;
};

uint64_t state = 1;
ucontext_t scheduler;
std::vector<Block> blocks;
std::vector<std::unique_ptr<Thread>> threads;
std::vector<Thread*> ready;
std::vector<Load> loads;
std::vector<Warp*> multiplying;
Group everyone;
std::function<void()> const* body;
int first_block, grid_size;

Thread& me() { return *static_cast<Thread*>(self); }
Block& my_block() { return blocks[self->block]; }
Warp& my_warp() { return my_block().warps[self->thread / 32]; }

void stop() { swapcontext(&me().context, &scheduler); }
void pause_sometimes() {
    if (random() % 4 == 0) {
        ready.push_back(&me());
        stop();
    }
}
void wake(std::vector<Thread*>& waiting) {
    ready.insert(ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
}

void meet(Group& group, char kind) {
    if (group.arrived == 0) group.kind = kind;
    if (group.kind != kind) fail("threads of one group wait at different places");
    if (++group.arrived == group.expected) {
        group.arrived = 0;
        ++group.times;
        wake(group.waiting);
        return;
    }
    group.waiting.push_back(&me());
    stop();
}

Barrier& barrier(int block, uint32_t address) {
    Barrier& b = blocks[block].barriers.at(address / 8);
    if (b.count == 0) fail("a barrier that nobody made");
    if (blocks[block].alive == 0) fail("a block has ended that others still reach");
    return b;
}
void complete(Barrier& b) {
    if (b.pending > 0 || b.bytes != 0) return;
    b.phase ^= 1;
    b.pending = b.count;
    wake(b.waiting);
}

uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

void perform(Load const& load) {
    CUtensorMap const& m = load.map;
    for (uint32_t row = 0; row < m.box[1]; ++row) {
        for (uint32_t column = 0; column < m.box[0]; ++column) {
            uint64_t offset = 0;
            bool inside = true;
            for (int i = 0; i < m.rank; ++i) {
                int64_t const x = int64_t(load.at[i]) + (i == 0 ? column : i == 1 ? row : 0);
                inside &= x >= 0 && uint64_t(x) < m.dims[i];
                offset += uint64_t(x) * m.strides[i];  // modulo 2^64, as the copy engine does
            }
            uint8_t* const to = &blocks[load.block].memory.at(swizzled(load.to + row * m.box[0] * 2 + column * 2));
            if (inside) std::memcpy(to, m.base + offset, 2);
            else std::memset(to, 0, 2);
        }
    }
    Barrier& b = barrier(load.block, load.barrier);
    b.bytes -= int64_t(m.box[0]) * m.box[1] * 2;
    complete(b);
}

// One warp's 16 rows of 64.
void perform(Block& block, int warp, Product const& p) {
    auto const element = [&](uint64_t descriptor, bool transposed, int outer, int k) {
        uint32_t const base = (descriptor & 0x3FFF) << 4, next = (descriptor >> 16 & 0x3FFF) << 4, eight = (descriptor >> 32 & 0x3FFF) << 4;
        if (descriptor >> 62 != 1) fail("a product whose operand is not in the 128-byte swizzle");
        uint32_t const address = transposed ? base + outer / 64 * next + k / 8 * eight + k % 8 * 128 + outer % 64 * 2
                                            : base + outer / 8 * eight + outer % 8 * 128 + k * 2;
        __nv_bfloat16 value;
        std::memcpy(&value, &block.memory.at(swizzled(address)), 2);
        return __bfloat162float(value);
    };
    float a[16][16];
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k) a[i][k] = element(p.a, p.a_transposed, warp % 4 * 16 + i, k);
    for (int n = 0; n < p.columns; ++n) {
        float b[16];
        for (int k = 0; k < 16; ++k) b[k] = element(p.b, p.b_transposed, n, k);
        for (int i = 0; i < 16; ++i) {
            float& d = p.d[i % 8 * 4 + n % 8 / 2][n / 8 * 4 + i / 8 * 2 + n % 2];
            float sum = p.accumulate ? d : 0.f;
            for (int k = 0; k < 16; ++k) sum += a[i][k] * b[k];
            d = sum;
        }
    }
}

// The oldest product of a warp, if all its lanes have issued it.
bool multiply(int block, int warp) {
    Warp& w = blocks[block].warps[warp];
    if (w.products.empty() || w.products.front().joined < 32) return false;
    perform(blocks[block], warp, w.products.front());
    w.products.pop_front();
    ++w.finished;
    return true;
}

void land(Thread& t, Copy const& c) {
    std::array<uint8_t, 16> bytes{};
    if (c.from != nullptr) std::memcpy(bytes.data(), c.from, 16);
    t.landed.push_back({c.to, bytes});
}

bool something_asynchronous() {
    if (!loads.empty() && random() % 2 == 0) {
        size_t const i = random() % loads.size();
        Load const load = loads[i];
        loads[i] = loads.back();
        loads.pop_back();
        perform(load);
        return true;
    }
    size_t const block = random() % blocks.size();
    return multiply(block, random() % blocks[block].warps.size());
}

void start() {
    (*body)();
    me().done = true;
    --my_block().alive;
    stop();
}

void run_cluster(int cluster, int threads_per_block, int shared_bytes) {
    threads.clear(), ready.clear(), blocks.clear();
    blocks.resize(cluster);
    everyone = Group{};
    everyone.expected = cluster * threads_per_block;
    for (Block& b : blocks) {
        b.memory.resize(shared_bytes);
        for (uint8_t& byte : b.memory) byte = 0xFF;  // NaN
        b.barriers.resize(shared_bytes / 8);
        b.warps.resize(threads_per_block / 32);
        b.all.expected = b.alive = threads_per_block;
    }
    for (int i = 0; i < everyone.expected; ++i) {
        auto t = std::make_unique<Thread>();
        t->block = i / threads_per_block, t->thread = i % threads_per_block;
        t->stack.reset(new uint8_t[kStack]);
        getcontext(&t->context);
        t->context.uc_stack.ss_sp = t->stack.get();
        t->context.uc_stack.ss_size = kStack;
        makecontext(&t->context, start, 0);
        ready.push_back(t.get());
        threads.push_back(std::move(t));
    }
    while (true) {
        if (random() % 64 == 0) something_asynchronous();
        if (ready.empty()) {
            bool moved = false;
            for (int tries = 0; tries < 1000 && !moved; ++tries) moved = something_asynchronous() && !ready.empty();
            if (ready.empty() && loads.empty()) break;
            continue;
        }
        size_t const i = random() % ready.size();
        self = ready[i];
        ready[i] = ready.back();
        ready.pop_back();
        swapcontext(&scheduler, &me().context);
        self = nullptr;
    }
    for (auto const& t : threads) {
        self = t.get();
        if (!t->done) fail("deadlock: nothing can go on");
        if (t->copies.size() > 1 || !t->copies[0].empty()) fail("copies are still under way at the end");
    }
    self = nullptr;
    for (Block& b : blocks)
        for (Warp& w : b.warps)
            if (!w.products.empty()) fail("products are still under way at the end");
}

}  // namespace

Fiber* self = nullptr;

int block_index() { return first_block + self->block; }
int grid() { return grid_size; }
uint32_t shared_address(void const* p) { return static_cast<uint8_t const*>(p) - sink_fa3::grouped::raw; }

uint32_t exchange(uint32_t value, int lane) {
    Group& g = my_warp().meeting;
    uint32_t* const values = g.values[g.times % 2];
    values[self->thread % 32] = value;
    meet(g, 'x');
    return values[lane];
}
void sync_warp() { meet(my_warp().meeting, 's'); }
void sync_threads() { meet(my_block().all, 's'); }
void cluster_sync() { meet(everyone, 's'); }

void barrier_init(uint32_t address, uint32_t count) {
    Barrier& b = my_block().barriers.at(address / 8);
    b.count = b.pending = count;
}
void arrive(int block, uint32_t address, uint32_t bytes) {
    pause_sometimes();
    Barrier& b = barrier(block, address);
    if (b.pending == 0) fail("more arrivals than a barrier awaits");
    b.bytes += bytes;
    --b.pending;
    complete(b);
}
void wait(uint32_t address, uint32_t parity) {
    Barrier& b = barrier(self->block, address);
    pause_sometimes();
    while (b.phase == parity) {
        b.waiting.push_back(&me());
        stop();
    }
}

void load(bool both, uint32_t to, CUtensorMap const& map, uint32_t barrier, std::array<int, 4> at) {
    for (int block = 0; block < int(blocks.size()); ++block)
        if (both || block == self->block) loads.push_back({block, to, barrier, map, at});
}

void copy(uint32_t to, void const* from, bool there) {
    std::memset(&my_block().memory.at(to), 0xFF, 16);  // may be written from now on
    me().copies.back().push_back({to, there ? static_cast<uint8_t const*>(from) : nullptr});
}
void copy_commit() { me().copies.emplace_back(); }
void copy_wait(int pending) {
    pause_sometimes();
    auto& groups = me().copies;
    while (int(groups.size()) > pending + 1) {
        for (Copy const& c : groups.front()) land(me(), c);
        groups.erase(groups.begin());
    }
}
void publish_copies() {
    for (auto const& [to, bytes] : me().landed) std::memcpy(&my_block().memory.at(to), bytes.data(), 16);
    me().landed.clear();
}

void product(float* d, int columns, uint64_t a, uint64_t b, bool a_transposed, bool b_transposed, bool accumulate) {
    Warp& w = my_warp();
    uint64_t const number = me().joined++ - w.finished;
    if (number == w.products.size()) {
        Product p{};
        p.a = a, p.b = b, p.columns = columns, p.group = me().groups;
        p.a_transposed = a_transposed, p.b_transposed = b_transposed, p.accumulate = accumulate;
        w.products.push_back(p);
    }
    Product& p = w.products.at(number);
    if (p.a != a || p.b != b || p.columns != columns || p.accumulate != accumulate) fail("lanes disagree about a product");
    p.d[self->thread % 32] = d;
    ++p.joined;
    if (random() % 64 == 0) something_asynchronous();
}
void product_commit() { ++me().groups; }
void product_wait(int pending) {
    sync_warp();
    Warp& w = my_warp();
    while (!w.products.empty() && w.products.front().group < me().groups - pending) multiply(self->block, self->thread / 32);
}

void seed(uint64_t value) { state = value * 0x9E3779B97F4A7C15ull + 1; }
uint64_t random() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state >> 16;
}

void run(int grid_blocks, int cluster, int threads_per_block, int shared_bytes, std::function<void()> const& kernel) {
    body = &kernel;
    grid_size = grid_blocks;
    for (first_block = 0; first_block < grid_blocks; first_block += cluster) run_cluster(cluster, threads_per_block, shared_bytes);
}

}  // namespace emulation
