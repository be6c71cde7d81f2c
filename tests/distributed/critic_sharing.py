"""The critic of PPO on ranks that share sequences, against one process; run by torchrun, or by accelerate for ZeRO-3.

Arguments: a folder for `<cell>_<rank>.json`, then cells such as `fsdp2,4,separate,checkpointing,float64`, or one of
`WRONG` after `wrong,`. Each takes three optimizer steps of the critic through the trainer's own turns and value loss, on the
batches of `sharing.py`; the oracle is one process, one document at a time, on eager attention and experts, with a value loss
written out here, in float64.
"""

import contextlib
import functools
import json
import sys
from unittest import mock

import sharing
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from sharing import CLIP, DEEPSPEED, FOLDER, RANK, STEPS, TOKENIZER, WORLD, converted, difference, policy, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrong_sharing import summed_gradient, wrong

from trl_gptoss.parallelism import assert_sharded, shard_mesh, shard_model
from trl_gptoss.trainers import GptOssPPOConfig, GptOssPPOTrainer, critic_rows
from trl_gptoss.trainers.critic_optimizer import CriticOptimizer


class ExactHead(nn.Module):
    """The value head is float32 by design; this one has the type of the backbone, and does not begin at 0."""

    def __init__(self, size, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weight = nn.Parameter((torch.randn(size, generator=generator, dtype=torch.float64) / 10).to(dtype))
        self.bias = nn.Parameter(torch.tensor(0.1, dtype=dtype))

    def forward(self, hidden):
        return hidden @ self.weight + self.bias


def batch(rank, step, dtype):
    """That of the policy, with what the value loss reads."""
    inputs = sharing.batch(rank, step, dtype)
    generator = torch.Generator().manual_seed(1000 + 100 * step + rank)
    shape = inputs["completion_ids"].shape
    values, returns = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    return {**inputs, "old_values": values, "returns": returns, "policy_mask": mask, "value_mask": mask}


def fill(adapter):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(adapter.items()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 10)


def loss_of_one_process(values_of, inputs):
    """Sum over the tokens of the batch of half the larger squared error, with and without the bound."""
    width, total = inputs["prompt_ids"].shape[1], 0.0
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    for row, (prompt, completion) in enumerate(inputs["row_lengths"].tolist()):
        values = values_of(ids[row : row + 1, width - prompt : width + completion])[prompt - 1 : -1]
        old, returns, m = (inputs[n][row, :completion] for n in ("old_values", "returns", "value_mask"))
        near = torch.minimum(torch.maximum(values, old - CLIP), old + CLIP)
        total = total + (torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2 * m).sum()
    return total


@functools.cache
def one_process(kind, dtype):
    """Loss, gradients and parameters of every step: the numbers of `dtype` in float64 arithmetic."""
    model = policy("lora" if kind == "lora" else "full", dtype)
    if kind == "lora":
        model.set_attn_implementation("eager")
        model.get_base_model().set_experts_implementation("eager")
        adapter = {n: p for n, p in model.named_parameters() if ".default." in n}
        fill(adapter)
        decoder = model.get_base_model().model
    else:
        decoder = model.model
        decoder.set_attn_implementation("eager")
        decoder.set_experts_implementation("eager")
    model.to(torch.float64)
    head = ExactHead(decoder.config.hidden_size, dtype).to(torch.float64)
    named = {f"head.{n}": p for n, p in head.named_parameters()}
    if kind == "lora":
        named |= {n.replace(".default.", ".critic."): p for n, p in adapter.items()}
    else:
        named |= dict(decoder.named_parameters())
    optimizer, seen = optimizer_of(named), []
    tokens = [sum(int(batch(rank, step, dtype)["value_mask"].sum()) for rank in range(WORLD)) for step in range(STEPS)]
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [
            loss_of_one_process(lambda ids: head(decoder(ids).last_hidden_state)[0], converted(inputs, torch.float64))
            for inputs in (batch(rank, step, dtype) for rank in range(WORLD))
        ]
        (sum(losses) / tokens[step]).backward()
        grads = {n: p.grad.clone() for n, p in named.items()}
        optimizer.step()
        parameters = {n: p.detach().clone() for n, p in named.items()}
        seen.append((losses[RANK].item() / tokens[step] * WORLD, grads, parameters))
    return seen


def optimizer_of(named):
    return torch.optim.AdamW(named.values(), lr=1e-3, eps=1e-5, weight_decay=0.0)


def trainer_of(kind, size, checkpointing, dtype, budget):
    model = policy("lora" if kind == "lora" else "full", dtype)  # before the arguments, which start ZeRO-3
    args = GptOssPPOConfig(
        str(FOLDER / "run"),
        critic=kind,
        value_clip=CLIP,
        loss_normalization="token_mean",
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        adam_epsilon=1e-5,
        optim="adamw_torch",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=not DEEPSPEED,
        ddp_backend="gloo",
        report_to="none",
        save_strategy="no",
        padding_free=True,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        sequence_parallel_size=size,
        max_tokens_per_micro_batch=budget,
    )
    trainer = GptOssPPOTrainer(model, lambda **_: [], args, sharing.DATA, processing_class=TOKENIZER)
    critic = trainer.critic
    critic.head = critic.model.head = ExactHead(critic.head.weight.shape[0], dtype)
    if kind == "lora":
        fill(critic.adapter)
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    return trainer


def prepared(trainer, wrapper):
    """The critic's optimizer, which wraps or shards the backbone."""
    if wrapper == "zero3":
        sizes = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4 * WORLD, "gradient_accumulation_steps": 1}
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config.update(sizes, gradient_clipping=0.0)
        policy_optimizer = torch.optim.AdamW(trainer.model.parameters())  # the policy comes first, as in training
        trainer.model_wrapped, _ = trainer.accelerator.prepare(trainer.model, policy_optimizer)
    make = trainer._make_critic_optimizer
    if wrapper not in ("fsdp2", "hsdp"):
        return CriticOptimizer(trainer.critic, trainer.accelerator, trainer.args, make)
    assert_sharded(shard_model(trainer.critic.model.backbone, shard_mesh("cpu", 2 if wrapper == "hsdp" else 1)))
    with mock.patch.object(Accelerator, "prepare_model", lambda self, model, *args, **kwargs: model):
        return CriticOptimizer(trainer.critic, trainer.accelerator, trainer.args, make)


