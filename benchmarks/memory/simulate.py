"""Peak memory of one train step of GPT-OSS, without a GPU: the oracle of `trl_gptoss.memory`.

    python simulate.py --tokens 32768 --layers 24 --method lora
    python simulate.py --grid --out simulated.csv             # a few minutes

The real model, PEFT and TRL's fused head run forward and backward on meta tensors, and every allocation is counted
(rounded up to 512 bytes, as CUDA's caching allocator does). The kernels themselves are replaced by functions that make
the same temporary buffers and compute nothing, so a step of the 20B takes seconds. What this cannot see: fragmentation,
the workspaces of cuBLAS, and buffers inside somebody else's kernels (FlashAttention's dq accumulator is modelled).
"""

import argparse
import csv
import sys
import weakref
from collections import Counter
from datetime import date
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import torch
import torch._dynamo  # before triton is faked: it looks for triton when it is imported
from peft import LoraConfig, get_peft_model
from stamp import commit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from trl.kernels import chunked_logprob
from trl.trainer import utils as trainer_utils
from trl.trainer.utils import add_fused_lm_head

import trl_gptoss  # noqa: F401  (registers sink_fa3 and gptoss_fused)
from trl_gptoss.attention import ops
from trl_gptoss.experts import function, fuse_expert_lora
from trl_gptoss.memory import ModelShape, TrainSetup, predict_memory

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class LiveBytes(TorchDispatchMode):
    """Bytes of all live storages: `now`, `peak`, and which storages were alive at the peak (`at_peak`)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.known, self.now, self.peak = WeakIdKeyDictionary(), 0, 0
        self.at_start, self.at_peak = Counter(), Counter()
        for tensor in (*model.parameters(), *model.buffers()):
            self._see(tensor)
        self.static, self.at_start = self.now, Counter(self.known.values())

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self.known:
            return
        size = -(-storage.nbytes() // 512) * 512
        self.known[storage] = size
        self.now += size
        weakref.finalize(storage, self._drop, size)
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, Counter(self.known.values()) - self.at_start

    def _drop(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return out


def fake_attention() -> None:
    """sink_fa3's forward and backward as the Hopper backend allocates: dq in fp32 until it is rounded."""

    def forward(backend, q, k, v, *rest):
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def backward(backend, dout, q, k, v, out, lse, *rest):
        rows = torch.empty_like(lse), torch.empty_like(lse)  # noqa: F841
        wide = q.new_empty(q.shape, dtype=torch.float32)  # noqa: F841
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), lse.new_empty(q.shape[1])

    def eager(q, k, v, sinks, *settings):  # as on a GPU, where tensors are real
        return ops._EagerSinkAttention.apply(q, k, v, sinks, settings)

    ops.calls = SimpleNamespace(forward=forward, backward=backward)
    ops.backends = SimpleNamespace(choose=lambda q: SimpleNamespace(SINKS_AS_THEY_ARE=True))
    ops.sink_attention_op = eager


def fake_experts() -> None:
    """gptoss_fused's CUDA path, whose allocations are real, with launches that do nothing."""
    names = (
        "triton",
        "triton.language",
        "triton.tools",
        "triton.tools.ragged_tma",
        "triton.tools.tensor_descriptor",
        "triton.runtime",
    )
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names}):
        from trl_gptoss.experts import cuda_path

    def sort(index, experts):
        return index.new_empty(index.numel(), dtype=torch.int32), index.new_empty(experts + 1, dtype=torch.int32)

    def gate(gate_up, d_hidden, order, *rest, need_bias, need_hidden):
        tiles = gate_up.shape[0] // 64 if need_bias else 1
        return gate_up.new_empty(order.numel(), dtype=torch.float32), gate_up.new_empty(
            tiles, gate_up.shape[1], dtype=torch.float32
        )

    for name in ("grouped_gemm", "combine", "gather_rows", "grouped_wgrad", "sum_tiles"):
        setattr(cuda_path, name, lambda *args, **kwargs: None)
    cuda_path.sort_by_expert, cuda_path.gate_backward = sort, gate
    cuda_path.tile_config = lambda *args: SimpleNamespace(presort=False)
    cuda_path.router_gradient = lambda dots, grad, bias, index, dtype: index.new_empty(index.shape, dtype=dtype)
    function._path = lambda x: cuda_path


class FakeNorm(torch.autograd.Function):
    """liger-kernel's RMSNorm, out of place: keeps its input and one fp32 value per row."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


def fake_elementwise(model: torch.nn.Module) -> None:
    for norm in model.modules():
        if isinstance(norm, GptOssRMSNorm):
            norm.forward = lambda x, norm=norm: FakeNorm.apply(x, norm.weight)


def fake_head() -> None:
    """TRL's fused head as on a GPU: it scores a copy of the rows that have a label, and folds every tile in place."""
    exact = trainer_utils._ChunkedLogProbFunction.apply
    trainer_utils._ChunkedLogProbFunction = SimpleNamespace(apply=lambda hidden, *rest: exact(hidden.clone(), *rest))
    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        setattr(chunked_logprob, name, lambda *args, **kwargs: None)


