"""How far bf16 gradients are from float32 when nothing changes but the order of sums: one process, with or without a GPU.

    python rounding.py --out rounding.csv                           # two layers of the 20B's width, LoRA
    python rounding.py --out rounding.csv --short --fused-oracle    # for a CPU, 11 GB
    python rounding.py --out rounding.csv --short --width 256

The model, the batches and the oracle are those of `agreement.py`; every seed has batches of its own. Nothing is shared among
ranks here. What is compared:

    tokens   whole   every product over all tokens of a packed batch, as on one GPU
             halves  linear layers, routers and experts over the first half and the second, as two ranks that share it
             split   sums over the inputs of a linear layer in two parts, added in float32 and rounded once: as exact as whole
    routing  own     each token goes where its bf16 router sends it
             oracle  it goes where it goes in float32

Errors are relative in the Euclidean norm; `apart` is the distance from "whole" with the same routing; `moved` is the
fraction of choices (of a token in a layer) that are not those of float32.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "experts"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/distributed"))
# for `sharing`, which starts no process group by itself; as many batches as `agreement.py` has ranks
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")

import sharing
import torch
from agreement import LENGTHS, WIDE, relative
from rows import Rows
from sharing import WORLD
from torch import nn
from torch.nn import functional
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from trl_gptoss.experts import fuse_expert_lora
from trl_gptoss.routing import capture_routing, replay_routing
from trl_gptoss.trainers.packed_forward import model_inputs
from trl_gptoss.trainers.packing import pack

SHAPES = {
    256: {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
    1440: {"num_attention_heads": 32, "num_key_value_heads": 4},
    2880: {},
}
SHORT_LENGTHS = ([(40, 161), (21, 80)], [(16, 102), (63, 3)])
TOKENS, ROUTING = ("whole", "halves", "split"), ("own", "oracle")


def on_halves(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Over the first half of the tokens and the second; tokens are the last dimension but one of every argument."""

    def halves(*inputs: torch.Tensor) -> Any:
        first, second = (forward(*part) for part in zip(*(x.chunk(2, dim=-2) for x in inputs)))
        if isinstance(first, torch.Tensor):
            return torch.cat([first, second], dim=-2)
        return tuple(torch.cat(pair, dim=-2) for pair in zip(first, second))

    return halves


