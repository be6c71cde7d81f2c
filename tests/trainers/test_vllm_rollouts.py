"""vLLM's server mode from the trainer to the weights and back, against a server with transformers in vLLM's place."""

import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset
from stub_vllm import StubPolicy, StubServer
from tiny_policy import byte_tokenizer, tiny_model

from trl_gptoss.rollouts import Observation, ToolCall
from trl_gptoss.rollouts.routed_experts import NOT_RECORDED
from trl_gptoss.rollouts.vllm.engine import EngineUnavailable
from trl_gptoss.routing import capture_routing
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.sync_probe import StaleWeightsError
from trl_gptoss.trainers.vllm_setup import _rendezvous


@pytest.fixture
def policy():
    return StubPolicy(tiny_model(seed=3))  # not the trainer's weights


@pytest.fixture
def server(policy):
    running = StubServer(policy)
    yield running
    running.stop()


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


def trainer(folder, server, model=None, reward_funcs=reward, evaluated=None, peft_config=None, **settings):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(16)])
    settings = {
        **ON_CPU,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "vllm_server_timeout": 20.0,
        "vllm_importance_sampling_correction": False,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_steps": 3,
        "max_rollout_tokens": 5,
        "learning_rate": 1e-2,
        **settings,
    }
    return GptOssGRPOTrainer(
        model or tiny_model(),
        reward_funcs,
        GptOssGRPOConfig(str(folder), **settings),
        data,
        eval_dataset=None if evaluated is None else data.select(range(evaluated)),
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
    )


def probes(run):
    return [entry["vllm/probe_mean"] for entry in run.state.log_history if "vllm/probe_mean" in entry]


@pytest.mark.parametrize("transport", ["file", "http"])
def test_rollouts_come_from_the_policy_that_is_trained(tmp_path, server, policy, transport):
    differences = []

    def check(trajectories, **kwargs):
        for t in trajectories:
            with torch.no_grad():
                ids = torch.tensor([t.prompt_ids + t.completion_ids])
                logits = run.model(ids).logits[0, len(t.prompt_ids) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, torch.tensor(t.completion_ids)[:, None])[:, 0]
            differences.append((own - torch.tensor(t.sampling_logps)).abs().max().item())
        return reward([t.completion_ids for t in trajectories])

    run = trainer(tmp_path, server, reward_funcs=check, vllm_sync_transport=transport)
    assert run.use_vllm and run.args.use_vllm
    run.train()
    assert len(differences) == 6 and max(differences) < 1e-4
    assert len(probes(run)) == 3 and max(probes(run)) < 1e-5
    versions = [version for _, version in policy.calls]
    assert len(versions) == len(set(versions)) == 3


@pytest.mark.parametrize("other", [0, 1])
def test_the_training_forward_takes_the_experts_that_the_server_reports(tmp_path, server, policy, other):
    policy.description |= {"routed_experts": True, "version": "0.26.0", "device": "cuda"}
    policy.other_experts = other
    run = trainer(tmp_path, server, router_replay="rollout", max_steps=2)
    taken, compute_loss = [], run.compute_loss

    def captured(model, inputs, *args, **kwargs):
        with capture_routing(run.model) as record:
            loss = compute_loss(model, inputs, *args, **kwargs)
        reported_LTk = inputs["routed_experts"].flatten(0, 1).permute(1, 0, 2)
        recorded_LT = reported_LTk[..., 0] != NOT_RECORDED
        taken.append((record.indices() == reported_LTk).all(-1)[recorded_LT])
        return loss

    run.compute_loss = captured
    run.train()
    assert len(taken) == 2 and all(equal.all() and equal.numel() for equal in taken)
    logs = [entry["router_replay/own_choice_differs"] for entry in run.state.log_history if "loss" in entry]
    assert len(logs) == 2 and (max(logs) < 0.02 if other == 0 else min(logs) > 0.5)


def test_a_server_that_does_not_report_experts_is_refused(tmp_path, server, policy):
    policy.description |= {"version": "0.26.0", "device": "cuda"}
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        trainer(tmp_path, server, router_replay="rollout")
    policy.description |= {"routed_experts": True, "version": "0.25.1"}
    with pytest.raises(NotImplementedError, match="completions of vLLM 0.25.1"):
        trainer(tmp_path, server, router_replay="rollout")
    policy.description |= {"version": "0.31.0", "device": "cpu"}
    with pytest.raises(NotImplementedError, match="needs Triton"):
        trainer(tmp_path, server, router_replay="rollout")


def test_a_generation_that_lasts_several_steps_is_synced_once(tmp_path, server, policy):
    run = trainer(
        tmp_path, server, steps_per_generation=2, gradient_accumulation_steps=2, max_steps=2, num_iterations=2
    )
    run.train()
    assert run.weight_sync.syncs == len(policy.calls) == len(probes(run)) == 1


