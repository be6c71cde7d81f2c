"""Run by torchrun with two processes; the first argument is a folder for what was seen, the others name what to do."""

import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from cpu_settings import ON_CPU
from datasets import Dataset
from scripted_backend import HarmonyWriter, ScriptedBackend
from stub_vllm import StubPolicy, StubServer
from tiny_policy import byte_tokenizer, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GenerationConfig
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from trl_gptoss.harmony import HarmonyVocabulary
from trl_gptoss.rollouts import SamplingOptions
from trl_gptoss.rollouts.transformers_backend import TransformersBackend
from trl_gptoss.rollouts.vllm.client import VllmClient
from trl_gptoss.rollouts.vllm.server import ServerEngine
from trl_gptoss.rollouts.vllm.snapshot import Snapshot
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.policy_weights import PolicyWeights

torch.set_num_threads(1)
RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
TOKENIZER = byte_tokenizer()
VOCABULARY = HarmonyVocabulary.of(TOKENIZER)
WRITE = HarmonyWriter(TOKENIZER)


def report(what, seen):
    (FOLDER / f"{what}_{RANK}.json").write_text(json.dumps(seen))


def crash(x: str) -> str:
    """Answer, or fail.

    Args:
        x: anything.
    """
    if RANK == 1:
        raise RuntimeError("the tool of rank 1 crashes")
    return x


def trainer(output_dir, reward, **settings):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}], "number": i} for i in range(32)])
    settings = {
        **ON_CPU,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_steps": 3,
        "max_rollout_tokens": 2000,
        "learning_rate": 1e-2,
        **settings,
    }
    args = GptOssGRPOConfig(str(output_dir), **settings)
    return GptOssGRPOTrainer(tiny_model(), reward, args, data, processing_class=TOKENIZER, tools=[crash])


def unequal(collective=False):
    """Rank 0 answers at once, rank 1 calls a crashing tool four times; every rollout names its rank."""
    seen = []

    def script(prompt, rng):
        calls = sum(VOCABULARY.decode(prompt[i : i + 12]).startswith("<|start|>functions") for i in range(len(prompt)))
        if RANK == 1 and calls < 4:
            return WRITE.call("crash", x=f"rank {RANK}")
        return WRITE.final(f"rank {RANK} " + "x" * rng.randrange(30 * (RANK + 1)))

    def reward(prompts, trajectories, number, completion_ids, **kwargs):
        for prompt, trajectory, n, ids in zip(prompts, trajectories, number, completion_ids):
            own = f"say {n}<|end|><|start|>assistant" in VOCABULARY.decode(trajectory.prompt_ids)
            own &= prompt[0]["content"] == f"say {n}" and ids == trajectory.completion_ids
            seen.append([own, trajectory.final_text.split(" x")[0].strip(), len(trajectory.turns)])
        return [float(len(ids)) for ids in completion_ids]

    t = trainer(FOLDER / "unequal", reward)
    t._engine.backend = ScriptedBackend(script, seed=RANK, collective=collective)
    t.train()
    weights = sum(p.double().sum().item() for p in t.model.parameters())
    return {"seen": seen, "weights": weights, "logs": t.state.log_history}


def collective():
    return unequal(collective=True)


class EchoClient:
    """TRL's client of a vLLM server whose completion is the prompt's first token, as often as the second says."""

    def generate(self, prompts, features, n, max_tokens, **kwargs):
        ids = [[p[0]] * min(p[1], max_tokens) for p in prompts for _ in range(n)]
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": [[[-float(t)] for t in row] for row in ids]}


class EchoPolicy(StubPolicy):
    """The same behind our client."""

    def complete(self, body):
        ids = [body["prompt"][0]] * min(body["prompt"][1], body["max_tokens"])
        return {"token_ids": ids, "logprobs": {"token_logprobs": [-float(t) for t in ids]}, "finish_reason": "length"}


def shared_server(policy):
    """The URL of one server for both ranks, in the process of rank 0."""
    server = StubServer(policy()) if RANK == 0 else None
    [url] = broadcast_object_list([server.url if server else None])
    return server, url


def vllm():
    """Ranks with unequal numbers of rollouts at one server, and, as the control, TRL's client."""
    accelerator = Accelerator(cpu=True)
    server, url = shared_server(lambda: EchoPolicy(tiny_model()))
    engine = ServerEngine(
        VllmClient(url, 10, 60), [7, 8], SamplingOptions(), {}, "file", Snapshot(FOLDER / f"unused_{RANK}")
    )
    generation = object.__new__(VLLMGeneration)  # its constructor connects to a server
    generation.__dict__.update(
        mode="server", accelerator=accelerator, vllm_client=EchoClient(), temperature=1.0, top_p=1.0, top_k=0
    )
    generation.__dict__.update(
        min_p=None, repetition_penalty=1.0, max_completion_length=16, logprobs=0, structured_outputs_regex=None
    )
    generation.__dict__.update(generation_kwargs={}, enable_sleep_mode=False)
    seen = []
    for counts in ((3, 1), (1, 4), (0, 2), (2, 0), (2, 2)):
        prompts = [[1000 * RANK + 10 * i + 5, 4 + i] for i in range(counts[RANK])]
        limits = [2 + i for i in range(counts[RANK])]
        samples = engine.generate(prompts, limits)
        right = [s.ids == [p[0]] * limit for s, p, limit in zip(samples, prompts, limits)]
        right += [s.logps == [-float(p[0])] * limit for s, p, limit in zip(samples, prompts, limits)]
        _, stock, _, _ = generation.generate(prompts=prompts, images=None, num_generations=1)
        control = [ids[:1] == p[:1] for ids, p in zip(stock, prompts)] + [len(stock) == len(prompts)]
        seen.append(
            [len(samples) == len(prompts) and all(right), all(control), counts[0] == counts[1] or counts[1] == 0]
        )
    dist.barrier()
    if server:
        server.stop()
    return {"seen": seen}


