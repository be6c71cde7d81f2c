"""An MXFP4 checkpoint of this package in vLLM: log-probs of fixed ids against transformers with the dequantised weights.

    python mxfp4_vllm.py [--device cuda] [--out mxfp4_vllm_h200.csv]

A random GPT-OSS of 4 layers and 8 experts. vLLM must be far nearer to the dequantised weights than to the unquantised ones:
that is the control. On a CPU vLLM 0.31 runs MXFP4 only with AMX; 0.26 does not need it.
"""

import argparse
import csv
import datetime
import os
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
import transformers
import vllm
from stamp import commit
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

from trl_gptoss import save_pretrained_mxfp4

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "vocab_size": 4096,
}
HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 32,
}
IDS = [[(7 * i * i + 13 * j * j + 3 * j) % 4000 + 9 for j in range(n)] for i, n in enumerate((17, 90, 200))]


def make(directory: Path) -> Path:
    """Save a random model unquantised (`bf16`) and in MXFP4 (`mxfp4`)."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **HEADS, bos_token_id=0, pad_token_id=1, eos_token_id=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre, width = (1, 0.1) if "norm" in name else (0.5, 1.5) if "sinks" in name else (0, 0.05)
            parameter.normal_(centre, width)
    model = model.to(torch.bfloat16)
    model.save_pretrained(directory / "bf16")
    return save_pretrained_mxfp4(model, directory / "mxfp4")


@torch.no_grad()
def reference(directory: Path, device: str, **kwargs: object) -> torch.Tensor:
    """Log-probs of the ids by transformers in float32."""
    model = GptOssForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", **kwargs)
    model = model.to(device).eval()
    found = []
    for ids in IDS:
        row = torch.tensor([ids], device=device)
        logps = model(row).logits.float().log_softmax(-1)
        found.append(logps[0, :-1].gather(-1, row[0, 1:, None])[:, 0].cpu())
    return torch.cat(found)


def engine(directory: Path, device: str) -> torch.Tensor:
    """Log-probs of the ids by vLLM."""
    # A GPU's memory is not measured: other processes may be using it, too.
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30} if device == "cuda" else {}
    llm = vllm.LLM(
        model=str(directory),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",  # vLLM 0.26 looks for flashinfer with the default
        **memory,
    )
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in IDS], sampling, use_tqdm=False)
    return torch.tensor(
        [out.prompt_logprobs[i][ids[i]].logprob for out, ids in zip(outputs, IDS) for i in range(1, len(ids))]
    )


def main() -> None:
    """Compare, print, append a row, fail if vLLM is not the dequantised model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make(Path(scratch))
        dequantised = reference(folder, args.device, quantization_config=Mxfp4Config(dequantize=True))
        unquantised = reference(Path(scratch) / "bf16", args.device)
        served = engine(folder, args.device)
    row = {
        "tokens": len(served),
        "mean_against_dequantised": f"{(served - dequantised).abs().mean():.4g}",
        "max_against_dequantised": f"{(served - dequantised).abs().max():.4g}",
        "mean_against_unquantised": f"{(served - unquantised).abs().mean():.4g}",
        "mean_dequantised_against_unquantised": f"{(dequantised - unquantised).abs().mean():.4g}",
        "vllm": vllm.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if args.out:
        new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, row, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
    if float(row["mean_against_dequantised"]) > 0.5 * float(row["mean_against_unquantised"]):
        raise SystemExit("vLLM's log-probs are not those of the dequantised weights")


if __name__ == "__main__":
    main()
