// Grouped products of forward: tiles of 192x240 and 192x192, which 5760 and 2880 columns fill; two blocks share the weights.
#include "grouped_launch.cuh"

namespace sink_fa3::grouped {

char const* first_launch(RowsCall const& call, cudaStream_t stream) {
    return launch_rows<Config<3, 240, 4, kShareB, false, false, kGated, true>>(call, stream);
}

char const* second_launch(RowsCall const& call, cudaStream_t stream) {
    return launch_rows<Config<3, 192, 4, kShareB, false, false, kScattered>>(call, stream);
}

}  // namespace sink_fa3::grouped
