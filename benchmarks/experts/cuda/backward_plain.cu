#include "launch.cuh"

using namespace experts;

extern Variant const backward_plain[];
Variant const backward_plain[] = {
    VARIANT("backward_plain/2x256", 2, 256, 4, kAlone, true, false, kPlain),
    VARIANT("backward_plain/2x256B", 2, 256, 4, kShareB, true, false, kPlain),
    VARIANT("backward_plain/2x256A", 2, 256, 4, kShareA, true, false, kPlain),
    VARIANT("backward_plain/2x240", 2, 240, 4, kAlone, true, false, kPlain),
    VARIANT("backward_plain/2x240A", 2, 240, 4, kShareA, true, false, kPlain),
    VARIANT("backward_plain/2x240B", 2, 240, 4, kShareB, true, false, kPlain),
    VARIANT("backward_plain/3x192", 3, 192, 4, kAlone, true, false, kPlain),
    VARIANT("backward_plain/3x192A", 3, 192, 4, kShareA, true, false, kPlain),
    VARIANT("backward_plain/3x192B", 3, 192, 4, kShareB, true, false, kPlain),
    VARIANT("backward_plain/3x240", 3, 240, 4, kAlone, true, false, kPlain),
    VARIANT("backward_plain/3x240A", 3, 240, 4, kShareA, true, false, kPlain),
    VARIANT("backward_plain/3x240B", 3, 240, 4, kShareB, true, false, kPlain),
    {},
};
