"""Ranks that share sequences, against one process; run by torchrun.

Arguments: a folder for `<cell>_<rank>.json`, then cells such as `ddp,2,full,checkpointing,float64` or `wrong,first_sinks`
(see `wrong_sharing.py`). Each takes three
optimizer steps through the trainer's own loss; the oracle runs the same on one process, one document at a time, with
transformers' eager attention and experts and a loss written out here, always in float64: what a float32 run differs by is
its own rounding.

`benchmarks/multi_gpu/agreement.py` takes parts of this file to GPUs, with other SHAPE, LENGTHS and CLIP.
"""

import contextlib
import functools
import json
import os
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny_policy import byte_tokenizer, tiny_model
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trl.trainer.utils import FusedCausalLMOutput
from wrong_sharing import wrong

from trl_gptoss.parallelism import (
    assert_sharded,
    full_state_dict,
    load_full_state_dict,
    load_sharded,
    save_sharded,
    shard_mesh,
    shard_model,
)
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer

torch.set_num_threads(1)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[1])
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED" in os.environ
TOKENIZER = byte_tokenizer()
DATA = Dataset.from_list([{"prompt": [{"role": "user", "content": "say"}]}] * 64)
BETA, CLIP, STEPS = 0.1, 0.2, 3
SHAPE: dict = {}  # of the model, where it is not that of `tiny_model`
# (prompt, completion) tokens per row of each rank: 34, 18, 48 and 45 tokens, and a rank without any token to train on
LENGTHS = ([(5, 9), (17, 3)], [(3, 12), (2, 1)], [(40, 0), (8, 0)], [(8, 30), (1, 6)])


def batch(rank, step, dtype):
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = LENGTHS[rank]
    sizes = torch.tensor(lengths)
    prompt_width, width = (max(column) for column in zip(*lengths))
    width = max(width, 1)
    prompt, completion = (torch.arange(n).expand(len(lengths), n) for n in (prompt_width, width))
    shape = completion.shape

    def rand():
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {
        "prompt_ids": torch.randint(0, 256, prompt.shape, generator=generator),
        "completion_ids": torch.randint(0, 256, shape, generator=generator),
        "prompt_mask": (prompt >= prompt_width - sizes[:, :1]).long(),
        "completion_mask": (completion < sizes[:, 1:]).long(),
        "tool_mask": (rand() < 0.8).long(),
        "advantages": torch.randn(len(lengths), generator=generator, dtype=torch.float64).to(dtype),
        "old_per_token_logps": -5.5 - rand() / 2,
        "ref_per_token_logps": -5.5 - rand() / 2,
        "num_items_in_batch": torch.tensor(sum(c for rows in LENGTHS for _, c in rows)),
    }
    return {**{name: x.to(DEVICE) for name, x in tensors.items()}, "row_lengths": sizes}


def policy(kind, dtype):
    implementations = {"attn_implementation": "sink_fa3", "experts_implementation": "gptoss_fused"}
    with DEVICE:
        model = tiny_model(dtype=dtype, **implementations, **SHAPE)
    if kind == "full":
        return model
    torch.manual_seed(1)
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def train_sinks(model):
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.requires_grad_(True)


