"""The doctor with a real vLLM on the other side: faults planted in either, one engine for all of them.

    python benchmarks/vllm/doctor.py                         # one GPU, vLLM 0.26, bf16
    python benchmarks/vllm/doctor.py --device cpu --dtype float32 --out -

The engine gets its weights by the same sync as in training; a fault of the engine is a sync with a wrong tensor, one of the
trainer a wrong model. One row for each: what the doctor named, and how many nats the sides were apart before and after.
A window that is one token short is not among them: in a random model it changes log-probs by less than bf16 does.
"""

import argparse
import copy
import csv
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from h200 import hardware, policy

from trl_gptoss.doctor import diagnose
from trl_gptoss.rollouts import SamplingOptions
from trl_gptoss.rollouts.vllm.colocate import ColocateEngine, make_llm
from trl_gptoss.tiny.vocabulary import small_tokenizer
from trl_gptoss.trainers.vllm_setup import _rendezvous, _write_skeleton


class Engine:
    """A colocated engine as the doctor sees it."""

    name = "vLLM"

    def __init__(self, engine: ColocateEngine) -> None:
        self.engine = engine
        self.score = engine.score

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Sync these."""
        dtypes = self.engine.info.dtypes
        self.engine.load(((name, weights[name].to(dtype)) for name, dtype in dtypes.items()), "doctor")

    def fingerprints(self) -> None:
        """It fuses and pads its tensors."""

    def render(self, messages: list[dict[str, str]]) -> None:
        """It takes ids."""


def changed(weights: dict[str, torch.Tensor], ending: str, value: Any) -> dict[str, torch.Tensor]:
    """The weights, with other ones where a name ends so."""
    return {name: value(p) if name.endswith(ending) else p for name, p in weights.items()}


def wrong_rope(model: Any) -> None:
    """The base of another model."""
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 10000.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(model.device)


def values(ending: str, value: Any) -> Any:
    """Other values where a name ends so."""

    @torch.no_grad()
    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(ending):
                parameter.copy_(value(parameter))

    return change


def cases(weights: dict[str, torch.Tensor]) -> dict[str, tuple[str, Any, Any]]:
    """Expected culprit, weights of the engine, change of the trainer."""
    no_sinks = changed(weights, ".sinks", torch.zeros_like)
    no_bias = changed(weights, "router.bias", torch.zeros_like)
    return {
        "healthy": ("", weights, None),
        "sinks zero in the trainer": ("sinks", weights, values(".sinks", torch.zeros_like)),
        "sinks zero in the engine": ("sinks", no_sinks, None),
        "sinks not synced": ("sinks", weights, values(".sinks", lambda p: p + 1.0)),
        "no router bias in the engine": ("router bias", no_bias, None),
        "router bias not synced": ("router bias", weights, values("router.bias", lambda p: p.flip(0))),
        "rope base of another model in the trainer": ("rope", weights, wrong_rope),
    }


def make_engine(model: Any, args: argparse.Namespace) -> Engine:
    """vLLM, without weights so far."""
    from accelerate import Accelerator

    _rendezvous(Accelerator(cpu=args.device == "cpu"))
    memory = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1} if args.device == "cuda" else {}
    with tempfile.TemporaryDirectory() as folder:
        _write_skeleton(folder, model, small_tokenizer())
        llm = make_llm(
            folder, model.dtype, 1, seed=0, load_format="dummy", enforce_eager=True, max_model_len=1024,
            enable_prefix_caching=False, max_num_batched_tokens=4096, **memory,
        )  # fmt: skip
    sampling = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    return Engine(ColocateEngine(llm, [0], sampling, {}))


def main() -> None:
    """Every case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", default="-", help="CSV to append to; - for standard output")
    args = parser.parse_args()
    model = policy("tiny", len(small_tokenizer()), args.device).to(getattr(torch, args.dtype)).eval()
    with torch.no_grad():  # less rounding than the doctor's threshold, which is for trained models
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                parameter.normal_(0.0, 1.0)
            elif parameter.dim() > 1 and "mlp" in name:
                parameter.mul_(0.5)
    reference = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = make_engine(model, args)
    rows = [
        torch.randint(model.config.vocab_size - 64, (n,), generator=torch.Generator().manual_seed(2)).tolist()
        for n in (200, 300)
    ]
    about = hardware(args.device)
    wrong = []
    for case, (expected, theirs, change) in cases(reference).items():
        engine.load(theirs)
        trainer = copy.deepcopy(model)
        if change is not None:
            change(trainer)
        found = diagnose(trainer, engine, rows, reference=reference)
        named = "+".join(found.names)
        left = found.culprits[-1].difference if found.culprits else found.difference
        row = {"case": case, "dtype": args.dtype, "expected": expected, "named": named, "healthy": found.healthy}
        row |= {"tokens": found.tokens, "difference": f"{found.difference:.4g}", "left": f"{left:.4g}", **about}
        print(f"{case}: {named or 'nothing'} ({found.difference:.4g} -> {left:.4g} nats)", file=sys.stderr, flush=True)
        if named != expected or found.healthy != (not expected):
            wrong.append(case)
            print(found.report(), file=sys.stderr, flush=True)
        write(row, args.out)
    if wrong:
        sys.exit(f"not attributed as planted: {', '.join(wrong)}")


def write(row: dict[str, Any], out: str) -> None:
    """Append a row."""
    target = sys.stdout if out == "-" else Path(out).open("a", newline="")
    writer = csv.DictWriter(target, row, lineterminator="\n")
    if target is sys.stdout or target.tell() == 0:
        writer.writeheader()
    writer.writerow(row)
    target.flush()


if __name__ == "__main__":
    try:
        main()
        status = 0
    except SystemExit as stop:
        print(stop.code, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    os._exit(status)  # vLLM's threads would keep the process
