// C interface for products.py: one product in every shape that was timed, without torch.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -I ../../../kernels/sink_fa3/csrc -DTRANSPOSED=false
//       -DWEIGHT_GRADIENT=false -DEPILOGUE=kGated --shared -Xcompiler -fPIC -o forward_gated.so variants.cu
#include "grouped.cuh"
#include "tensor_map.h"

using namespace experts;

#define PRODUCT TRANSPOSED, WEIGHT_GRADIENT, EPILOGUE

struct Call {
    void const *a, *b;
    void* stream;
    int64_t a_width;  // K of rows, H of a weight gradient
    int blocks;
    Params params;
};

static bool encode(CUtensorMap* map, void const* base, int rank, cuuint64_t const* dims, cuuint64_t const* strides, int width, int rows) {
    auto const fn = tensor_map_encoder();
    cuuint32_t const steps[4] = {1, 1, 1, 1}, box[4] = {cuuint32_t(width), cuuint32_t(rows), 1, 1};
    return fn != nullptr && fn(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(base), dims, strides, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Contiguous rows whose bound slides: row x of dimension 1 exists if x < kSlide, and address x + y + kSlide (2^34 - pitch) wraps to
// row x + y - kSlide.
static bool encode_ragged(CUtensorMap* map, void const* base, int64_t columns, int width, int rows) {
    cuuint64_t const dims[4] = {cuuint64_t(columns), kSlide, 0x7FFF0000, 0x7FFF0000};
    cuuint64_t const pitch = columns * 2, strides[3] = {pitch, pitch, (cuuint64_t(1) << 35) - pitch};
    return encode(map, base, 4, dims, strides, width, rows);
}

static bool encode_matrices(CUtensorMap* map, void const* base, int64_t columns, int64_t height, int64_t count, int width, int rows) {
    cuuint64_t const dims[3] = {cuuint64_t(columns), cuuint64_t(height), cuuint64_t(count)};
    cuuint64_t const strides[2] = {cuuint64_t(columns) * 2, cuuint64_t(columns) * height * 2};
    return encode(map, base, 3, dims, strides, width, rows);
}

// 0, a cudaError_t, or -1 if a descriptor cannot be made.
template <typename C>
int launch(Call const& c) {
    Params const& p = c.params;
    constexpr int kHalfA = C::kShare == kShareA ? 2 : 1, kHalfB = C::kShare == kShareB ? 2 : 1;
    CUtensorMap map_a, map_b;
    bool ok = encode_ragged(&map_a, c.a, c.a_width, 64, (C::kAMn ? kStep : C::kRows) / kHalfA);
    if constexpr (C::kWeightGradient) ok &= encode_ragged(&map_b, c.b, p.columns, 64, kStep / kHalfB);
    else if constexpr (C::kBMn) ok &= encode_matrices(&map_b, c.b, p.columns, p.contraction, p.experts, 64, kStep / kHalfB);
    else ok &= encode_matrices(&map_b, c.b, p.contraction, p.columns, p.experts, kStep, C::kColumns / kHalfB);
    if (!ok) return -1;
    cudaError_t e = cudaFuncSetAttribute(grouped_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
    if (e != cudaSuccess) return e;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {C::kCluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = c.blocks / C::kCluster * C::kCluster;
    config.blockDim = C::kThreads;
    config.dynamicSmemBytes = C::kSharedBytes;
    config.stream = static_cast<cudaStream_t>(c.stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, grouped_kernel<C>, map_a, map_b, p);
}

static struct {
    char const* name;
    int (*launch)(Call const&);
} const variants[] = {
    {"2x256", launch<Config<2, 256, 4, kAlone, PRODUCT>>},   {"2x256A", launch<Config<2, 256, 4, kShareA, PRODUCT>>},
    {"2x256B", launch<Config<2, 256, 4, kShareB, PRODUCT>>}, {"3x192", launch<Config<3, 192, 4, kAlone, PRODUCT>>},
    {"3x192A", launch<Config<3, 192, 4, kShareA, PRODUCT>>}, {"3x192B", launch<Config<3, 192, 4, kShareB, PRODUCT>>},
    {"3x240", launch<Config<3, 240, 4, kAlone, PRODUCT>>},   {"3x240A", launch<Config<3, 240, 4, kShareA, PRODUCT>>},
    {"3x240B", launch<Config<3, 240, 4, kShareB, PRODUCT>>},
};

extern "C" char const* variant_name(int i) { return i < int(sizeof(variants) / sizeof(variants[0])) ? variants[i].name : nullptr; }
extern "C" int variant_launch(int i, Call const* call) { return variants[i].launch(*call); }
