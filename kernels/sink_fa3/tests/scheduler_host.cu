// The kernels' scheduling and choice of kernels, on the CPU: prints what is wrong and returns 1, or prints "ok".
//
//   nvcc -std=c++17 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -I../csrc -o scheduler_host scheduler_host.cu && ./scheduler_host
#include <cstdio>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "bwd_launch.cuh"

using namespace sink_fa3;

static int failures = 0;

template <typename... A>
static void expect(bool good, char const* what, A... values) {
    if (good) return;
    ++failures;
    std::printf(what, values...);
    std::printf("\n");
}

// What plan_tickets computes, by loops.
struct Planned {
    std::vector<int> ends;
    std::vector<int2> list;
    Order order;
    Planned(std::vector<int> const& cu, std::vector<int> const& cu_read, int group_size, int block, int units, int together) {
        int const batch = int(cu.size()) - 1;
        order = {cu.data(), cu_read.data(), nullptr, nullptr, batch, group_size, block, units, together};
        int sum = 0;
        for (int b = 0; b < batch; ++b) {
            sum += blocks_of(order, b) * units;
            if (b % group_size == group_size - 1 || b == batch - 1) ends.push_back(sum);
        }
        list.assign(sum / units, int2{-1, -1});
        for (int b = 0; b < batch; ++b) {
            int blocks[kMostSequences];
            group_blocks(order, b, blocks);
            int const g = b / group_size, start = g > 0 ? ends[g - 1] / units : 0;
            for (int level = 0; level < blocks_of(order, b); ++level) {
                int2& entry = list[start + rank_of(blocks, b - g * group_size, level)];
                expect(entry.x < 0, "sequence %d level %d: its place is taken", b, level);
                entry = {b, level};
            }
        }
        for (size_t i = 1; i < list.size(); ++i)
            expect(list[i].x / group_size != list[i - 1].x / group_size || list[i].y <= list[i - 1].y, "block %zu: longest not first", i);
        order.ends = ends.data(), order.list = list.data();
    }
};

static std::vector<int> random_lengths(std::mt19937& rng, int batch) {
    std::vector<int> cu{0};
    for (int b = 0; b < batch; ++b) {
        int const kinds[] = {0, 1, int(rng() % 40), int(rng() % 700), int(rng() % 9000)};
        cu.push_back(cu.back() + kinds[rng() % 5]);
    }
    return cu;
}

// Every (sequence, head group, block, key block) is handed out once, in a part of its tile, the tile's longest first.
template <bool kSplit>
static void check_forward(std::vector<int> const& cu_q, std::vector<int> const& cu_k, int tokens, int head_groups, int splits, int causal,
                          int window) {
    int const batch = int(cu_q.size()) - 1, together = sequences_together(cu_k.back(), batch, head_groups, kTokensInL2);
    Planned const plan(cu_q, cu_k, together, tokens, head_groups, kTokensInL2);
    std::vector<int> const& ends = plan.ends;
    TileParams p{plan.order, cu_k.data(), splits, tokens, 8, causal, window};
    std::set<std::tuple<int, int, int, int>> seen;
    size_t wanted = 0;
    for (size_t b = 0; b + 1 < cu_q.size(); ++b) {
        int const q_len = cu_q[b + 1] - cu_q[b], offset = cu_k[b + 1] - cu_k[b] - q_len;
        for (int token = 0; token < q_len; token += tokens) {
            int const last = std::min(token + tokens, q_len) - 1, k_len = cu_k[b + 1] - cu_k[b];
            int const end = causal ? std::min(k_len, last + offset + 1) : k_len;
            int const begin = window ? std::max(0, token + offset - window + 1) : 0;
            int const blocks = end > begin ? (end + 127) / 128 - begin / 128 : 0;
            wanted += size_t(head_groups) * blocks;
        }
    }
    int tiles = 0;
    for (int ticket = 0; ticket < ends.back() * splits; ++ticket) {
        Tile const t = tile_of<128, kSplit>(p, ticket);
        expect(t.token0 >= 0 && t.token0 < t.q_len && t.token0 % tokens == 0 && t.head_group < head_groups, "tile %d: bad place", ticket);
        expect(t.n_max >= t.n_min && t.n_min >= 0, "tile %d: bad keys %d %d", ticket, t.n_min, t.n_max);
        for (int n = t.n_min; n < t.n_max; ++n)
            expect(seen.emplace(t.q_begin + t.token0, t.head_group, n, 0).second, "tile %d: key block %d twice", ticket, n);
        tiles += t.split == 0;
    }
    expect(seen.size() == wanted, "forward: %zu of %zu key blocks", seen.size(), wanted);
    expect(tiles == ends.back(), "forward: %d of %d tiles", tiles, ends.back());
}

