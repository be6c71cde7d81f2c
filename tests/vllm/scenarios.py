"""Run by a Python that has vLLM: `python scenarios.py FOLDER NAME`; what was seen goes to FOLDER/NAME_RANK.json.

A process of its own for each scenario: vLLM's engine cannot be taken down in a process that goes on.
"""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from cpu_settings import ON_CPU
from datasets import Dataset
from peft import LoraConfig
from tiny_policy import byte_tokenizer, tiny_model

from trl_gptoss import cli
from trl_gptoss.rollouts import Observation, SampleRequest, ToolCall
from trl_gptoss.rollouts.routed_experts import NOT_RECORDED
from trl_gptoss.rollouts.vllm import loading
from trl_gptoss.rollouts.vllm.engine import REPLAY_SCHEDULER, WORKER_EXTENSION, EngineUnavailable
from trl_gptoss.routing import capture_routing
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer, policy_weights
from trl_gptoss.trainers.checkpointing import last_complete_checkpoint
from trl_gptoss.trainers.sync_probe import StaleWeightsError

RANK = int(os.environ.get("RANK", "0"))
# vLLM's CPU kernels want sizes that are multiples of 32.
SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
# Routers that are nearly tied amplify bf16's rounding: less so with smaller weights.
INITIALIZER_RANGE = {"float32": 0.15, "bfloat16": 0.05}


