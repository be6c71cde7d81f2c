// What the benchmark calls, without types of C++.
#pragma once

#include <cstdint>

extern "C" {

struct Call {
    void const *a, *b, *offsets;
    void *out, *gated;
    void const *bias, *order, *weight;
    int64_t a_rows, a_width, b_width;  // width of `b` where it holds rows (weight gradients)
    int64_t pitch, expert_pitch, gated_pitch;
    int experts, columns, height, contraction, group, blocks;
    float alpha, limit;
    void* stream;
};

struct Variant {
    char const* name;
    int (*launch)(Call const&);      // 0, a cudaError_t, or -1 if a descriptor cannot be made
    int (*clusters)();               // that fit on the device at once
};

int variant_count();
char const* variant_name(int i);
int variant_launch(int i, Call const* call);
int variant_clusters(int i);
}
