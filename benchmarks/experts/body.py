"""The body of GPT-OSS-20B with random weights: forward and backward with LoRA on attention and checkpointing.

    python body.py flash_attention_4+grouped_mm sink_fa3+gptoss_fused sink_fa3+gptoss_fused+elementwise
    python body.py --lora-experts flash_attention_4+grouped_mm+peft sink_fa3+gptoss_fused

A variant is ATTENTION+EXPERTS, with `+elementwise` for `trl_gptoss.fused_elementwise`, `+chunk8192` for tiles of 8192
tokens, and, with adapters on the experts, `+peft` for PEFT's own path instead of `fuse_expert_lora`. A size is
TOKENSxSEQUENCES: one packed row, cut by position_ids. After a warm-up of every variant the variants take turns, so that
a hot GPU slows all of them alike. Seconds are the best of the repeats.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import ParamWrapper
from rows import Rows
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

import trl_gptoss
from trl_gptoss.experts import fuse_expert_lora, set_experts_token_chunk

GIB = 2**30
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Variant(NamedTuple):
    attention: str
    experts: str
    elementwise: bool
    peft: bool
    chunk: int | None

    @classmethod
    def parse(cls, text: str) -> "Variant":
        attention, experts, *rest = text.split("+")
        chunk = [int(part.removeprefix("chunk")) for part in rest if part.startswith("chunk")]
        unknown = [part for part in rest if part not in ("elementwise", "peft") and not part.startswith("chunk")]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown part {unknown[0]!r} of {text!r}")
        return cls(attention, experts, "elementwise" in rest, "peft" in rest, chunk[0] if chunk else None)


class Body:
    """The model, switched between variants."""

    def __init__(self, layers: int, lora_experts: bool) -> None:
        config = GptOssConfig(num_hidden_layers=layers, num_local_experts=32)
        with torch.device("cuda"):
            model = GptOssForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        lora = LoraConfig(
            r=16, lora_alpha=32, target_modules=ATTENTION, target_parameters=EXPERTS if lora_experts else None
        )
        self.model = get_peft_model(model, lora).train()
        self.base = self.model.get_base_model()
        self.rotary = modeling_gpt_oss.apply_rotary_pos_emb
        self.wrappers = [module for module in self.model.modules() if isinstance(module, ParamWrapper)]

    def use(self, variant: Variant) -> None:
        self.base.set_attn_implementation(variant.attention)
        self.base.set_experts_implementation(variant.experts)
        set_experts_token_chunk(self.base, variant.chunk)
        modeling_gpt_oss.apply_rotary_pos_emb = self.rotary
        for module in self.model.modules():
            if isinstance(module, GptOssRMSNorm):
                module.__class__ = GptOssRMSNorm
        if variant.elementwise:
            trl_gptoss.fused_elementwise(self.model)
        for wrapper in self.wrappers:
            wrapper.__class__ = ParamWrapper
        if self.wrappers and not variant.peft:
            fuse_expert_lora(self.model)

    def seconds(self, ids: torch.Tensor, positions: torch.Tensor) -> float:
        self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        hidden = self.base.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        hidden.backward(torch.full_like(hidden, 1e-4))
        torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(body: Body, rows: Rows, variants: list[Variant], size: str, args: argparse.Namespace) -> None:
    tokens, sequences = map(int, size.split("x"))
    inputs = (
        torch.randint(0, 200000, (1, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(0)),
        torch.arange(tokens // sequences, device="cuda").repeat(sequences)[None],
    )
    peaks = {}
    for variant in variants:
        body.use(variant)
        body.seconds(*inputs)  # compiles
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        body.seconds(*inputs)
        peaks[variant] = torch.cuda.max_memory_allocated() / GIB
    taken = {variant: [] for variant in variants}
    for _ in range(args.repeats):
        for variant in variants:
            body.use(variant)
            taken[variant].append(body.seconds(*inputs))
    for variant in variants:
        best = min(taken[variant])
        rows.add(
            attention=variant.attention, experts=variant.experts, fused_elementwise=variant.elementwise,
            lora_experts=("peft" if variant.peft else "fused") if args.lora_experts else False,
            token_chunk=variant.chunk or "", layers=args.layers, tokens=tokens, sequences=sequences,
            seconds=round(best, 4), median_seconds=round(statistics.median(taken[variant]), 4), repeats=args.repeats,
            tokens_per_s=round(tokens / best), peak_gib=round(peaks[variant], 1),
            speedup=round(min(taken[variants[0]]) / best, 3),
        )  # fmt: skip
    if args.profile:
        body.use(variants[-1])
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            body.seconds(*inputs)
        table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=70, max_name_column_width=110)
        args.profile.write_text(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "variants", nargs="+", type=Variant.parse, help="the first is the one the others are set against"
    )
    parser.add_argument("--sizes", nargs="+", default=["32768x1"])
    parser.add_argument("--lora-experts", action="store_true", help="adapters on the experts too")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="file for the kernels of one step of the last variant")
    parser.add_argument("--out", type=Path, default=Path("body.csv"))
    args = parser.parse_args()
    rows = Rows(args.out)
    body = Body(args.layers, args.lora_experts)
    for size in args.sizes:
        measure(body, rows, args.variants, size, args)


if __name__ == "__main__":
    main()
