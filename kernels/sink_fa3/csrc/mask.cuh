// Which keys a query sees, as an interval of columns: [lo, hi) within its sequence.
#pragma once

#include "ptx.cuh"

namespace sink_fa3 {

struct KeyRange {
    int lo, hi;
};

// Bottom-right aligned: query i (token of its sequence) sits at key i + k_len - q_len.
__device__ __forceinline__ KeyRange keys_of(int token, int q_len, int k_len, int causal, int window) {
    int const diagonal = token + k_len - q_len;
    return {window > 0 ? diagonal - window + 1 : 0, causal ? min(k_len, diagonal + 1) : k_len};
}

// Rows are queries: sets scores outside a row's interval to -inf. `col0` is the tile's first key.
template <int N>
__device__ __forceinline__ void mask_scores(float (&s)[N], KeyRange const (&rows)[2], int col0, int lane) {
    int const first = col0 + 2 * (lane & 3);
    int const hi[2] = {rows[0].hi - first, rows[1].hi - first};
    int const lo[2] = {rows[0].lo - first, rows[1].lo - first};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        int const r = (i >> 1) & 1;
        int const col = 8 * (i >> 2) + (i & 1);
        if (col >= hi[r] || col < lo[r]) s[i] = __int_as_float(0xff800000);
    }
}

}  // namespace sink_fa3