def exact_head(model):
    """TRL's fused head keeps its sums in float32; this one has the type of the model."""

    def forward(self, *args, fused_lm_head=False, shift_labels=None, **kwargs):
        assert fused_lm_head
        logps = self.lm_head(self.model(*args, **kwargs).last_hidden_state).log_softmax(-1)
        scored = shift_labels >= 0
        taken = logps.gather(-1, shift_labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        return FusedCausalLMOutput(log_probs=taken * scored, entropy=entropy * scored)

    model.forward = types.MethodType(forward, model)


def loss_of_one_process(model, inputs, level):
    """The clipped surrogate with a KL term, mean of tokens of a row, mean of rows; one document at a time."""
    width = inputs["prompt_ids"].shape[1]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    total = 0.0
    for row, (prompt, completion) in enumerate(inputs["row_lengths"].tolist()):
        own = ids[row : row + 1, width - prompt : width + completion]
        logps = model(input_ids=own).logits[0, prompt - 1 : -1].log_softmax(-1)
        logps = logps.gather(-1, own[0, prompt:].unsqueeze(-1)).squeeze(-1)
        old, ref, m = (
            inputs[n][row, :completion] for n in ("old_per_token_logps", "ref_per_token_logps", "tool_mask")
        )
        log_ratio = logps - old
        if level == "sequence":
            log_ratio = ((log_ratio * m).sum() / m.sum().clamp(min=1)).expand_as(logps)
        ratio, advantage = log_ratio.exp(), inputs["advantages"][row]
        token = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        token = token + BETA * ((ref - logps).exp() - (ref - logps) - 1)
        total = total + (token * m).sum() / mask[row].sum().clamp(min=1)
    return total / len(ids)


def trainer_of(model, size, checkpointing, level, **settings):
    args = GptOssGRPOConfig(
        str(FOLDER / "run"),
        per_device_train_batch_size=4,
        num_generations=4,
        bf16=False,
        use_cpu=not (DEEPSPEED or ON_GPU),  # asked for the CPU, Accelerate leaves DeepSpeed out without a word
        ddp_backend="nccl" if ON_GPU else "gloo",
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        sequence_parallel_size=size,
        on_policy="off",
        importance_sampling_level=level,
        loss_type="grpo",
        epsilon=CLIP,
        use_bias_correction_kl=False,
        **settings,
    )
    trainer = GptOssGRPOTrainer(model, lambda **_: [], args, DATA, processing_class=TOKENIZER)
    trainer.beta = BETA
    trainer.current_gradient_accumulation_steps = 1
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    return trainer


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named(model):
    return {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}


def difference(ours, theirs, relative=True):
    """Largest error over all tensors, relative or absolute (parameters are about 0.1). Relative to the largest entry of the
    same tensor in float64; of any tensor in float32, where small ones hold nothing but the rounding of the large ones."""
    assert ours.keys() == theirs.keys()
    scale = {n: float(x.abs().max().clamp(min=1e-30)) for n, x in theirs.items()}
    if next(iter(ours.values())).dtype == torch.float32:
        scale = dict.fromkeys(scale, max(scale.values()))
    errors = {n: float((ours[n].detach() - x).abs().max()) for n, x in theirs.items()}
    return max(error / scale[n] if relative else error for n, error in errors.items())


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-5)


def converted(inputs, dtype):
    return {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}


@functools.cache
def one_process(kind, dtype, level, steps, batches=WORLD, arithmetic=torch.float64):
    """Loss, gradients and parameters of every step, for the mean over `batches` ranks. The numbers are those of `dtype`, and
    the arithmetic float64 unless asked for otherwise."""
    model = plain_model(kind, dtype, arithmetic)
    optimizer, seen = optimizer_of(model), []
    for step in range(steps):
        loss, grads = plain_gradients(model, dtype, level, step, batches)
        optimizer.step()
        seen.append((loss, grads, {n: p.detach().clone() for n, p in named(model).items()}))
    return seen


def plain_model(kind, dtype, arithmetic=torch.float64):
    """The policy with the numbers of `dtype`, on transformers' eager attention and experts."""
    model = policy(kind, dtype).to(arithmetic)
    (model.get_base_model() if kind == "lora" else model).set_attn_implementation("eager")
    (model.get_base_model() if kind == "lora" else model).set_experts_implementation("eager")
    train_sinks(model)
    return model


def plain_gradients(model, dtype, level, step, batches=WORLD):
    """This rank's loss, and the gradients of the mean over `batches` ranks, where the parameters of `model` are."""
    model.zero_grad()
    losses = [
        loss_of_one_process(model, converted(batch(rank, step, dtype), model.dtype), level) for rank in range(batches)
    ]
    (sum(losses) / batches).backward()
    return losses[RANK].item(), {n: p.grad.clone() for n, p in named(model).items()}


@torch.no_grad()
def put(parameters, model):
    for name, parameter in named(model).items():
        parameter.copy_(parameters[name])


def wrapped(wrapper, model, **sharding):
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = shard_mesh(DEVICE.type, replicas=2 if wrapper == "hsdp" else 1)
    model = shard_model(model, mesh, **sharding)
    assert_sharded(model)
    return model


def plain_step(model, optimizer, loss):
    loss.backward()
    grads = {n: whole(p.grad).clone() for n, p in named(model).items()}
    optimizer.step()
    optimizer.zero_grad()
    return grads


def plain_parameters(model):
    return {n: whole(p) for n, p in named(model).items()}


def zero3_engine(trainer, optimizer):
    assert str(trainer.accelerator.distributed_type).endswith("DEEPSPEED")
    sizes = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4 * WORLD, "gradient_accumulation_steps": 1}
    trainer.accelerator.state.deepspeed_plugin.deepspeed_config.update(sizes, gradient_clipping=0.0)
    model, optimizer = trainer.accelerator.prepare(trainer.model, optimizer)
    assert all(p.ds_tensor.numel() < p.ds_numel or p.ds_numel < WORLD for p in model.parameters())
    return model, optimizer


def zero3_step(engine, optimizer, loss):
    """What Accelerate's backward does, with a look at the gradients before the step."""
    import deepspeed

    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss, scale_wrt_gas=False)
    grads = {n: deepspeed.utils.safe_get_full_grad(p).clone() for n, p in named(engine).items()}
    engine.step()
    return grads


