"""Median latency of a stateless `PythonTool` call from one and from eight threads.

python benchmarks/sandbox_latency.py >> benchmarks/sandbox_latency.csv
"""

import datetime
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from trl_gptoss import PythonTool


def call(tool: PythonTool) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    tool.python("12*34")
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    tools = [PythonTool() for _ in range(8)]
    for tool in tools:
        tool.reset()
    call(tools[0])  # starts the spawner
    for threads, calls in ((1, 40), (8, 160)):
        with ThreadPoolExecutor(threads) as pool:
            times = list(pool.map(call, (tools[i % threads] for i in range(calls))))
        median = statistics.median(times)
        print(f"{datetime.date.today()},{os.cpu_count()},{platform.python_version()},{threads},{calls},{median:.1f}")
    for tool in tools:
        tool.close()


if __name__ == "__main__":
    main()