def in_two_sums(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        half = layer.in_features // 2
        total = functional.linear(x[..., :half].float(), layer.weight[:, :half].float())
        total = total + functional.linear(x[..., half:].float(), layer.weight[:, half:].float())
        total = total if layer.bias is None else total + layer.bias.float()
        return total.to(x.dtype)

    return forward


@contextlib.contextmanager
def computed(model: nn.Module, tokens: str) -> Iterator[None]:
    """The model with other orders of its sums."""
    patched = []
    for module in model.modules():
        if tokens == "halves" and isinstance(module, (nn.Linear, GptOssTopKRouter, GptOssExperts)):
            module.forward = on_halves(module.forward)
        elif tokens == "split" and isinstance(module, nn.Linear):
            module.forward = in_two_sums(module)
        else:
            continue
        patched.append(module)
    try:
        yield
    finally:
        for module in patched:
            del module.forward


def loss_of(logps_BC: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What `sharing.loss_of_one_process` says, of a packed batch."""
    mask_BC = inputs["completion_mask"] * inputs["tool_mask"]
    ratio_BC = (logps_BC - inputs["old_per_token_logps"]).exp()
    advantage_B1 = inputs["advantages"][:, None]
    clipped_BC = ratio_BC.clamp(1 - sharing.CLIP, 1 + sharing.CLIP)
    token_BC = -torch.minimum(ratio_BC * advantage_B1, clipped_BC * advantage_B1)
    apart_BC = inputs["ref_per_token_logps"] - logps_BC
    token_BC = token_BC + sharing.BETA * (apart_BC.exp() - apart_BC - 1)
    return ((token_BC * mask_BC).sum(1) / mask_BC.sum(1).clamp(min=1)).mean()


def gradients_of(
    model: nn.Module, seed: int, routing: list[torch.Tensor], replayed: bool
) -> tuple[float, dict[str, torch.Tensor], float]:
    """Mean loss, gradients, and the fraction of choices that differ from `routing`."""
    model.zero_grad()
    total, other, choices = 0.0, 0, 0
    for rank in range(WORLD):
        inputs = sharing.converted(sharing.batch(rank, seed, torch.bfloat16), torch.float32)
        ids_BL = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        packed = pack(ids_BL, inputs["row_lengths"].tolist(), inputs["completion_ids"].shape[1])
        context = replay_routing(model, routing[rank]) if replayed else capture_routing(model)
        with context as record:
            logits_TV = model(**model_inputs(packed)).logits[0]
            logps_TV = logits_TV.float().log_softmax(-1)
            logps_T = logps_TV.gather(1, packed.shift_labels[0].clamp(min=0)[:, None])[:, 0]
            loss = loss_of(packed.unpack(logps_T), inputs) / WORLD
            loss.backward()
        total += loss.item()
        if not replayed:
            own_LTk, theirs_LTk = record.indices().sort(-1).values, routing[rank].sort(-1).values
            other += int((own_LTk != theirs_LTk).any(-1).sum())
            choices += own_LTk[..., 0].numel()
    return total, {n: p.grad.clone() for n, p in sharing.named(model).items()}, other / max(choices, 1)


def oracle(model: nn.Module, seed: int) -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Mean loss and gradients in float32, and the experts of every batch, (L, T, k)."""
    with capture_routing(model, every_forward=True) as record:
        _, gradients = sharing.plain_gradients(model, torch.bfloat16, "token", seed, WORLD)
    documents = iter(record.forwards())
    routing = [torch.cat([next(documents) for _ in sharing.LENGTHS[rank]], dim=1) for rank in range(WORLD)]
    with torch.no_grad():
        losses = [
            sharing.loss_of_one_process(
                model, sharing.converted(sharing.batch(rank, seed, torch.bfloat16), torch.float32), "token"
            )
            for rank in range(WORLD)
        ]
    return float(sum(losses)) / WORLD, gradients, routing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV to append to")
    parser.add_argument("--kind", choices=("lora", "full"), nargs="+", default=["lora"])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--width", type=int, choices=SHAPES, default=2880)
    parser.add_argument("--short", action="store_true", help="486 tokens instead of 4166")
    parser.add_argument(
        "--fused-oracle", action="store_true", help="float32 on this package's experts, which hold no merged weights"
    )
    args = parser.parse_args()
    sharing.CLIP, sharing.LENGTHS = 1e3, SHORT_LENGTHS if args.short else LENGTHS
    sharing.SHAPE = {**WIDE, "hidden_size": args.width, "intermediate_size": args.width, **SHAPES[args.width]}
    rows = Rows(args.out)
    for kind in args.kind:
        exact = sharing.plain_model(kind, torch.bfloat16, torch.float32)
        if args.fused_oracle:
            (exact.get_base_model() if kind == "lora" else exact).set_experts_implementation("gptoss_fused")
            fuse_expert_lora(exact)
        model = sharing.policy(kind, torch.bfloat16)
        if kind == "lora":
            fuse_expert_lora(model)
        sharing.train_sinks(model)
        model.train()
        for seed in range(args.seeds):
            loss32, gradients32, routing = oracle(exact, seed)
            for where in ROUTING:
                whole: dict[str, torch.Tensor] = {}
                for tokens in TOKENS:
                    start = time.perf_counter()
                    with computed(model, tokens):
                        loss, gradients, moved = gradients_of(model, seed, routing, where == "oracle")
                    whole = whole or gradients
                    errors, apart = relative(gradients, gradients32), relative(gradients, whole)
                    rows.add(
                        kind=kind, seed=seed, width=args.width, tokens_in_all=sum(map(sum, sum(sharing.LENGTHS, []))), routing=where, tokens=tokens,
                        error_all=f"{errors['all']:.3e}", error_sinks=f"{errors['sinks']:.3e}",
                        apart=f"{apart['all']:.3e}", loss_error=f"{abs(loss - loss32):.3e}",
                        moved="" if where == "oracle" else f"{moved:.3e}", seconds=round(time.perf_counter() - start, 2),
                    )  # fmt: skip
        del exact, model


if __name__ == "__main__":
    main()