def of_the_critic(trainer, kind):
    named = dict(trainer.critic.local_parameters())
    return named if kind == "lora" else named | dict(trainer.critic.backbone.named_parameters())


def reader_of_gradients(trainer, kind, wrapper):
    """A dictionary that every step of an optimizer fills before it changes anything."""
    optimizer, grads = trainer._critic_optimizer, {}

    def read(*_):
        grads.update({n: whole(p.grad).clone() for n, p in of_the_critic(trainer, kind).items() if p.grad is not None})

    inner = [getattr(o, "optimizer", o) for o in optimizer.optimizers]
    if wrapper != "zero3":
        for one in inner:
            one.register_step_pre_hook(read)
        return grads
    import deepspeed

    inner[0].register_step_pre_hook(read)
    engine = trainer.critic.model.backbone
    step = engine.step

    def read_and_step(*args, **kwargs):
        grads.update({n: deepspeed.utils.safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters()})
        return step(*args, **kwargs)

    engine.step = read_and_step
    return grads


def parameters_of(trainer, kind, wrapper):
    if wrapper != "zero3":
        return {n: whole(p) for n, p in of_the_critic(trainer, kind).items()}
    import deepspeed

    local = dict(trainer.critic.local_parameters())
    backbone = trainer.critic.backbone.named_parameters()
    return local | {n: deepspeed.utils.safe_get_full_fp32_param(p).clone() for n, p in backbone}


def cell(wrapper, size, kind, checkpointing, dtype, budget=None):
    dtype = {"float64": torch.float64, "float32": torch.float32}[dtype]
    size, budget = int(size), None if budget is None else int(budget)
    oracle = one_process(kind, dtype)  # first: ZeRO-3 makes every model of shards
    trainer = trainer_of(kind, size, checkpointing == "checkpointing", dtype, budget)
    trainer._critic_optimizer = prepared(trainer, wrapper)
    if kind == "separate" and wrapper == "ddp":
        assert isinstance(trainer.critic.model.backbone, DistributedDataParallel)
    grads = reader_of_gradients(trainer, kind, wrapper)
    worst = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}
    for step, (loss, expected, parameters) in enumerate(oracle):
        inputs = batch(RANK, step, dtype)
        grads.clear()
        trainer._normalizers = (None, trainer._count([inputs], "value_mask"))
        trainer._metrics["train"].clear()
        trainer._train_critic(trainer.model, inputs, last=True)
        trainer._critic_step()
        [ours] = trainer._metrics["train"]["value_loss"]  # the mean of the ranks
        mean = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(mean)
        worst["loss"] = max(worst["loss"], abs(ours / (mean.item() / WORLD) - 1))  # logged in float32
        worst["gradients"] = max(worst["gradients"], difference(grads, expected))
        ours = parameters_of(trainer, kind, wrapper)
        worst["parameters"] = max(worst["parameters"], difference(ours, parameters, relative=False))
    worst["tensors"], worst["world"] = len(expected), dist.get_world_size()
    worst["group"] = trainer._sequence_group.size
    return worst


WRONG = {
    "none": contextlib.nullcontext,
    "first_sinks": lambda: wrong("first_sinks"),
    "summed_gradient": lambda: mock.patch.object(critic_rows, "gather_tokens", summed_gradient.apply),
    "own_tokens": lambda: mock.patch.object(GptOssPPOTrainer, "_sum_over_ranks", lambda self, counts: counts * WORLD),
}


def wrong_cell(name):
    """How far a wrong variant is off; "none" is the control."""
    with WRONG[name]():
        return cell("ddp", 2, "separate", "plain", "float64")


if __name__ == "__main__":
    if not DEEPSPEED:
        PartialState(cpu=True)
    for what in sys.argv[2:]:
        first, *rest = what.split(",")
        seen = wrong_cell(*rest) if first == "wrong" else cell(first, *rest)
        (FOLDER / f"{what}_{RANK}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