@pytest.mark.parametrize("skipped", ["model.layers.1.self_attn.sinks", "model.layers.0.mlp.router.bias"])
def test_a_stale_tensor_stops_the_run_by_name_and_the_last_step_is_saved(tmp_path, server, policy, skipped):
    run = trainer(tmp_path, server, model=tiny_model(seed=3), save_strategy="steps", save_steps=100)
    policy.skip = {skipped}  # its first value is right: the checkpoint's
    with pytest.raises(StaleWeightsError, match=f"optimizer step 1 (?s:.*)Stale tensors, 1 of 61: {skipped}"):
        run.train()
    assert run.state.global_step == 1 and (tmp_path / "checkpoint-1").is_dir()
    policy.skip = set()
    again = trainer(tmp_path, server, save_strategy="steps", save_steps=100)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_without_the_probe_the_same_fault_goes_unnoticed(tmp_path, server, policy):
    """The control: what the probe is for."""
    run = trainer(tmp_path, server, model=tiny_model(seed=3), vllm_probe_every=0)
    policy.skip = {"model.layers.0.mlp.router.bias"}
    run.train()
    assert run.state.global_step == 3 and not probes(run)


def test_an_engine_that_computes_otherwise_stops_the_run(tmp_path, server, policy):
    policy.wrong = 0.01
    with pytest.raises(StaleWeightsError, match="All 61 tensors have arrived"):
        trainer(tmp_path / "a", server).train()
    run = trainer(tmp_path / "b", server, vllm_probe_tolerance=0.02)
    run.train()
    assert probes(run) == pytest.approx([0.01] * 3, abs=1e-5)


def test_the_probe_can_be_rarer(tmp_path, server):
    run = trainer(tmp_path, server, vllm_probe_every=2, max_steps=4)
    run.train()
    assert run.weight_sync.syncs == 4 and len(probes(run)) == 2


def test_another_model_behind_the_server_is_refused(tmp_path, server, policy):
    run = trainer(tmp_path, server, model=tiny_model(num_hidden_layers=1, layer_types=["full_attention"]))
    with pytest.raises(KeyError, match="has no tensors"):
        run.train()


def test_a_server_that_is_lost_ends_the_run_in_time_and_a_resumed_one_goes_on(tmp_path, server, policy):
    saves = {"save_strategy": "steps", "save_steps": 1}
    run = trainer(tmp_path, server, **saves, vllm_server_timeout=1.0)
    complete, calls = policy.complete, []

    def dies(body):
        calls.append(body.get("prompt_logprobs"))
        if calls.count(None) == 3:  # in the middle of the second step's rollouts
            server.stop()
        return complete(body)

    policy.complete = dies
    with pytest.raises(EngineUnavailable, match="(?s)waited 1 s.*resume_from_checkpoint"):
        run.train()
    assert run.state.global_step == 1
    policy.complete = complete
    policy.version = ""
    server.start()
    again = trainer(tmp_path, server, **saves)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3 and max(probes(again)) < 1e-5


def test_weights_that_changed_without_a_step_are_sent_when_a_run_begins(tmp_path, server, policy):
    run = trainer(tmp_path, server)
    run.weight_sync.prepare(0)
    run.weight_sync.prepare(0)
    assert len(policy.calls) == 1
    with torch.no_grad():
        run.model.lm_head.weight.add_(1.0)
    run.train()
    assert len(policy.calls) == 1 + 3