// Every key block of every KV head is handed out once, in ascending order within its head; `has_key_block` and
// `first_key_block` say of every tile of queries what the items then do.
static void check_backward(std::vector<int> const& cu_q, std::vector<int> const& cu_k, int kv_heads, int causal, int window) {
    int const batch = int(cu_q.size()) - 1, together = sequences_together(cu_q.back(), batch, kv_heads, kQueriesInL2);
    Planned const plan(cu_k, cu_q, together, kBwdKeys, kv_heads, kQueriesInL2);
    std::vector<int> const& ends = plan.ends;
    BwdParams p{};
    p.cu_q = cu_q.data(), p.cu_k = cu_k.data();
    p.order = plan.order;
    p.batch = batch, p.kv_heads = kv_heads, p.causal = causal, p.window = window;
    std::vector<std::vector<int>> next(p.batch, std::vector<int>(kv_heads, 0));  // per sequence and head: the next block
    std::vector<std::vector<std::vector<int>>> adders(p.batch);                   // per sequence and tile, for head 0
    for (int b = 0; b < p.batch; ++b) adders[b].resize((cu_q[b + 1] - cu_q[b] + kBwdRows - 1) / kBwdRows);
    for (int ticket = 0; ticket < ends.back(); ++ticket) {
        BwdItem const t = bwd_item(p, ticket);
        int b = 0;
        while (cu_k[b + 1] <= t.k_begin) ++b;  // the non-empty sequence that begins there
        expect(t.k_begin == cu_k[b] && t.q_begin == cu_q[b] && t.kv_head >= 0 && t.kv_head < kv_heads, "item %d: bad place", ticket);
        expect(next[b][t.kv_head]++ == t.n, "item %d: block %d out of order", ticket, t.n);
        for (int m = t.m_min; t.kv_head == 0 && m < t.m_min + t.m_count; ++m) adders[b][m].push_back(t.n);
    }
    for (int b = 0; b < p.batch; ++b) {
        int const q_len = cu_q[b + 1] - cu_q[b], k_len = cu_k[b + 1] - cu_k[b];
        for (int h = 0; h < kv_heads; ++h)
            expect(next[b][h] == (k_len + kBwdKeys - 1) / kBwdKeys, "sequence %d head %d: %d blocks", b, h, next[b][h]);
        for (int m = 0; m < int(adders[b].size()); ++m) {
            bool const has = has_key_block(p, b, m * kBwdRows, q_len - m * kBwdRows);
            expect(has == !adders[b][m].empty(), "sequence %d (%d, %d) tile %d: has_key_block %d", b, q_len, k_len, m, has);
            for (int i = 0; i < int(adders[b][m].size()); ++i)
                expect(adders[b][m][i] - first_key_block(p, m, k_len - q_len) == i, "sequence %d (%d, %d) tile %d: turn of block %d", b, q_len,
                       k_len, m, adders[b][m][i]);
        }
    }
}

static Problem cached(int batch, int q_len, int k_len, int window = 0) {
    return {Dtype::kBf16, batch * q_len, batch * k_len, 64, 8, 64, batch, q_len, k_len, true, window, 0.125f, nullptr, nullptr};
}

static void check_plan() {
    FwdPlan const one = fwd_plan(cached(1, 1, 32768), 132);
    expect(one.few_rows && one.splits >= 24 && 8 * one.splits <= 264, "one token on 32768 keys: %d parts", one.splits);
    expect(fwd_plan(cached(1, 8, 32768), 132).few_rows, "eight tokens: not one tile");
    FwdPlan const nine = fwd_plan(cached(1, 9, 32768), 132);
    expect(!nine.few_rows && nine.splits > 8, "nine tokens: %d parts", nine.splits);
    expect(fwd_plan(cached(64, 1, 32768), 132).few_rows, "64 sequences: not the small tile");
    expect(fwd_plan(cached(1, 4096, 32768), 132).splits == 1, "a chunk of 4096 tokens fills the GPU");
    FwdPlan const training = fwd_plan(cached(2, 1500, 1500), 132), windowed = fwd_plan(cached(1, 1, 32768, 128), 132);
    expect(training.splits == 1 && !training.few_rows, "training must not split");
    expect(windowed.splits == 1 && !windowed.few_rows, "a window of 128 has nothing to split");
}

int main() {
    std::mt19937 rng(0);
    for (int i = 0; i < 300; ++i) {
        int const batch = 1 + rng() % 12;
        std::vector<int> const cu_k = random_lengths(rng, batch);
        std::vector<int> const cu_q = rng() % 2 ? cu_k : random_lengths(rng, batch);
        int const causal = rng() % 4 > 0, window = causal && rng() % 2 ? 1 + rng() % 1000 : 0;
        int const tokens = rng() % 2 ? 24 : 1 + rng() % 64, groups = 1 + rng() % 9, splits = 1 + rng() % 40;
        if (cu_q.back() > 0) {
            check_forward<false>(cu_q, cu_k, tokens, groups, 1, causal, window);
            check_forward<true>(cu_q, cu_k, tokens, groups, splits, causal, window);
        }
        if (cu_k.back() > 0) check_backward(cu_q, cu_k, groups, causal, window);
    }
    check_plan();
    if (failures == 0) std::printf("ok\n");
    return failures != 0;
}