def server_mode():
    """GRPO at one server: rank 0 takes one turn, rank 1 calls a tool that crashes; weights are sent by rank 0 alone."""
    seen = []

    class Scripted(StubPolicy):
        """Acts by what the prompt says, so that every rollout can be told by its rank."""

        def complete(self, body):
            if body.get("prompt_logprobs") is not None:
                return super().complete(body)
            text = VOCABULARY.decode(body["prompt"])
            number = int(text.split("say ")[1].split("<")[0])
            if number % 2 and text.count("<|start|>functions") < 3:
                ids = WRITE.call("crash", x=f"number {number}")
            else:
                ids = WRITE.final(f"number {number} " + "x" * (number % 5))
            return {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}, "finish_reason": "stop"}

    def reward(trajectories, number, **kwargs):
        for trajectory, n in zip(trajectories, number):
            seen.append([n, trajectory.final_text.split()[1], len(trajectory.turns), trajectory.sampling_logps[0]])
        return [float(len(t.completion_ids)) for t in trajectories]

    server, url = shared_server(lambda: Scripted(tiny_model(seed=1), {"max_model_len": 2048}))
    t = trainer(
        FOLDER / "server_mode",
        reward,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_importance_sampling_correction=False,
        num_generations=2,
        max_steps=2,
    )
    t.train()
    calls = server.policy.calls if server else None
    dist.barrier()
    probes = [entry["vllm/probe_mean"] for entry in t.state.log_history if "vllm/probe_mean" in entry]
    return {"seen": seen, "calls": calls, "probes": probes}


def sharded():
    """Weights sharded by FSDP2, rollouts of unequal numbers, lengths and turns: nothing hangs, tokens are right."""
    Accelerator(cpu=True)
    whole, model = tiny_model().eval(), tiny_model().eval()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # by default FSDP takes a GPU where there is one
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dist.fsdp.register_fsdp_forward_method(model, "generate")

    def backend(m, collective):
        @contextmanager
        def open_model():
            yield m

        generation = GenerationConfig(pad_token_id=257, do_sample=False)
        return TransformersBackend(open_model, generation, [258], 257, torch.device("cpu"), collective)

    ours, alone = backend(model, True), backend(whole, False)
    right = []
    for turn in range(4):
        prompts = [[20 + RANK, i + 1, turn] * (1 + i) for i in range((3 - turn) if RANK == 0 else 1)]
        limits = [2 + 3 * i + RANK for i in range(len(prompts))]
        right.append(
            [s.ids for s in ours.generate(prompts, limits)] == [s.ids for s in alone.generate(prompts, limits)]
        )
    return {"right": right, "weights": sharded_weights(model, whole)}


def sharded_weights(model, whole):
    """What a sync would send: every tensor whole and equal, on both ranks."""
    sharding = DistributedBackend(Accelerator(cpu=True))
    expected = dict(whole.named_parameters())
    seen = {name: tensor.clone() for name, tensor in PolicyWeights(model, sharding)}
    return list(seen) == list(expected) and all(torch.equal(seen[name], expected[name]) for name in expected)


def reward_of_length(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


RESUMED = {
    "max_rollout_tokens": 6,
    "max_steps": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "gradient_accumulation_steps": 3,
}


def straight():
    t = trainer(FOLDER / "straight", reward_of_length, **RESUMED)
    t.train()
    return {"weights": [p.tolist() for p in t.model.parameters()], "logs": t.state.log_history}


def stopped():
    """SIGTERM reaches one rank in the third step."""
    calls = [0]

    def reward(completion_ids, **kwargs):
        calls[0] += 1
        if RANK == 1 and calls[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return reward_of_length(completion_ids)

    t = trainer(FOLDER / "stopped", reward, **{**RESUMED, "save_strategy": "steps", "save_steps": 100})
    try:
        t.train()
    except SystemExit as stop:
        return {"code": stop.code, "step": t.state.global_step}
    return "went on"


def giving_up():
    """A reward function fails on one rank only, again and again."""

    def reward(completion_ids, **kwargs):
        if RANK == 1:
            raise ValueError("judge is down")
        return reward_of_length(completion_ids)

    settings = {"max_rollout_tokens": 6, "max_steps": 5, "save_strategy": "steps", "save_steps": 100}
    t = trainer(FOLDER / "giving_up", reward, **settings)
    try:
        t.train()
    except (SystemExit, RuntimeError) as stop:
        return [type(stop).__name__, str(stop), t.state.global_step]
    return "went on"


def resumed():
    t = trainer(FOLDER / "stopped", reward_of_length, **{**RESUMED, "save_strategy": "steps", "save_steps": 100})
    t.train(resume_from_checkpoint=True)
    return {"weights": [p.tolist() for p in t.model.parameters()], "logs": t.state.log_history}


for what in sys.argv[2:]:
    done = {
        f.__name__: f for f in (unequal, collective, vllm, server_mode, sharded, straight, stopped, resumed, giving_up)
    }[what]()
    report(what, done)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # under load a C++ thread that outlives the group aborted the interpreter's exit, with all reports written