def test_an_evaluation_after_the_best_model_was_loaded_samples_from_that_one(tmp_path, server, policy):
    scores = iter([1.0, -1.0])  # the first is the better one
    run = trainer(
        tmp_path,
        server,
        evaluated=2,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_score",
        greater_is_better=True,
        per_device_eval_batch_size=2,
        num_generations_eval=1,
    )
    evaluate = run.evaluation_loop

    def scored(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        result.metrics["eval_score"] = next(scores, 0.0)
        return result

    run.evaluation_loop = scored
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-1")
    ours = dict(run.model.named_parameters())
    assert any(not torch.equal(p, ours[name]) for name, p in policy.model.named_parameters())
    run.evaluate()
    assert all(torch.equal(p, ours[name]) for name, p in policy.model.named_parameters())


class TwoTurns:
    """Reads a call into every rollout's first turn."""

    def __init__(self, inner):
        self.inner, self.called = inner, {}  # keeps the toolboxes, so that no id comes twice

    def parse(self, ids, toolbox):
        parsed = self.inner.parse(ids, toolbox)
        if id(toolbox) not in self.called:
            self.called[id(toolbox)] = toolbox
            parsed.calls = [ToolCall(name="none", arguments={}, raw_arguments="{}")]
        else:
            parsed.calls = []
        return parsed

    def observe(self, calls, results):
        return Observation(ids=[40], messages=[])


def test_sleep_gives_weights_up_once_per_generation_not_once_per_turn(tmp_path, server):
    """An engine that sleeps is woken, filled and sent to sleep around all turns of the rollouts."""
    run = trainer(tmp_path, server, max_steps=2, max_rollout_tokens=9)
    engine, events = run.weight_sync.engine, []
    load, generate = engine.load, engine.generate
    engine.wake = lambda: bool(events.append("wake") or True)
    engine.sleep = lambda: events.append("sleep")
    engine.load = lambda weights, version: (events.append("load"), load(weights, version))

    def short_turn(prompts, limits, sampling):
        events.append("turn")
        return generate(prompts, [min(3, n) for n in limits], sampling)

    engine.generate = short_turn
    run._engine.turn_format = TwoTurns(run._engine.turn_format)
    run._engine.stop_ids = list(range(run.model.config.vocab_size))  # whatever comes ends a turn
    run.train()
    assert events == ["wake", "load", *["turn"] * 4, "sleep"] * 2  # two rollouts of two turns
    events.clear()
    run.weight_sync.prepare(2)  # the same weights, but they were given up
    assert events == ["wake", "load"]


def test_trl_finds_the_engine_under_its_own_name(tmp_path, server, policy):
    run = trainer(tmp_path, server)
    run.vllm_generation.sync_weights()
    prompts, ids, logps, _ = run.vllm_generation.generate([[1, 2, 3]] * 2, None, num_generations=2)
    assert prompts == [[1, 2, 3]] * 2 and [len(row) for row in logps] == [len(row) for row in ids]
    assert len(logps[0][0]) == 1
    run.args.max_completion_length, whole = None, run.weight_sync.engine.info.max_model_len
    assert run.vllm_generation.generate([[1] * (whole - 2)], None, num_generations=1)[1][0]
    with pytest.raises(ValueError, match="no room"):
        run.vllm_generation.generate([[1] * 512], None, num_generations=1)
    with pytest.raises(NotImplementedError, match="no images"):
        run.vllm_generation.generate([[1]], [["image"]], 1)


def test_trained_rows_of_the_embedding_are_refused_by_name(tmp_path, server):
    from peft import LoraConfig

    adapted = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5, 6])
    run = trainer(tmp_path, server, peft_config=adapted)
    with pytest.raises(NotImplementedError, match="embed_tokens.*only LoRA on linear"):
        run.train()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"generation_kwargs": {"logprobs": 5}}, "generation_kwargs sets"),
        ({"vllm_structured_outputs_regex": "a+"}, "structure of its own"),
        ({"vllm_mode": "colocate"}, "needs vLLM"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, server, settings, message, monkeypatch):
    monkeypatch.setattr("trl_gptoss.trainers.vllm_setup.installed_version", lambda: None)
    with pytest.raises((ValueError, ImportError), match=message):
        trainer(tmp_path, server, **settings)


def test_a_run_of_one_process_takes_a_port_that_no_other_run_is_about_to_take(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    alone = SimpleNamespace(process_index=0, local_process_index=0, num_processes=1)
    _rendezvous(alone)
    assert os.environ["MASTER_PORT"] not in ("29500", "23456", "12355", "12345")  # where everybody looks first
    assert os.environ["WORLD_SIZE"] == "1" and os.environ["MASTER_ADDR"] == "localhost"
    monkeypatch.setenv("MASTER_PORT", "31234")
    _rendezvous(alone)
    assert os.environ["MASTER_PORT"] == "31234"  # a launcher's


@pytest.mark.parametrize(
    "field, value",
    [
        ("vllm_dtype", "float16"),
        ("vllm_sync_transport", "ftp"),
        ("vllm_probe_every", -1),
        ("vllm_probe_tolerance", float("nan")),
        ("vllm_request_timeout", 0.0),
        ("vllm_mode", "cloud"),
    ],
)
def test_settings_are_checked(tmp_path, field, value):
    with pytest.raises(ValueError, match=field):
        GptOssGRPOConfig(str(tmp_path), bf16=False, use_cpu=True, **{field: value})


def test_an_unverified_version_needs_the_probe(tmp_path, server, policy):
    policy.description["version"] = "0.27.1"
    policy.description["device"] = "cuda"
    with pytest.raises(ValueError, match="vllm_probe_every to 1"):
        trainer(tmp_path, server, vllm_probe_every=3, vllm_sync_transport="file")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer(tmp_path, server, vllm_sync_transport="file")
    assert any("has not been verified" in str(w.message) for w in seen)
