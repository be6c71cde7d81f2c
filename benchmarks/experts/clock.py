"""Clock and power of a GPU while something else runs: a process of its own, which neither waits for the GIL nor loads torch.

python clock.py samples.csv     # until killed: seconds of time.perf_counter, MHz, W now, W mean of about a second
"""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SM, INSTANT_POWER = 1, 186  # NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT


class _Field(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    ]


def sample(path: Path) -> None:
    """A line every 4 ms or so; the driver itself takes a new sample of power about every 100 ms."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    device, clock, mean = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    index = int(visible) if visible.isdigit() else 0
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        raise RuntimeError(f"NVML does not open GPU {index}.")
    with path.open("w", buffering=1) as file:
        while True:
            power = _Field(INSTANT_POWER)
            nvml.nvmlDeviceGetClockInfo(device, SM, ctypes.byref(clock))
            nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(mean))
            nvml.nvmlDeviceGetFieldValues(device, 1, ctypes.byref(power))
            now = (power.value & 0xFFFFFFFF) / 1000  # an unsigned int in the union
            file.write(f"{time.perf_counter():.4f},{clock.value},{now:.0f},{mean.value / 1000:.0f}\n")
            time.sleep(0.004)


@contextmanager
def clock_samples(path: Path) -> Iterator[None]:
    """Sample into `path` while the block runs."""
    sampler = subprocess.Popen([sys.executable, __file__, str(path)])
    try:
        yield
    finally:
        sampler.terminate()
        sampler.wait()


if __name__ == "__main__":
    sample(Path(sys.argv[1]))
