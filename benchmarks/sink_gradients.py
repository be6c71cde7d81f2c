"""What each attention implementation of transformers does to the sinks of a GPT-OSS: gradient and packed batches.

    python benchmarks/sink_gradients.py [--device cuda] [--csv benchmarks/sink_gradients_cpu.csv]

Every row is one implementation in one dtype. The yardstick is eager attention in float64, one sequence at a time. `padded` and
`packed` are relative errors of the logits; `dsinks` is the relative error of the gradient of all sinks on the padded batch (1.0
or "None": no gradient, the sinks stay frozen); "refused" carries the error's first words.
"""

import argparse
import copy
import csv

import torch
from transformers import GptOssConfig, GptOssForCausalLM

import trl_gptoss

LENGTHS = (40, 1, 77)
STOCK = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def make_model() -> GptOssForCausalLM:
    """Two layers (window 32, full), sinks of visible size, every expert used so that no router can flip."""
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        intermediate_size=64, num_local_experts=2, num_experts_per_tok=2, vocab_size=97, sliding_window=32,
        pad_token_id=0, initializer_range=0.15, attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    model = GptOssForCausalLM(config).double().eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(0.5, 1.5)
    return model


def loss(logits: list[torch.Tensor]) -> torch.Tensor:
    """Its gradient differs from token to token."""
    return sum(
        (x.double().square() * torch.linspace(0.5, 1.5, x.numel(), device=x.device).view_as(x)).mean() for x in logits
    )


def distance(ours: torch.Tensor, exact: torch.Tensor) -> str:
    return f"{float((ours.detach().double().cpu() - exact).norm() / exact.norm()):.1e}"


def sink_gradients(model: GptOssForCausalLM) -> torch.Tensor | None:
    grads = [layer.self_attn.sinks.grad for layer in model.model.layers]
    return None if any(grad is None for grad in grads) else torch.cat(grads)


def measure(
    row: dict, model: GptOssForCausalLM, sequences: list[torch.Tensor], exact: torch.Tensor, exact_grads: torch.Tensor
) -> None:
    """Errors of one implementation, into `row` as they come: what is refused late leaves the ones before it."""
    device = model.device
    longest = max(LENGTHS)
    ids = torch.stack([torch.nn.functional.pad(x, (longest - len(x), 0)) for x in sequences]).to(device)
    mask = torch.stack([torch.arange(longest) >= longest - len(x) for x in sequences]).long().to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    rows = [row[keep.bool()] for row, keep in zip(logits, mask)]
    row["padded"] = distance(torch.cat(rows), exact)
    loss(rows).backward()
    grads = sink_gradients(model)
    row["dsinks"] = "None" if grads is None else distance(grads, exact_grads)
    packed = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device)
    with torch.no_grad():
        logits = model(input_ids=torch.cat(sequences)[None].to(device), position_ids=packed, use_cache=False).logits[0]
    row["packed"] = distance(logits, exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--csv")
    args = parser.parse_args()
    oracle = make_model()
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(1, 97, (n,), generator=generator) for n in LENGTHS]
    logits = [oracle(input_ids=x[None], use_cache=False).logits[0] for x in sequences]
    loss(logits).backward()
    exact, exact_grads = torch.cat(logits).detach(), sink_gradients(oracle)
    rows = []
    for name in (trl_gptoss.attention.NAME, *STOCK):
        for dtype in (torch.float32, torch.bfloat16):
            row = dict(
                implementation=name,
                dtype=str(dtype).removeprefix("torch."),
                device=args.device,
                torch=torch.__version__,
            )
            try:
                model = copy.deepcopy(oracle).to(args.device, dtype)
                model.zero_grad()
                model.set_attn_implementation(name)
                measure(row, model, sequences, exact, exact_grads)
            except (ImportError, ValueError, RuntimeError, NotImplementedError, OSError, AssertionError) as error:
                row["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
            rows.append(row)
            print(row, flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            fields = ["implementation", "dtype", "padded", "dsinks", "packed", "refused", "device", "torch"]
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
