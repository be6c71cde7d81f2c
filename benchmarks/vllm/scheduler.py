"""What vLLM's scheduler spends for returned experts in a step, its own and ours, on CPU and without a model.

    python benchmarks/vllm/scheduler.py > benchmarks/vllm/scheduler_cpu.csv       # any Python with vLLM 0.26 or 0.30

Requests that decode, `length` tokens long: microseconds of one `schedule`, and of its part `_update_after_schedule`, medians; with experts, by
vLLM's scheduler and by ours, and without experts. The three take turns. Blocks are of 16 tokens, vLLM's default on GPUs.
"""

import csv
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

import played
from stamp import commit

REQUESTS, LENGTHS = 64, (128, 1024, 4096, 16384)
STEPS = 60
MEASURES = ("schedule_us", "update_after_schedule_us")


def scheduler_of(name: str, folder: str, length: int) -> Any:
    """`REQUESTS` requests whose prompts of `length` tokens are computed."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    tokens = REQUESTS * length
    parts = played.scheduler_parts(
        folder, 4 * (tokens // played.BLOCK + 64 * REQUESTS), length + 512, REQUESTS, max(tokens, 1024)
    )
    if name == "none":
        parts["vllm_config"].model_config.enable_return_routed_experts = False
    scheduler = played.three(parts, asynchronous=True)["own" if name == "none" else name]()
    hasher = get_request_block_hasher(played.BLOCK, sha256)
    for number in range(REQUESTS):
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        scheduler.add_request(Request(str(number), [number] * length, params, None, block_hasher=hasher))
    step(scheduler)
    return scheduler


def step(scheduler: Any) -> dict[str, float]:
    """One step of every request, with sampled tokens. Microseconds of its parts."""
    from vllm.v1.outputs import ModelRunnerOutput

    update, parts = scheduler._update_after_schedule, {}

    def timed(output: Any) -> None:
        begun = time.perf_counter()
        update(output)
        parts["update_after_schedule_us"] = (time.perf_counter() - begun) * 1e6

    scheduler._update_after_schedule = timed
    begun = time.perf_counter()
    output = scheduler.schedule()
    parts["schedule_us"] = (time.perf_counter() - begun) * 1e6
    del scheduler._update_after_schedule
    names = list(output.num_scheduled_tokens)
    assert len(names) == REQUESTS
    indices = {name: i for i, name in enumerate(names)}
    scheduler.update_from_output(
        output, ModelRunnerOutput(req_ids=names, req_id_to_index=indices, sampled_token_ids=[[1]] * REQUESTS)
    )
    return parts


def main() -> None:
    """Print rows."""
    import vllm

    played.BLOCK = 16
    about = {
        "vllm": vllm.__version__,
        "hardware": f"CPU {platform.machine()}, {os.cpu_count()} cores",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    writer = csv.DictWriter(sys.stdout, ["requests", "length", "scheduler", *MEASURES, *about], lineterminator="\n")
    writer.writeheader()
    for length in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            made = {name: scheduler_of(name, f"{folder}/{name}", length) for name in ("none", "own", "ours")}
        for scheduler in made.values():  # the step behind the prefill
            step(scheduler)
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in made}
        for _ in range(STEPS):
            for name, scheduler in made.items():
                seen[name].append(step(scheduler))
        for name, steps in seen.items():
            medians = {measure: f"{statistics.median(one[measure] for one in steps):.1f}" for measure in MEASURES}
            writer.writerow({"requests": REQUESTS, "length": length, "scheduler": name, **medians, **about})
        sys.stdout.flush()


if __name__ == "__main__":
    main()
