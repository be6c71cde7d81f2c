// Grouped products of backward: gradients of the rows (192x240, the weights shared) and of the weights (192x192, A shared).
#include "grouped_launch.cuh"

namespace sink_fa3::grouped {

char const* grad_hidden_launch(RowsCall const& call, cudaStream_t stream) {
    return launch_rows<Config<3, 240, 4, kShareB, true, false, kPlain>>(call, stream);
}

char const* grad_hidden_gathered_launch(RowsCall const& call, cudaStream_t stream) {
    return launch_rows<Config<3, 240, 4, kShareB, true, false, kPlain, true>>(call, stream);
}

char const* grad_input_launch(RowsCall const& call, cudaStream_t stream) {
    return launch_rows<Config<3, 240, 4, kShareB, true, false, kScattered>>(call, stream);
}

char const* wgrad_launch(WgradCall const& c, cudaStream_t stream) {
    using C = Config<3, 192, 4, kShareA, false, true, kPlain>;
    CUtensorMap map_a, map_b;
    if (!encode_ragged(&map_a, c.a, c.height, c.a_pitch, 64, kStep / 2) || !encode_ragged(&map_b, c.b, c.columns, c.b_pitch, 64, kStep))
        return kNoDescriptor;
    Params p{};
    p.offsets = c.offsets, p.experts = c.experts, p.columns = c.columns, p.height = c.height, p.group = 8;
    p.padded_a = c.padded_a, p.padded_b = c.padded_b;
    p.out = static_cast<bf16*>(c.out), p.pitch = c.out_pitch, p.expert_pitch = c.out_expert_pitch;
    return launch<C>(map_a, map_b, p, stream);
}

}  // namespace sink_fa3::grouped
