"""Measured tile configurations, by GPU name, kernel and mean rows per expert.

Values are the fields of `TileConfig` in order: bm, bn, bk, warps, stages, group, programs, tma, flatten, tma_store,
presort, narrow (trailing defaults left out). Measured with `tune_experts`; the measurements, and which entries were
chosen by inference instead, are in `benchmarks/experts/`.
"""

# Smallest mean rows per expert, rounded to a power of two, from which a product compiled for Hopper takes the place of Triton's
# where compiled ones are asked for.
# Only 1024 is measured (E=128, 32768 tokens; `benchmarks/experts/cuda_h200.csv`); 4096 follows by inference. Below, tiles of 384
# rows (two blocks of 192) would stay partly empty.
COMPILED_FROM: dict[str, int] = {
    "up": 1024,
    "up_eval": 1024,
    "down": 1024,
    "grad_hidden": 1024,
    "grad_hidden_sorted": 1024,
    "grad_input": 1024,
    "wgrad_up": 1024,
    "wgrad_down": 1024,
}

TABLES: dict[str, dict[str, dict[int, tuple]]] = {
    "NVIDIA H200": {
        "up": {
            1: (16, 128, 64, 8, 5, 8, 2, False, False),
            8: (16, 128, 64, 4, 4, 8, 3, False, False),
            64: (64, 256, 64, 4, 4, 8, 1, True, False),
            256: (128, 256, 64, 8, 3, 8, 1, True, False, False, True),
            1024: (128, 256, 64, 8, 3, 16, 1, True, True),
            4096: (128, 256, 64, 8, 3, 8, 1, True, True),
        },
        "up_eval": {
            1: (16, 128, 64, 8, 5, 8, 2, False, False),
            8: (16, 128, 64, 4, 4, 8, 3, False, False),
            64: (64, 256, 64, 4, 4, 8, 1, True, False),
            256: (128, 256, 64, 8, 3, 8, 1, True, False, False, True),
            1024: (128, 256, 64, 8, 3, 16, 1, True, True, True),
            4096: (128, 256, 64, 8, 3, 4, 1, True, True, True),
        },
        "down": {
            1: (16, 64, 64, 4, 5, 8, 4, False, False),
            8: (16, 128, 64, 4, 4, 8, 3, False, False),
            64: (128, 256, 64, 8, 3, 8, 1, True, False),
            256: (128, 256, 64, 8, 4, 8, 1, True),
            1024: (128, 256, 64, 8, 4, 16, 1, True, False, False, False, True),
            4096: (128, 256, 64, 8, 3, 8, 1, True, False, False, False, True),
        },
        "grad_hidden": {
            1: (16, 128, 64, 8, 5, 8, 2, False, False),
            8: (16, 128, 64, 8, 5, 8, 2, False, False),
            64: (64, 256, 64, 4, 4, 8, 1, True, False),
            256: (128, 256, 64, 8, 3, 8, 1, True, False, False, True),
            1024: (128, 256, 64, 8, 3, 16, 1, True, True),
            4096: (128, 256, 64, 8, 3, 8, 1, True, True),
        },
        "grad_hidden_sorted": {
            1: (16, 128, 64, 8, 5, 8, 2, False, False),
            8: (16, 128, 64, 8, 5, 8, 2, False, False),
            64: (64, 256, 64, 4, 4, 8, 1, True, False),
            256: (128, 256, 64, 8, 3, 4, 1, True, True),
            1024: (128, 256, 64, 8, 3, 16, 1, True, False, False, False, True),
            4096: (128, 256, 64, 8, 3, 8, 1, True, True),
        },
        "grad_input": {
            1: (16, 64, 128, 4, 3, 8, 4, False, False),
            8: (16, 64, 128, 4, 3, 8, 4, False, False),
            64: (64, 256, 64, 4, 4, 8, 1, True, False),
            256: (64, 256, 64, 4, 4, 8, 1, True),
            1024: (128, 256, 64, 8, 3, 16, 1, True, False, False, False, True),
            4096: (128, 256, 64, 8, 3, 8, 1, True, False, False, False, True),
        },
        "wgrad_up": {
            64: (128, 256, 64, 8, 3, 8, 1, True, True, True),
            256: (128, 256, 32, 8, 6, 8, 1, True, True, True),
            1024: (128, 256, 32, 8, 4, 8, 1, True, False, True, False, True),
            4096: (128, 256, 64, 8, 3, 8, 1, True, False, True),
        },
        "wgrad_down": {
            64: (128, 256, 64, 8, 3, 8, 1, True, True, True),
            256: (128, 256, 32, 8, 6, 8, 1, True, False, True),
            1024: (128, 256, 32, 8, 5, 8, 1, True, False, True, False, True),
            4096: (128, 256, 64, 8, 3, 8, 1, True, False, True),
        },
    },
}
