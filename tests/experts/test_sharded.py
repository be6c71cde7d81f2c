"""`gptoss_fused` under FSDP2 and ZeRO-3 and with DTensor parameters: two gloo processes against one."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import GptOssConfig, GptOssForCausalLM

import trl_gptoss  # noqa: F401  registers the implementation
from trl_gptoss.experts import torch_path

WORLD = 2


def tiny_model(implementation: str) -> GptOssForCausalLM:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
    )
    return GptOssForCausalLM._from_config(config, dtype=torch.float64, experts_implementation=implementation)


def batch() -> torch.Tensor:
    return torch.randint(0, 32, (WORLD, 9), generator=torch.Generator().manual_seed(1))


@contextmanager
def one_second_product_per_layer() -> Iterator[None]:
    calls, original = [], torch_path.from_hidden
    torch_path.from_hidden = lambda *arguments: calls.append(1) or original(*arguments)
    yield
    torch_path.from_hidden = original
    assert len(calls) == 2


def fsdp(rank: int, checkpointing: bool) -> None:
    model = tiny_model("gptoss_fused")
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh("cpu", (WORLD,))  # by default FSDP takes a GPU where there is one, which gloo cannot serve
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = batch()[rank : rank + 1]
    with one_second_product_per_layer():
        model(ids, labels=ids).loss.backward()
    alone = tiny_model("eager")
    alone(batch(), labels=batch()).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


def sharded_parameters(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    experts, alone = (tiny_model(name).model.layers[0].mlp.experts for name in ("gptoss_fused", "eager"))
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 16, generator=generator, dtype=torch.float64)
    weight = torch.rand(6, 2, generator=generator, dtype=torch.float64)
    index = torch.randint(0, 4, (6, 2), generator=generator)
    out, expected = experts(x, index, weight), alone(x, index, weight)
    torch.testing.assert_close(out, expected)
    out.sum().backward(), expected.sum().backward()
    for ours, theirs in zip(experts.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def zero3(rank: int, store: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"  # read at the import; gloo cannot serve a GPU
    import deepspeed

    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    deepspeed.init_distributed("gloo")
    alone, model = tiny_model("eager").float(), tiny_model("gptoss_fused").float().train()
    alone(batch(), labels=batch()).loss.backward()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    ids = batch()[rank : rank + 1]
    with one_second_product_per_layer():
        engine.backward(engine(ids, labels=ids).loss)
    for (name, ours), theirs in zip(engine.module.named_parameters(), alone.parameters(), strict=True):
        found = deepspeed.utils.safe_get_full_grad(ours)
        torch.testing.assert_close(found, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
    dist.destroy_process_group()


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for checkpointing in (False, True):
        fsdp(rank, checkpointing)
    sharded_parameters(rank)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (os.path.join(folder, "store"),), nprocs=WORLD)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra `deepspeed`")
def test_zero3_with_checkpointing() -> None:
    """DeepSpeed compiles an operator at its first start, for minutes; set TORCH_EXTENSIONS_DIR to keep it."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(zero3, (os.path.join(folder, "store"),), nprocs=WORLD)