def build(args: argparse.Namespace) -> torch.nn.Module:
    config = GptOssConfig(num_hidden_layers=args.layers, num_local_experts=args.experts_count)
    if args.chunk:
        config.experts_token_chunk = args.chunk
    model = GptOssForCausalLM._from_config(
        config, dtype=torch.bfloat16, attn_implementation="sink_fa3", experts_implementation=args.experts
    )
    if not args.no_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if not args.naive_head:
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if args.method != "full":
        targets = EXPERTS if args.method == "lora+experts" else None
        lora = LoraConfig(r=args.rank, target_modules=ATTENTION, target_parameters=targets)
        with mock.patch.object(torch.nn.Module, "to", lambda self, *args, **kwargs: self):  # fake ones cannot move
            model = get_peft_model(model, lora)
        if targets:
            fuse_expert_lora(model)
    if args.fused_elementwise:
        fake_elementwise(model)
    return model.train()


def step(args: argparse.Namespace) -> dict[str, float]:
    tokens = args.tokens
    with FakeTensorMode():
        model = build(args)
        live = LiveBytes(model)
        ids, positions = torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens)[None]
        ends = torch.tensor([0, tokens], dtype=torch.int32)
        packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": tokens, "max_length_k": tokens}
        with live, torch.autocast("cpu", torch.bfloat16, enabled=not args.no_autocast):
            head = {} if args.naive_head else {"fused_lm_head": True}
            for _ in range(2):  # in the second pass the gradients of the first are there
                out = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False, **packed, **head)
                forward, live.peak = live.peak, live.now
                out.loss.backward()
                del out
    if args.show:
        for size, count in sorted(live.at_peak.items(), key=lambda item: -item[0] * item[1])[:14]:
            print(f"    {size / tokens:12.1f} B/token x {count:4d} = {size * count / 2**20:9.1f} MiB")
    above = [(peak - live.static) / 2**20 for peak in (forward, live.peak)]
    return {"weights_mib": live.static / 2**20, "forward_mib": above[0], "backward_mib": above[1]}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--method", choices=["lora", "lora+experts", "full"], default="lora")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--experts", default="gptoss_fused")
    parser.add_argument("--experts-count", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=0)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--naive-head", action="store_true")
    parser.add_argument("--no-autocast", action="store_true")
    parser.add_argument("--fused-elementwise", action="store_true")
    parser.add_argument("--grid", action="store_true", help="all settings of GRID instead")
    parser.add_argument("--out", help="CSV file")
    parser.add_argument("--show", action="store_true", help="the largest storages alive at the peak")
    return parser


GRID = """
--layers 4
--layers 4 --tokens 8192
--layers 4 --chunk 8192
--layers 4 --experts grouped_mm
--layers 4 --method lora+experts
--layers 4 --method full
--layers 4 --method full --chunk 4096
--layers 4 --method full --experts grouped_mm
--layers 4 --fused-elementwise
--layers 4 --fused-elementwise --chunk 8192
--layers 4 --fused-elementwise --method full
--layers 4 --no-checkpointing
--layers 4 --no-checkpointing --chunk 8192
--layers 4 --no-checkpointing --experts grouped_mm
--layers 4 --naive-head
--layers 4 --experts-count 128
--layers 24 --tokens 131072
--layers 24 --tokens 131072 --chunk 16384 --fused-elementwise
--layers 24 --tokens 24576 --experts grouped_mm
""".strip().splitlines()


def predicted_mib(args: argparse.Namespace) -> float:
    """What `trl_gptoss.memory` says, without the states of an optimizer."""
    config = GptOssConfig(num_hidden_layers=args.layers, num_local_experts=args.experts_count)
    setup = TrainSetup(
        tokens=args.tokens, method="full" if args.method == "full" else "lora", lora_rank=args.rank,
        lora_experts=args.method == "lora+experts", activation_checkpointing=not args.no_checkpointing,
        experts_implementation=args.experts, experts_token_chunk=args.chunk, fused_head=not args.naive_head,
        fused_elementwise=args.fused_elementwise, optimizer_bytes=0,
    )  # fmt: skip
    return predict_memory(ModelShape.from_config(config), setup).total / 2**20


def main() -> None:
    fake_attention()
    fake_experts()
    fake_head()
    chosen = parser().parse_args()
    file = Path(chosen.out).open("w", newline="") if chosen.out else None
    if file:
        csv.writer(file).writerow(["settings", "weights_mib", "simulated_mib", "predicted_mib", "error", *versions()])
    for line in GRID if chosen.grid else [" ".join(sys.argv[1:])]:
        args = parser().parse_args(line.split())
        found = step(args)
        total, predicted = found["weights_mib"] + found["backward_mib"], predicted_mib(args)
        row = [line, round(found["weights_mib"]), round(total), round(predicted), f"{predicted / total - 1:+.4f}"]
        print(*row, sep=", ", flush=True)
        if file:
            csv.writer(file).writerow([*row, *versions().values()])
            file.flush()


def versions() -> dict[str, str]:
    found = {name: metadata.version(name) for name in ("torch", "transformers", "trl", "peft")}
    return {**found, "commit": commit(), "date": date.today().isoformat()}


if __name__ == "__main__":
    main()
