"""A checkpoint of the size of gpt-oss-20b: random bfloat16 weights -> MXFP4 on disk -> loaded dequantised, and compared.

    python mxfp4_20b.py all FOLDER --out mxfp4_h200.csv      # the three stages, each in a process of its own
    python mxfp4_20b.py write FOLDER [--device cuda]         # 39 GiB of weights, 12.8 GiB of files
    python mxfp4_20b.py load FOLDER [--device cuda]          # as the trainers load it; every weight compared, a forward
    python mxfp4_20b.py load FOLDER --small 960 --experts 8 --layers 12 --no-compare --out loading_cpu.csv

Every tensor is drawn from a seed of its own, so that the loading process draws it again, quantises and dequantises it with
this package and compares it bit for bit with what transformers' loader made of the file. Host memory is anonymous memory:
pages of the mapped checkpoint files are left out, since the system takes them back when it needs them.
"""

import argparse
import csv
import datetime
import os
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import torch
import transformers
from stamp import commit, driver
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config

from trl_gptoss import save_pretrained_mxfp4
from trl_gptoss.attention import active_backend
from trl_gptoss.experts.mxfp4 import dequantize_mxfp4, quantize_mxfp4

GIB = 2**30
# What the trainers pass for an MXFP4 checkpoint (`trainers/loading.py`).
KWARGS = {"dtype": torch.bfloat16, "attn_implementation": "sink_fa3", "experts_implementation": "gptoss_fused"}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
SMALL = {"vocab_size": 500, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
TOKENS = 512


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


@contextmanager
def measured(stage: str, device: str, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Time and peaks of a stage: GiB of host memory above what was there, GiB allocated on the GPU in all."""
    before, stop, peak = anonymous_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], anonymous_bytes())

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    watcher = threading.Thread(target=watch)
    watcher.start()
    row: dict[str, Any] = {"stage": stage, "device": device}
    start = time.perf_counter()
    try:
        yield row
        if gpu:
            torch.cuda.synchronize()
    finally:
        row["seconds"] = round(time.perf_counter() - start, 2)
        stop.set()
        watcher.join()
    row["host_peak_gib"] = round((max(peak[0], anonymous_bytes()) - before) / GIB, 3)
    row["gpu_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3) if gpu else 0.0
    rows.append(row)


def draw(name: str, shape: torch.Size, device: str) -> torch.Tensor:
    """The bfloat16 weights called `name`, the same in every process on the same kind of device."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
    return tensor.add_(1) if "norm" in name else tensor


def source_device() -> str:
    """Where weights are drawn: CPU and GPU have different generators."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def config(args: argparse.Namespace) -> GptOssConfig:
    small = {"hidden_size": args.small, "intermediate_size": args.small, **SMALL} if args.small else {}
    return GptOssConfig(num_hidden_layers=args.layers, num_local_experts=args.experts, **small)


def write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Make the weights and save them in MXFP4."""
    with torch.device("meta"):
        model = GptOssForCausalLM(config(args)).to(torch.bfloat16)
    with measured("make bf16 weights", args.device, rows) as row, torch.no_grad():
        model.to_empty(device=args.device)
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape, source_device()))
        row["gib"] = round(sum(p.nbytes for p in model.parameters()) / GIB, 3)
    with measured("save as MXFP4", args.device, rows) as row:
        save_pretrained_mxfp4(model, args.folder)
        row["gib"] = round(sum(file.stat().st_size for file in args.folder.iterdir()) / GIB, 3)


def load(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Load dequantised, compare every parameter with the one it was made from, run a forward."""
    torch.empty(1, device=source_device())  # the CUDA context is no part of loading
    with measured("load dequantised", args.device, rows) as row:
        model = AutoModelForCausalLM.from_pretrained(
            args.folder, device_map={"": args.device}, quantization_config=Mxfp4Config(dequantize=True), **KWARGS
        )
        row["gib"] = round(sum(p.nbytes for p in model.parameters()) / GIB, 3)
        largest = max(p.nbytes for name, p in model.named_parameters() if name.endswith(EXPERTS)) / GIB
    above = (row["gpu_peak_gib"] if args.device == "cuda" else row["host_peak_gib"]) - row["gib"]
    reading = "without reading threads" if os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") else "with reading threads"
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        reading += ", glibc's MALLOC_MMAP_THRESHOLD_ set"
    row["note"] = f"{reading}; {above / largest:.1f} of the largest expert matrix above the result"
    if args.no_compare:
        return
    with measured("compare", args.device, rows) as row, torch.no_grad():
        differ, changed = [], 0
        for name, parameter in model.named_parameters():
            drawn = draw(name, parameter.shape, source_device())
            expected = drawn
            if name.endswith(EXPERTS):
                packed = quantize_mxfp4(drawn.transpose(1, 2))
                expected = dequantize_mxfp4(*packed).transpose(1, 2)
                changed += not torch.equal(expected, drawn)
            if not torch.equal(parameter.to(expected.device), expected):
                differ.append(name)
        row["compared"], row["differ"], row["changed_by_mxfp4"] = (
            len(dict(model.named_parameters())),
            len(differ),
            changed,
        )
    with measured("forward", args.device, rows) as row, torch.no_grad():
        ids = torch.arange(TOKENS, device=args.device)[None] * 31 % model.config.vocab_size
        logits = model(ids, logits_to_keep=1).logits
        backend = active_backend(args.device)
        row["note"] = f"{TOKENS} tokens, attention {backend}, logits finite: {bool(logits.isfinite().all())}"
    if differ or not bool(logits.isfinite().all()):
        raise SystemExit(f"weights that differ: {differ[:5]} ({len(differ)}); {row['note']}")


def everything(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The stages in processes of their own, so that each one's peak is its own; then the files are removed."""
    sizes = [f"--layers={args.layers}", f"--experts={args.experts}", f"--small={args.small}"]
    stages = [("write", source_device())] + [("load", device) for device in args.load_on]
    try:
        for stage, device in stages:
            command = [sys.executable, __file__, stage, str(args.folder), f"--device={device}", *sizes]
            command += ["--out", str(args.out)] if args.out else []
            subprocess.run(command, check=True)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


def stamp() -> dict[str, str]:
    """What is needed to repeat a row."""
    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if gpu else "none",
        "driver": driver() if gpu else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


COLUMNS = (
    "layers experts hidden stage device seconds gib host_peak_gib gpu_peak_gib compared differ changed_by_mxfp4 note gpu driver "
    "torch transformers commit date"
).split()


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=("all", "write", "load"))
    parser.add_argument("folder", type=Path, help="of the MXFP4 checkpoint; must not exist yet for `write`")
    parser.add_argument("--device", default=source_device(), help="where the weights are, or go")
    parser.add_argument("--load-on", nargs="+", default=[source_device()], help="devices to load on in `all`")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--small", type=int, default=0, metavar="N", help="hidden size of a smaller model, for a CPU")
    parser.add_argument("--no-compare", action="store_true", help="load only, for its time and memory")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        {"all": everything, "write": write, "load": load}[args.stage](args, rows)
    finally:
        report(args, rows)


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the rows and append them to `--out`."""
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if args.out and rows:
        common = {"layers": args.layers, "experts": args.experts, "hidden": args.small or 2880, **stamp()}
        new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(common | row for row in rows)


if __name__ == "__main__":
    main()
