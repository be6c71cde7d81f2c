// The shipped grouped products, launcher and kernel, on the emulated machine against plain loops. Copies of csrc/grouped* lie beside
// these files, so that they include the headers of the emulation:
//
//   g++ -std=c++17 -O2 -I. -o grouped grouped.cpp machine.cpp -x c++ grouped_fwd.cu grouped_bwd.cu && ./grouped SEED [KIND [CASE]]
#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "grouped.h"
#include "machine.h"

namespace emulation {
int clusters = 2;
int multiprocessors() { return 2 * clusters + 1; }
}  // namespace emulation

namespace {

using namespace sink_fa3::grouped;
using bf16 = __nv_bfloat16;
constexpr float kGuard = 7.f, kAlpha = 1.702f, kLimit = 0.9f;

float normal() {
    float sum = 0;
    for (int i = 0; i < 12; ++i) sum += emulation::random() % 65536 / 65536.f;
    return sum - 6;
}

// Ends where memory ends.
template <typename T>
struct Array {
    T* data;
    size_t size;
    explicit Array(size_t n) : size(n) {
        size_t const page = 4096, bytes = n * sizeof(T), whole = (bytes + page - 1) / page * page;
        auto const all = static_cast<uint8_t*>(mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(all + whole, page, PROT_NONE);
        data = reinterpret_cast<T*>(all + whole - bytes);
    }
    Array(Array const&) = delete;
    ~Array() {
        size_t const whole = (size * sizeof(T) + 4095) / 4096 * 4096;
        munmap(reinterpret_cast<uint8_t*>(data) + size * sizeof(T) - whole, whole + 4096);
    }
    T& operator[](size_t i) const { return data[i]; }
};
struct Matrix : Array<bf16> {
    int64_t columns, pitch;
    Matrix(int64_t rows, int64_t columns, int64_t more = 0) : Array(rows * (columns + more)), columns(columns), pitch(columns + more) {}
    void fill(float value) const {
        for (size_t i = 0; i < size; ++i) data[i] = __float2bfloat16(value);
    }
    void random(float scale) const {
        for (size_t i = 0; i < size; ++i) data[i] = __float2bfloat16(normal() * scale);
    }
    double at(int64_t row, int64_t column) const { return __bfloat162float(data[row * pitch + column]); }
};

struct Case {
    char const* name;
    std::vector<int> counts;
    int inner, width;
};
Case const cases[] = {
    {"ragged", {0, 1, 130, 64, 0, 210, 193, 0}, 192, 496},
    {"one expert has all", {0, 0, 600, 0}, 128, 528},
    {"many small", {37, 74, 111, 148, 0, 0, 6, 43, 80, 117}, 128, 240},
    {"odd sizes", {65, 127, 129, 3, 0, 400}, 208, 304},
    {"one step", {100, 300, 5}, 64, 480},
    {"short of a step", {384, 385, 383}, 16, 16},
    {"a row", {0, 1}, 128, 256},
    {"nothing", {0, 0, 0}, 128, 256},
    {"many steps", {100, 0, 250}, 1104, 256},
};

int bad = 0;
struct Difference {
    double wrong = 0, norm = 0;
    void add(double found, double expected) {
        double const d = found - expected;
        wrong += d == d ? d * d : 1e30, norm += expected * expected;
    }
    void report(std::string const& what, bool clean) const {
        double const error = norm > 0 ? std::sqrt(wrong / norm) : std::sqrt(wrong);
        bool const ok = error < 4e-3 && clean;
        bad += !ok;
        std::printf("%s %s %.1e%s\n", ok ? "PASS" : "WRONG", what.c_str(), error, clean ? "" : " written elsewhere");
        std::fflush(stdout);
    }
};

struct Sorted {
    std::vector<int> ends{0}, places{0};  // rows of expert e are ends[e]:ends[e + 1], in a padded operand from places[e]
    explicit Sorted(Case const& c) {
        for (int n : c.counts) ends.push_back(ends.back() + n), places.push_back(places.back() + (n + 63) / 64 * 64);
    }
};

enum Kind { kFirst, kFirstEval, kSecond, kHidden, kHiddenGathered, kHiddenPadded, kInput, kWgrad, kWgradA, kWgradB };
char const* const names[] = {"first", "first_eval", "second", "grad_hidden", "grad_hidden_gathered", "grad_hidden_padded",
                             "grad_input", "wgrad", "wgrad_padded_a", "wgrad_padded_b"};

// NaN where a padded operand has no rows of an expert's last 64, past its zeros.
Matrix* padded(Matrix const& rows, Sorted const& s, int64_t more) {
    auto const out = new Matrix(s.places.back() + 8, rows.columns, more);
    out->fill(NAN);
    for (size_t e = 0; e + 1 < s.ends.size(); ++e)
        for (int r = s.places[e]; r < s.places[e + 1]; ++r)
            for (int64_t k = 0; k < rows.columns; ++k) {
                int const row = s.ends[e] + r - s.places[e];
                (*out)[r * out->pitch + k] = row < s.ends[e + 1] ? rows[row * rows.pitch + k] : bf16{0};
            }
    return out;
}

void rows(Kind kind, Case const& c) {
    Sorted const s(c);
    bool const gather = kind == kFirst || kind == kFirstEval || kind == kHiddenGathered, first = kind <= kFirstEval;
    bool const scatter = kind == kSecond || kind == kInput, transposed = kind >= kHidden;
    int const K = c.inner, N = c.width, E = c.counts.size(), top_k = 2, used = s.ends.back(), M = (used + 5 + 1) / 2 * 2;
    Array<int> offsets(E + 1), order(M);
    std::copy(s.ends.begin(), s.ends.end(), offsets.data);
    for (int i = 0; i < M; ++i) order[i] = i;
    for (int i = M - 1; i > 0; --i) std::swap(order[i], order[emulation::random() % (i + 1)]);
    Matrix const source(gather ? M / top_k : M, K, 8), b(E * (transposed ? N : K), transposed ? K : N), bias(E, N), weight(1, M);
    source.random(1), b.random(1 / std::sqrt(float(K))), bias.random(1), weight.random(1);
    Matrix const* const operand = kind == kHiddenPadded ? padded(source, s, 16) : &source;
    Matrix const out(M, N, 8), gated(M, N / 2, 8);
    out.fill(kGuard), gated.fill(kGuard);
    std::vector<std::pair<int, int>> const columns = scatter && N >= 32 ? std::vector<std::pair<int, int>>{{0, N / 32 * 16}, {N / 32 * 16, N}}
                                                                        : std::vector<std::pair<int, int>>{{0, N}};
    for (auto const& [begin, end] : columns) {
        RowsCall call{};
        call.a = operand->data, call.a_pitch = operand->pitch;
        call.b = b.data + begin * (transposed ? b.pitch : 1);
        call.b_pitch = b.pitch, call.b_expert_pitch = b.pitch * (transposed ? N : K);
        call.offsets = offsets.data, call.experts = E, call.columns = end - begin, call.contraction = K;
        call.padded_a = kind == kHiddenPadded;
        if (kind != kFirstEval) call.out = out.data + begin, call.out_pitch = out.pitch;
        if (first) call.gated = gated.data, call.gated_pitch = gated.pitch;
        if (first || kind == kSecond) call.bias = bias.data + begin, call.bias_pitch = bias.pitch;
        if (kind == kSecond) call.weight = weight.data;
        call.order = order.data, call.top_k = top_k, call.alpha = kAlpha, call.limit = kLimit;
        auto const launch = kind == kFirst || kind == kFirstEval ? first_launch
                            : kind == kSecond                    ? second_launch
                            : kind == kHiddenGathered            ? grad_hidden_gathered_launch
                            : kind == kInput                     ? grad_input_launch
                                                                 : grad_hidden_launch;
        if (char const* error = launch(call, nullptr)) {
            std::printf("WRONG %s\n", error), ++bad;
            return;
        }
    }
    Difference product, activated;
    std::vector<bool> written(M);
    bool clean = true;
    for (int e = 0; e < E; ++e)
        for (int row = s.ends[e]; row < s.ends[e + 1]; ++row) {
            int const place = scatter ? order[row] : row;
            written[place] = true;
            std::vector<double> sums(N);
            for (int k = 0; k < K; ++k) {
                double const a = source.at(gather ? order[row] / top_k : row, k);
                for (int n = 0; n < N; ++n) sums[n] += a * (transposed ? b.at(e * N + n, k) : b.at(e * K + k, n));
            }
            for (int n = 0; n < N; ++n) {
                if (first || kind == kSecond) sums[n] += bias.at(e, n);
                if (kind == kSecond) sums[n] *= weight.at(0, order[row]);
                if (kind == kFirstEval) clean &= out.at(place, n) == kGuard;
                else product.add(out.at(place, n), sums[n]);
            }
            for (int n = 0; n < N / 2; ++n) {
                double const gate = std::min<double>(sums[2 * n], kLimit), linear = std::min<double>(std::max<double>(sums[2 * n + 1], -kLimit), kLimit);
                if (first) activated.add(gated.at(row, n), (linear + 1) * gate / (1 + std::exp(-kAlpha * gate)));
                else clean &= gated.at(row, n) == kGuard;
            }
        }
    for (int row = 0; row < M; ++row) {
        for (int n = written[row] ? N : 0; n < out.pitch; ++n) clean &= out.at(row, n) == kGuard;
        for (int n = written[row] ? N / 2 : 0; n < gated.pitch; ++n) clean &= gated.at(row, n) == kGuard;
    }
    product.report(std::string(names[kind]) + ", " + c.name, clean);
    if (first) activated.report(std::string(names[kind]) + ", " + c.name + ", activated", clean);
    if (operand != &source) delete operand;
}

void wgrad(Kind kind, Case const& c) {
    Sorted const s(c);
    int const H = c.inner, N = c.width, E = c.counts.size(), M = s.ends.back();
    Array<int> offsets(E + 1);
    std::copy(s.ends.begin(), s.ends.end(), offsets.data);
    Matrix const a(M + 3, H, 16), b(M + 3, N, 8), out(E * (H + 8) + 8, N, 16);
    a.random(1), b.random(1), out.fill(kGuard);
    Matrix const* const x = kind == kWgradA ? padded(a, s, 8) : &a;
    Matrix const* const y = kind == kWgradB ? padded(b, s, 8) : &b;
    WgradCall call{};
    call.a = x->data, call.a_pitch = x->pitch, call.b = y->data, call.b_pitch = y->pitch;
    call.offsets = offsets.data, call.experts = E, call.height = H, call.columns = N;
    call.padded_a = kind == kWgradA, call.padded_b = kind == kWgradB;
    call.out = out.data, call.out_pitch = out.pitch, call.out_expert_pitch = out.pitch * (H + 8);
    if (char const* error = wgrad_launch(call, nullptr)) {
        std::printf("WRONG %s\n", error), ++bad;
        return;
    }
    Difference difference;
    bool clean = true;
    for (int e = 0; e <= E; ++e)
        for (int h = 0; h < (e < E ? H + 8 : 8); ++h) {
            bool const inside = e < E && h < H;
            std::vector<double> sums(N);
            for (int r = inside ? s.ends[e] : 0; inside && r < s.ends[e + 1]; ++r)
                for (int n = 0; n < N; ++n) sums[n] += a.at(r, h) * b.at(r, n);
            for (int n = 0; n < out.pitch; ++n) {
                double const found = out.at(int64_t(e) * (H + 8) + h, n);
                if (inside && n < N) difference.add(found, sums[n]);
                else clean &= found == kGuard;
            }
        }
    difference.report(std::string(names[kind]) + ", " + c.name, clean);
    if (x != &a) delete x;
    if (y != &b) delete y;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) return std::printf("SEED [KIND [CASE]]\n"), 2;
    emulation::seed(std::atoi(argv[1]));
    for (int kind = 0; kind <= kWgradB; ++kind) {
        if (argc > 2 && std::string(argv[2]) != names[kind] && std::string(argv[2]) != "all") continue;
        for (Case const& c : cases) {
            if (argc > 3 && std::string(argv[3]) != c.name) continue;
            emulation::clusters = 1 + emulation::random() % 3;
            if (kind < kWgrad) rows(Kind(kind), c);
            else wgrad(Kind(kind), c);
        }
    }
    return bad > 0;
}