def policy(dtype="float32"):
    """Random weights, sinks and biases that matter, and turns that end."""
    model = tiny_model(dtype=getattr(torch, dtype), initializer_range=INITIALIZER_RANGE[dtype], **SIZES)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.copy_(0.5 + torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def reward(completion_ids, **kwargs):
    """Something that ids differ in."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def trainer(folder, model=None, reward_funcs=reward, peft_config=None, **settings):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}], "number": i} for i in range(32)])
    settings = {
        **ON_CPU,
        "use_vllm": True,
        "vllm_max_model_length": 512,
        "vllm_importance_sampling_correction": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_steps": 6,
        "max_rollout_tokens": 24,
        "learning_rate": 1e-2,
        **settings,
    }
    return GptOssGRPOTrainer(
        model or policy(),
        reward_funcs,
        GptOssGRPOConfig(str(folder), **settings),
        data,
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
    )


def curves(run):
    return [{k: v for k, v in entry.items() if "probe" in k or "seconds" in k} for entry in run.state.log_history]


def train(folder, **settings):
    run = trainer(folder, **settings)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train()
    moved = sum(not torch.equal(before[name], p) for name, p in run.model.named_parameters())
    return {"logs": curves(run), "moved": moved, "tensors": len(before), "steps": run.state.global_step}


def colocate_float32(folder):
    return train(folder, vllm_mode="colocate")


def colocate_bfloat16(folder):
    return train(folder, vllm_mode="colocate", model=policy("bfloat16"))


def streamed(folder):
    """Requests that join while others are decoded get what they get in one batch; and a run whose mismatch is measured."""
    run = trainer(
        folder, vllm_mode="colocate", vllm_importance_sampling_correction=True, max_steps=2, max_rollout_tokens=40
    )
    engine, stream = run.weight_sync.engine, run._engine.backend
    run._sync_vllm_weights()
    prompts = [[5 + i, 9, 30 + i] * (1 + i) for i in range(6)]
    options = [replace(engine.sampling, seed=i) for i in range(6)]
    batch = [sample.ids for sample in engine.generate(prompts, [24] * 6, options)]
    seen, requests = {}, [SampleRequest(prompt=p, max_new_tokens=24, sampling=o) for p, o in zip(prompts, options)]
    polls = 0
    for key in range(3):
        stream.submit(key, requests[key])
    while stream.waiting:
        seen.update(stream.poll(0.0))
        polls += 1
        if 3 <= polls <= 5:  # in the middle of the others
            stream.submit(polls, requests[polls])
    for key in range(3):  # a batch that is broken off
        stream.submit(key, requests[key])
    stream.poll(0.0)
    left = [engine.llm.llm_engine.get_num_unfinished_requests(), engine.llm.reset_prefix_cache()]
    run.weight_sync.invalidate()
    run._sync_vllm_weights()
    left += [engine.llm.llm_engine.get_num_unfinished_requests(), engine.llm.reset_prefix_cache()]
    run.train()
    return {
        "stream": type(stream).__name__,
        "batch": batch,
        "streamed": [seen[key].ids for key in range(6)],
        "polls": polls,
        "left": left,
        "logs": [{k: v for k, v in e.items() if "rollout_correction" in k} for e in run.state.log_history],
    }


def replayed(folder, engine=None):
    """The trainer's forward takes the experts that the engine reports. vLLM 0.30 (0.31 reports none on CPU), so bfloat16."""
    run = trainer(
        folder,
        vllm_mode="colocate",
        model=policy("bfloat16"),
        router_replay="rollout",
        vllm_importance_sampling_correction=True,
        max_steps=3,
        vllm_engine_kwargs={"enable_prefix_caching": False, "scheduler_cls": None} if engine is None else engine,
    )
    other = other_experts(run)
    llm_engine, cached = run.weight_sync.engine.llm.llm_engine, [0]
    scheduler = type(llm_engine.engine_core.engine_core.scheduler).__name__
    step = llm_engine.step

    def stepped():
        outputs = step()
        cached[0] += sum(output.num_cached_tokens or 0 for output in outputs if output.finished)
        return outputs

    llm_engine.step = stepped
    run.train()
    seen = {"steps": run.state.global_step, "other": other, "logs": replay_logs(run), "cached": cached[0]}
    return {**seen, "scheduler": scheduler}


def other_experts(run):
    """Of every step: choices in which the training forward takes other experts than were reported, and all of them."""
    compute_loss, other = run.compute_loss, []

    def counted(model, inputs, *args, **kwargs):
        with capture_routing(run.model) as record:
            loss = compute_loss(model, inputs, *args, **kwargs)
        sampled = inputs["routed_experts"].flatten(0, 1).permute(1, 0, 2)  # (layers, tokens, k)
        recorded = sampled[..., 0] != NOT_RECORDED
        differs = (record.indices().sort(-1).values != sampled.sort(-1).values).any(-1) & recorded
        other.append([differs.sum().item(), recorded.sum().item()])
        return loss

    run.compute_loss = counted
    return other


def replay_logs(run):
    logged = ("router_replay/own_choice_differs", "rollout_correction/kl_k3")
    return [{k: v for k, v in entry.items() if k in logged or "probe" in k} for entry in run.state.log_history]


def replayed_with_prefix_cache(folder):
    """Rollouts of a group take their common prompt from the cache: its experts have to come from there, too."""
    return replayed(folder, {"block_size": 32})  # a block is shorter than the prompts


# ---- planted faults ----


def forget(engine, *parts):
    """A sync that sends the former values of all tensors whose names contain one of `parts`; undone by calling it."""
    load, former = engine.load, {}

    def stale(weights, policy_version):
        def stream():
            for name, tensor in weights:
                if any(part in name for part in parts):
                    tensor = former.setdefault(name, tensor.clone())
                yield name, tensor

        load(stream(), policy_version)

    engine.load = stale

    def undo():
        engine.load = load

    return undo


def forget_one_expert(engine, name, expert):
    load, former = engine.load, {}

    def stale(weights, policy_version):
        def stream():
            for n, tensor in weights:
                if n == name:
                    old = former.setdefault(n, tensor[expert].clone())
                    tensor = tensor.clone()
                    tensor[expert] = old
                yield n, tensor

        load(stream(), policy_version)

    engine.load = stale

    def undo():
        engine.load = load

    return undo


def shake(model, scale):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))


def verdict(sync, step):
    try:
        sync.sync(step)
    except StaleWeightsError as error:
        return str(error)
    return "passed"


def planted(folder):
    """A run whose sync forgets the sinks is stopped in its second step; then other faults, with small changes."""
    run = trainer(folder, vllm_mode="colocate")
    sync, engine = run.weight_sync, run.weight_sync.engine
    undo = forget(engine, ".sinks")
    seen = {}
    try:
        run.train()
    except StaleWeightsError as error:
        seen["run"] = [run.state.global_step, str(error)]
    undo()
    seen["healed"] = verdict(sync, 10)
    faults = {
        "sinks": lambda: forget(engine, ".sinks"),
        "expert": lambda: forget_one_expert(engine, "model.layers.1.mlp.experts.gate_up_proj", 2),
        "router_bias": lambda: forget(engine, "layers.0.mlp.router.bias"),
        "lm_head": lambda: forget(engine, "lm_head"),
        "o_proj": lambda: forget(engine, "layers.1.self_attn.o_proj.weight"),
    }
    for name, plant in faults.items():
        undo = plant()
        sync.sync(20)  # remembers these values
        shake(run.model, 1e-4)  # far below what log-probs would notice
        seen[name] = verdict(sync, 21)
        undo()
        seen[f"{name}_healed"] = verdict(sync, 22)
    # What arrives is right and is used in the wrong way: packed experts are left unpacked.
    pack, loading._pack_experts_again = loading._pack_experts_again, lambda model: None
    seen["unpacked"] = verdict(sync, 30)
    loading._pack_experts_again = pack
    seen["unpacked_healed"] = verdict(sync, 31)
    return seen


