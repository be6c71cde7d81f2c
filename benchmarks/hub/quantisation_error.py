"""Error of the quantiser against the OCP rule and against OpenAI's own conversion, `triton_kernels`' `downcast_to_mxfp`.

    python quantisation_error.py [--out quantisation_error.csv]

Squared error over squared weights of 2^20 bfloat16 values. OpenAI's conversion is in the package `triton_kernels`, of which
vLLM for CUDA brings a copy; on a GPU its Triton kernel runs, on a CPU the PyTorch version beside it. Where it is not
installed its rows are left out.
"""

import argparse
import csv
import datetime
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from trl_gptoss.experts.mxfp4 import dequantize_mxfp4, quantize_mxfp4

SHAPE = (512, 2048)
WEIGHTS: dict[str, Callable[[], torch.Tensor]] = {
    "normal, std 1": lambda: torch.randn(SHAPE),
    "normal, std 0.02": lambda: 0.02 * torch.randn(SHAPE),
    "Student t, 3 degrees": lambda: torch.distributions.StudentT(3.0).sample(SHAPE),
    "Cauchy": lambda: torch.distributions.Cauchy(0.0, 1.0).sample(SHAPE),
    "uniform": lambda: 2 * torch.rand(SHAPE) - 1,
    "log-normal": lambda: torch.randn(SHAPE).exp() * torch.randn(SHAPE).sign(),
}
Quantiser = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def openai_conversion(device: str) -> dict[str, Quantiser]:
    """OpenAI's quantiser by name; empty where it is not installed."""
    if importlib.util.find_spec("vllm") is not None:
        from vllm.utils.import_utils import has_triton_kernels

        has_triton_kernels()  # makes vLLM's copy importable where there is no other
    if "triton_kernels" not in sys.modules and importlib.util.find_spec("triton_kernels") is None:
        return {}
    from triton_kernels.numerics_details.mxfp import downcast_to_mxfp, downcast_to_mxfp_torch

    convert = downcast_to_mxfp if device == "cuda" else downcast_to_mxfp_torch

    def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed, scales = convert(weight, torch.uint8, axis=-1)
        return packed.unflatten(-1, (-1, 16)), scales

    return {f"OpenAI ({convert.__name__})": quantise}


def main() -> None:
    """Print and append the rows; fail if a rule has less error than `best`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    rules: dict[str, Quantiser] = {
        "best": quantize_mxfp4,
        "floor (OCP)": lambda weight: quantize_mxfp4(weight, scale_rule="floor"),
        **openai_conversion(args.device),
    }
    rows = []
    for name, sample in WEIGHTS.items():
        torch.manual_seed(0)
        weight = sample().bfloat16().to(args.device)
        exact = weight.double()
        errors = {}
        for rule, quantise in rules.items():
            decoded = dequantize_mxfp4(*quantise(weight), dtype=torch.float32).double()
            errors[rule] = float(((decoded - exact) ** 2).sum() / (exact**2).sum())
        for rule, error in errors.items():
            rows.append({"weights": name, "rule": rule, "relative_squared_error": f"{error:.5f}"})
            print("  ".join(rows[-1].values()), flush=True)
        if min(errors.values()) < errors["best"]:
            raise SystemExit(f"{name}: another rule has less error than 'best': {errors}")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    stamp = {"device": device, "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    if args.out:
        new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *stamp], lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(row | stamp for row in rows)


if __name__ == "__main__":
    main()
