"""The body of GPT-OSS-20B with random weights: forward and backward with LoRA on attention and checkpointing.

    python body.py --attention flash_attention_4 sink_fa3 --experts grouped_mm gptoss_fused --sizes 32768x1 32768x8
    python body.py --attention sink_fa3 --experts gptoss_fused --fused-elementwise --lora-experts

A size is TOKENSxSEQUENCES: one packed row, cut by position_ids. Seconds are the best of `--repeats` after a warm-up.
"""

import argparse
import gc
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from rows import Rows
from transformers import GptOssConfig, GptOssForCausalLM

import trl_gptoss
from trl_gptoss.experts import fuse_expert_lora

GIB = 2**30
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def build(args: argparse.Namespace) -> torch.nn.Module:
    config = GptOssConfig(num_hidden_layers=args.layers, num_local_experts=32)
    with torch.device("cuda"):
        model = GptOssForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(
        r=16, lora_alpha=32, target_modules=ATTENTION, target_parameters=EXPERTS if args.lora_experts else None
    )
    return get_peft_model(model, lora).train()


def step_seconds(body: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    hidden = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    hidden.backward(torch.full_like(hidden, 1e-4))
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=["sink_fa3"])
    parser.add_argument("--experts", nargs="+", default=["gptoss_fused"])
    parser.add_argument("--sizes", nargs="+", default=["32768x1"])
    parser.add_argument(
        "--fused-elementwise", action="store_true", help="run the last, with trl_gptoss.fused_elementwise"
    )
    parser.add_argument("--lora-experts", action="store_true", help="adapters on the experts too")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("body.csv"))
    args = parser.parse_args()
    rows = Rows(args.out)
    model = build(args)
    if args.lora_experts:
        fuse_expert_lora(model)
    base = model.get_base_model()
    for elementwise in (False, True) if args.fused_elementwise else (False,):
        if elementwise:
            trl_gptoss.fused_elementwise(model)
        for attention in args.attention:
            for experts in args.experts:
                base.set_attn_implementation(attention)
                base.set_experts_implementation(experts)
                for size in args.sizes:
                    tokens, sequences = map(int, size.split("x"))
                    gc.collect()
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    ids = torch.randint(0, 200000, (1, tokens), device="cuda")
                    positions = torch.arange(tokens // sequences, device="cuda").repeat(sequences)[None]
                    seconds = []
                    for _ in range(args.repeats + 1):
                        model.zero_grad(set_to_none=True)
                        seconds.append(step_seconds(base.model, ids, positions))
                    best = min(seconds[1:])
                    rows.add(
                        attention=attention, experts=experts, fused_elementwise=elementwise,
                        lora_experts=args.lora_experts, layers=args.layers, tokens=tokens, sequences=sequences,
                        seconds=round(best, 4), tokens_per_s=round(tokens / best),
                        peak_gib=round(torch.cuda.max_memory_allocated() / GIB, 1),
                    )  # fmt: skip


if __name__ == "__main__":
    main()