def lora(folder):
    """LoRA on attention and experts: merged on the fly, base weights untouched."""
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    run = trainer(folder, vllm_mode="colocate", peft_config=config, learning_rate=3e-2)
    base = {n: p.detach().clone() for n, p in run.model.named_parameters() if "lora_" not in n}
    run.train()
    sync = run.weight_sync
    seen = {"logs": curves(run), "steps": run.state.global_step}
    seen["base_untouched"] = all(torch.equal(base[n], p) for n, p in run.model.named_parameters() if n in base)
    undo = forget(sync.engine, "layers.0.self_attn.q_proj.weight")
    sync.sync(20)
    shake(run.model, 1e-2)
    seen["stale"] = verdict(sync, 21)
    undo()
    merge, policy_weights._active_adapters = policy_weights._active_adapters, lambda model: {}
    seen["unmerged"] = verdict(sync, 22)
    policy_weights._active_adapters = merge
    seen["healed"] = verdict(sync, 23)
    return seen


# ---- a server ----


class Server:
    """A vLLM server in a process group of its own."""

    def __init__(self, checkpoint, port, dtype="float32", load_format="auto", options=()):
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        self.command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", dtype, "--load-format", load_format]
        self.command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]
        self.command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        self.command += ["--worker-extension-cls", WORKER_EXTENSION, "--served-model-name", "policy", *options]
        self.port = port
        self.process = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENGINE_READY_TIMEOUT_S": "1200"}
        log = open(f"/tmp/vllm_server_{self.port}.log", "a")
        self.process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(folder, dtype="float32", options=()):
    checkpoint = folder / "checkpoint"
    policy(dtype).save_pretrained(checkpoint)
    byte_tokenizer().save_pretrained(checkpoint)
    running = Server(checkpoint, free_port(), dtype, options=options)
    running.start()
    try:
        yield running
    finally:
        running.kill()


def by_server(folder, transport, dtype="float32", **settings):
    with server(folder, dtype) as running:
        return train(
            folder / "run",
            model=policy(dtype),
            vllm_mode="server",
            vllm_server_base_url=running.url,
            vllm_sync_transport=transport,
            **settings,
        )


def server_file_float32(folder):
    return by_server(folder, "file")


def server_http_bfloat16(folder):
    return by_server(folder, "http", "bfloat16")


def server_replayed(folder):
    """The same as `replayed`, with experts that come with the completions, and prefixes from the server's cache."""
    options = ["--enable-return-routed-experts", "--block-size", "32", "--scheduler-cls", REPLAY_SCHEDULER]
    with server(folder, "bfloat16", options) as running:
        run = trainer(
            folder / "run",
            model=policy("bfloat16"),
            vllm_mode="server",
            vllm_server_base_url=running.url,
            router_replay="rollout",
            vllm_importance_sampling_correction=True,
            max_steps=3,
        )
        other = other_experts(run)
        run.train()
    return {"steps": run.state.global_step, "other": other, "logs": replay_logs(run)}


def doctor(folder):
    """The command against a running server: the same checkpoint, and one whose window is one token wider."""
    outcomes = {}
    options = ["--attention", "eager", "--experts", "eager", "--dtype", "float32", "--tokens", "96"]
    with server(folder) as running:
        for name, window in (("healthy", 32), ("wider", 33)):
            model = policy()
            model.config.sliding_window = window
            model.save_pretrained(folder / name)
            byte_tokenizer().save_pretrained(folder / name)
            printed = io.StringIO()
            with redirect_stdout(printed):
                status = cli.main(["doctor", str(folder / name), *options, "--engine-url", running.url])
            outcomes[name] = [status, printed.getvalue()]
    return outcomes


class KillAt:
    """Kills the server when a rollout asks for its `at`-th completion from now on, and starts it again if told to."""

    def __init__(self, running, client, at, restart):
        self.running, self.client, self.left, self.restart = running, client, at, restart
        self.complete, client.complete = client.complete, self

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            self.running.kill()
            if self.restart:
                self.running.start()
        return self.complete(*args)


