"""A GPT-OSS of the 20B's widths: bf16 -> MXFP4 on disk -> loaded dequantised, with time and peak memory of each step.

    python benchmarks/mxfp4_checkpoint.py --layers 24 --device cuda --folder /scratch/twenty --csv benchmarks/mxfp4_checkpoint.csv

Each step runs in a process of its own, so that its peak is its own. 24 layers take 39 GiB of GPU (or host) memory and 13 GiB
of disk; loading dequantised takes the same memory and what docs/mxfp4.md says on top.
"""

import argparse
import csv
import resource
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

from trl_gptoss.experts.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from trl_gptoss.hub.card import hardware
from trl_gptoss.hub.mxfp4_files import mxfp4_loading_cost, save_pretrained_mxfp4

GIB = 2**30
FIELDS = ("machine", "torch", "transformers", "date", "commit", "layers", "device", "step", "seconds", "peak_gpu_gib")
FIELDS += ("peak_host_gib", "note")


def save(config: GptOssConfig, device: str, folder: Path) -> tuple[float, str]:
    """Make a random model and save it in MXFP4; seconds of the saving."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GptOssForCausalLM._from_config(config, dtype=torch.bfloat16)
    print(mxfp4_loading_cost(config))
    start = time.monotonic()
    save_pretrained_mxfp4(model, folder / "mxfp4")
    seconds = time.monotonic() - start
    last = f"model.layers.{config.num_hidden_layers - 1}.mlp.experts.down_proj"
    torch.save(model.get_parameter(last)[:2].detach().cpu(), folder / "kept.pt")
    size = sum(file.stat().st_size for file in (folder / "mxfp4").iterdir())
    return seconds, f"{size / GIB:.2f} GiB on disk"


def load(config: GptOssConfig, device: str, folder: Path) -> tuple[float, str]:
    """Load it dequantised; seconds, and whether the last layer's first experts are bit for bit what they should be."""
    start = time.monotonic()
    model = GptOssForCausalLM.from_pretrained(
        folder / "mxfp4", dtype=torch.bfloat16, device_map=device, quantization_config=Mxfp4Config(dequantize=True)
    )
    seconds = time.monotonic() - start
    kept = torch.load(folder / "kept.pt").transpose(1, 2)
    last = model.get_parameter(f"model.layers.{config.num_hidden_layers - 1}.mlp.experts.down_proj")[:2].cpu()
    same = torch.equal(last, dequantize_mxfp4(*quantize_mxfp4(kept)).transpose(1, 2))
    size = sum(p.nbytes for p in model.parameters())
    return seconds, f"result {size / GIB:.2f} GiB; experts bit-equal: {same}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True, help="scratch space; removed afterwards")
    parser.add_argument("--csv", type=Path, required=True, help="rows are appended")
    parser.add_argument("--commit", default="")
    parser.add_argument("--step", choices=("save", "load"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step is None:
        args.folder.mkdir(parents=True, exist_ok=True)
        try:
            for step in ("save", "load"):
                subprocess.run([sys.executable, __file__, *sys.argv[1:], "--step", step], check=True)
        finally:
            shutil.rmtree(args.folder)
        return
    config = GptOssConfig(num_hidden_layers=args.layers, num_local_experts=32)
    seconds, note = (save if args.step == "save" else load)(config, args.device, args.folder)
    gpu = torch.cuda.max_memory_allocated() / GIB if args.device.startswith("cuda") else 0.0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    row = (hardware(), torch.__version__, transformers.__version__, date.today().isoformat(), args.commit, args.layers)
    row += (args.device, args.step, f"{seconds:.1f}", f"{gpu:.2f}", f"{host:.2f}", note)
    new = not args.csv.exists()
    with args.csv.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([FIELDS, row] if new else [row])
    print(*row, sep=", ", file=sys.stderr)


if __name__ == "__main__":
    main()
