"""Measured tile configurations, by GPU name, kernel and mean rows per expert.

Values are the fields of `TileConfig` in order: bm, bn, bk, warps, stages, group, programs, tma. Measured with
`benchmarks/experts/sweep.py`.
"""

TABLES: dict[str, dict[str, dict[int, tuple[int, int, int, int, int, int, int, bool]]]] = {}