def zero3_parameters(engine):
    import deepspeed

    return {n: deepspeed.utils.safe_get_full_fp32_param(p).clone() for n, p in named(engine).items()}


def cell(wrapper, size, kind, checkpointing, dtype, level="token", head="exact", budget=None, steps=STEPS):
    dtype = {"float64": torch.float64, "float32": torch.float32}[dtype]
    size, budget = int(size), None if budget is None else int(budget)
    oracle = one_process(kind, dtype, level, steps)  # first: under ZeRO-3 every model is made of shards
    exact = plain_model(kind, dtype)
    settings = {"max_tokens_per_micro_batch": budget}
    trainer = trainer_of(policy(kind, dtype), size, checkpointing == "checkpointing", level, **settings)
    if head == "exact":
        exact_head(trainer._base_model)
    train_sinks(trainer.model)
    optimizer = optimizer_of(trainer.model)
    if wrapper == "zero3":
        model, optimizer = zero3_engine(trainer, optimizer)
        step_of, read = zero3_step, zero3_parameters
    else:
        model = wrapped(wrapper, trainer.model)
        optimizer = optimizer_of(model)
        step_of, read = plain_step, plain_parameters
    worst = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}
    for step, (loss, grads, parameters) in enumerate(oracle):
        if dtype == torch.float32:  # gradients where the optimizer's rounding has led, not where it has led the oracle
            put(read(model), exact)
            _, grads = plain_gradients(exact, dtype, level, step)
        model.train()
        inputs = batch(RANK, step, dtype)
        last = trainer.compute_loss(model, inputs)
        found = step_of(model, optimizer, last)
        ours = last.item() if trainer._reported_loss is None else trainer._reported_loss.item()
        worst["loss"] = max(worst["loss"], abs(ours - loss))
        worst["gradients"] = max(worst["gradients"], difference(found, grads))
        worst["parameters"] = max(worst["parameters"], difference(read(model), parameters, relative=False))
    worst["tensors"] = len(grads)
    worst["world"], worst["group"] = dist.get_world_size(), trainer._sequence_group.size if size > 1 else 1
    return worst


def resumed_cell(phase, size):
    """FSDP2: four ranks take two steps and save, fewer ranks load and take the third. Each rank owns its share of the
    four batches."""
    trainer = trainer_of(policy("lora", torch.float64), int(size), False, "token")
    exact_head(trainer._base_model)
    train_sinks(trainer.model)
    model = wrapped("fsdp2", trainer.model)
    optimizer = optimizer_of(model)
    if phase == "load":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)  # nothing but the checkpoint may be what goes on
        load_sharded(FOLDER / "sharded", model, optimizer)
    own = range(RANK * 4 // WORLD, (RANK + 1) * 4 // WORLD)
    trainer.current_gradient_accumulation_steps = len(own)  # by which TRL divides
    for step in (0, 1) if phase == "save" else (2,):
        model.train()
        for rank in own:
            trainer.compute_loss(model, batch(rank, step, torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if phase == "save":
        save_sharded(FOLDER / "sharded", model, optimizer)
        return {"world": WORLD}
    parameters = one_process("lora", torch.float64, "token", STEPS, batches=4)[-1][-1]
    # copies: on one process neither is, and what is filled in below would be in both
    whole_weights = {n: x.clone() for n, x in full_state_dict(model).items()}
    seen = {n: whole(p).detach().clone() for n, p in named(model).items()}
    same = RANK > 0 or all(bool((whole_weights[n] == x).all()) for n, x in seen.items())
    if RANK > 0:
        assert not whole_weights
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    load_full_state_dict(model, whole_weights)  # from rank 0 to all
    again = {n: whole(p) for n, p in named(model).items()}
    same = same and all(bool((again[n] == x).all()) for n, x in seen.items())
    return {"world": WORLD, "parameters": difference(seen, parameters, relative=False), "same": same}


def wrong_cell(name):
    """How far a wrong variant is off; "none" is the control."""
    with contextlib.nullcontext() if name == "none" else wrong(name):
        budget = 8 if "turn" in name else None
        return cell("ddp", 4, "full", "plain", "float64", steps=1, budget=budget)


if __name__ == "__main__":
    if not DEEPSPEED:
        PartialState(cpu=True)
    for what in sys.argv[2:]:
        first, *rest = what.split(",")
        run = {"wrong": wrong_cell, "resumed": resumed_cell}.get(first)
        seen = cell(first, *rest) if run is None else run(*rest)
        (FOLDER / f"{what}_{RANK}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