def server_killed(folder):
    """Killed in the middle of rollouts: once it comes back in time, once it does not and the run is resumed."""
    settings = {"vllm_mode": "server", "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    seen = {}
    with server(folder) as running:
        settings |= {"vllm_server_base_url": running.url, "vllm_server_timeout": 1000}
        run = trainer(folder / "run", **settings)
        KillAt(running, run.weight_sync.engine.client, at=6, restart=True)
        run.args.max_steps = 3
        run.train()
        client = run.weight_sync.engine.client
        seen["came_back"] = [run.state.global_step, client.describe().policy_version, run.weight_sync.syncs]
        seen["logs"] = curves(run)
        seen["after"] = verdict(run.weight_sync, 3)

        run = trainer(folder / "run", **{**settings, "vllm_server_timeout": 5.0})
        KillAt(running, run.weight_sync.engine.client, at=6, restart=False)
        started = time.monotonic()
        try:
            run.train(resume_from_checkpoint=True)
        except EngineUnavailable as error:
            seen["lost"] = [run.state.global_step, str(error), time.monotonic() - started]
        seen["checkpoint"] = Path(last_complete_checkpoint(str(folder / "run"), 1)).name

        running.start()
        run = trainer(folder / "run", **settings)
        run.train(resume_from_checkpoint=True)
        seen["resumed"] = run.state.global_step
        seen["resumed_logs"] = curves(run)
    return seen


# ---- two ranks and a server ----


def server_two_ranks(folder):
    """Each rank checks that the log-probs it got belong to its own prompts and completions. Rank 1 takes three turns,
    with a tool that crashes, rank 0 one."""
    Accelerator(cpu=True)
    running = None
    if RANK == 0:
        checkpoint = folder / "checkpoint"
        policy().save_pretrained(checkpoint)
        byte_tokenizer().save_pretrained(checkpoint)
        running = Server(checkpoint, free_port())
        running.start()
    [url] = broadcast_object_list([running.url if running else None])
    seen = []

    def check(trajectories, **kwargs):
        for t in trajectories:
            whole = t.prompt_ids + t.completion_ids
            with torch.no_grad():
                logits = run.model(torch.tensor([whole])).logits[0, len(t.prompt_ids) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, torch.tensor(t.completion_ids)[:, None])[:, 0]
            mask = torch.tensor(t.loss_mask).bool()
            difference = (own - torch.tensor(t.sampling_logps)).abs()[mask].max().item()
            seen.append([len(t.turns), difference, sum(r.failed for r in t.tool_results), mask.sum().item()])
        return [float(sum(t.completion_ids) % 11) for t in trajectories]

    run = trainer(
        folder / "run",
        reward_funcs=check,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_server_timeout=1000,
        max_rollout_tokens=60,
        max_steps=3,
    )
    if RANK == 1:
        run._engine.turn_format = ThreeTurns(run._engine.turn_format)
        generate = run.weight_sync.engine.generate  # short turns, so that there is room for three

        def short(prompts, limits, sampling=None):
            return generate(prompts, [min(6, n) for n in limits], sampling)

        run.weight_sync.engine.generate = short
    run._engine.stop_ids = [*range(tiny_vocabulary())] if RANK == 1 else run._engine.stop_ids
    run.train()
    weights = sum(p.double().sum().item() for p in run.model.parameters())
    torch.distributed.barrier()
    if running:
        running.kill()
    return {"seen": seen, "weights": weights, "logs": curves(run)}


def tiny_vocabulary():
    return policy().config.vocab_size


class ThreeTurns:
    """Reads a call of a tool that crashes into the first two turns of every rollout."""

    def __init__(self, inner):
        self.inner = inner
        self.turns = {}  # keeps the toolboxes, so that no id comes twice

    def parse(self, ids, toolbox):
        parsed = self.inner.parse(ids, toolbox)
        turn = self.turns.get(id(toolbox), (0, toolbox))[0] + 1
        self.turns[id(toolbox)] = turn, toolbox
        toolbox.functions["crash"] = crash
        parsed.calls = [ToolCall(name="crash", arguments={}, raw_arguments="{}")] if turn < 3 else []
        return parsed

    def observe(self, calls, results):
        return Observation(ids=[40, 41, 42], messages=[])


def crash():
    raise RuntimeError("the tool of rank 1 crashes")


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    seen = {f.__name__: f for f in list(globals().values()) if callable(f) and hasattr(f, "__name__")}[name](
        folder / name
    )
    (folder / f"{name}_{RANK}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process
