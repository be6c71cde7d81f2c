"""Router replay in the trainer: equal where the indices agree, other experts where they do not, gradients throughout."""

import math

import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset
from peft import LoraConfig
from tiny_policy import byte_tokenizer, tiny_model
from transformers import GptOssForCausalLM, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer

from trl_gptoss.rollouts import DamagedRouting, Observation, Sample, SampleEnd, ToolCall
from trl_gptoss.rollouts.transformers_backend import TransformersBackend
from trl_gptoss.routing import capture_routing, replay_routing
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer

TOKENIZER = byte_tokenizer()
DATA = Dataset.from_list([{"prompt": [{"role": "user", "content": "say " * i}]} for i in range(64)])


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


PACKED = {"padding_free": True}
IN_PARTS = {"max_tokens_per_micro_batch": 100}  # packed, and in several forwards


def build(tmp_path, peft_config=None, model=None, **settings):
    packs = settings.keys() & (PACKED | IN_PARTS)
    settings = {
        **ON_CPU,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_steps": 2,
        "max_rollout_tokens": 12,
        "learning_rate": 1e-2,
        "log_trajectories": 0,
        **settings,
    }
    return GptOssGRPOTrainer(
        model or tiny_model(attn_implementation="sink_fa3" if packs else None),
        length_reward, GptOssGRPOConfig(str(tmp_path), **settings), DATA,
        processing_class=TOKENIZER, peft_config=peft_config,
    )  # fmt: skip


def gradients(trainer, monkeypatch):
    """Loss, gradients of all trained parameters and experts used, of every micro-batch."""
    seen = []
    step = GRPOTrainer.training_step

    def spy(this, model, inputs, num_items_in_batch=None):
        with capture_routing(this.model) as record:
            loss = step(this, model, inputs, num_items_in_batch)
        grads = {n: p.grad.clone() for n, p in this.model.named_parameters() if p.grad is not None}
        seen.append((loss.item(), grads, record.indices().sort(-1).values))
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "training_step", spy)
        trainer.train()
    return seen


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)


@pytest.mark.parametrize(
    ("with_lora", "settings"),
    [
        (False, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        pytest.param(True, {"steps_per_generation": 2, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param(True, {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(False, {"pad_to_multiple_of": 8}, marks=pytest.mark.slow),
        (False, {"gradient_checkpointing": True, **IN_PARTS}),
        pytest.param(True, {"gradient_checkpointing": True, **PACKED}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_replaying_the_own_choice_changes_nothing(tmp_path, monkeypatch, with_lora, settings):
    off, on = (
        gradients(build(tmp_path, lora() if with_lora else None, router_replay=r, **settings), monkeypatch)
        for r in ("off", "rollout")
    )
    assert len(off) == len(on) and any(loss != 0 for loss, _, _ in on)
    for (loss_off, grads_off, routes_off), (loss_on, grads_on, routes_on) in zip(off, on):
        assert torch.equal(routes_off, routes_on)
        assert loss_on == pytest.approx(loss_off, rel=1e-5, abs=1e-7)
        assert grads_on.keys() == grads_off.keys()
        for name, gradient in grads_on.items():
            torch.testing.assert_close(gradient, grads_off[name], rtol=1e-4, atol=1e-6)
        if not with_lora:
            routers = [g for n, g in grads_on.items() if "router.weight" in n]
            assert len(routers) == 2 and all(g.abs().sum() > 0 for g in routers)


class Tampering(TransformersBackend):
    """Reports other experts than it used: still a valid payload."""

    def generate(self, *args):
        samples = super().generate(*args)
        for sample in samples:
            sample.routing = (sample.routing + 1) % 4
        return samples


def kept_inputs(monkeypatch):
    """The micro-batches that TRL's loss gets."""
    kept = []
    loss = GRPOTrainer._compute_loss
    monkeypatch.setattr(
        GRPOTrainer, "_compute_loss", lambda this, m, inputs: kept.append(inputs) or loss(this, m, inputs)
    )
    return kept


def build_tampered(tmp_path, checkpointing, **settings):
    """One step on rollouts whose experts the router would not choose."""
    trainer = build(
        tmp_path,
        router_replay="rollout",
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        rollout_correction_level="token",
        rollout_correction_mode="truncate",
        max_steps=1,
        **settings,
    )
    trainer._engine.backend.__class__ = Tampering
    return trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_forward_takes_the_experts_that_the_sampler_reports(tmp_path, monkeypatch, checkpointing):
    trainer = build_tampered(tmp_path, checkpointing)
    kept = kept_inputs(monkeypatch)
    [(_, grads, used)] = gradients(trainer, monkeypatch)
    [inputs] = kept
    reported = inputs["routed_experts"].flatten(0, 1).permute(1, 0, 2).long()
    recorded = reported[:, :, 0] != 255
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    assert recorded[0].sum() == (mask.sum() - len(mask))  # all tokens but the last one of each row
    assert torch.equal(used[recorded].long(), reported.sort(-1).values[recorded])
    assert all(grads[f"model.layers.{i}.mlp.router.weight"].abs().sum() > 0 for i in range(2))
    [entry] = [e for e in trainer.state.log_history if "loss" in e]
    # not 1: layer 2 sees what the wrong experts of layer 1 gave
    assert entry["router_replay/own_choice_differs"] > 0.9
    # The log-probs are those of other experts: the mismatch that the replay of the right ones would have removed.
    assert entry["rollout_correction/kl_k3"] > 1e-6


def forwards_of_packed_rows(trainer):
    """Row lengths of each forward with gradients."""
    seen = []
    score = trainer._score

    def spy(model, ids, lengths, *args, **kwargs):
        if torch.is_grad_enabled():
            seen.append(lengths)
        return score(model, ids, lengths, *args, **kwargs)

    trainer._score = spy
    return seen


@pytest.mark.parametrize(
    ("settings", "checkpointing"),
    [
        (IN_PARTS, True),
        pytest.param(IN_PARTS, False, marks=pytest.mark.slow),
        pytest.param(PACKED, True, marks=pytest.mark.slow),
        pytest.param(PACKED, False, marks=pytest.mark.slow),
    ],
)
def test_packed_rows_take_the_experts_of_their_own_tokens(tmp_path, monkeypatch, settings, checkpointing):
    """At experts that the router would not choose: loss, log-probs and gradients are those of the padded rows."""
    seen = {}
    for name, chosen in (("padded", {"padding_free": False}), ("packed", settings)):
        trainer = build_tampered(tmp_path, checkpointing, model=tiny_model(attn_implementation="sink_fa3"), **chosen)
        scored = forwards_of_packed_rows(trainer)
        with monkeypatch.context() as patch:
            kept = kept_inputs(patch)
            [(_, grads, _)] = gradients(trainer, patch)
        [entry] = [e for e in trainer.state.log_history if "loss" in e]
        [inputs] = [i for i in kept if len(i["prompt_ids"]) == 4]
        seen[name] = grads, entry, inputs, scored
    (grads, entry, inputs, none), (packed_grads, packed_entry, packed_inputs, parts) = seen.values()
    assert not none and (len(parts) > 1) == (settings is IN_PARTS) and sum(map(len, parts)) == 4
    assert torch.equal(inputs["completion_ids"], packed_inputs["completion_ids"])  # the same rollouts
    for name, gradient in grads.items():
        torch.testing.assert_close(packed_grads[name], gradient, rtol=1e-4, atol=1e-6)
    for name in ("loss", "router_replay/own_choice_differs", "rollout_correction/kl_k3"):
        assert packed_entry[name] == pytest.approx(entry[name], rel=1e-4) and abs(entry[name]) > 1e-3


class GivesUp(TransformersBackend):
    """Samples one turn of each rollout, and nothing behind its tool's answer."""

    def generate(self, prompts, max_new_tokens, *args):
        if all(prompt[-1] == ANSWER for prompt in prompts):
            return [Sample(ids=[], logps=[], end=SampleEnd.ABORT) for _ in prompts]
        return super().generate(prompts, [min(3, n) for n in max_new_tokens], *args)


class AlwaysCalls:
    """Every turn is a call, whatever was sampled."""

    def __init__(self, inner):
        self.inner = inner

    def parse(self, ids, toolbox):
        parsed = self.inner.parse(ids, toolbox)
        parsed.calls = [ToolCall(name="none", arguments={}, raw_arguments="{}")]
        return parsed

    def observe(self, calls, results):
        return Observation(ids=[40, ANSWER], messages=[])


ANSWER = 41


def test_rollouts_that_end_with_the_answer_of_a_tool_are_replayed_up_to_their_last_turn(tmp_path, monkeypatch):
    trainer = build(tmp_path, router_replay="rollout", max_steps=1)
    trainer._engine.backend.__class__ = GivesUp
    trainer._engine.turn_format = AlwaysCalls(trainer._engine.turn_format)
    trainer._engine.stop_ids = list(range(trainer.model.config.vocab_size))
    kept = kept_inputs(monkeypatch)
    trainer.train()
    [inputs] = kept
    recorded = inputs["routed_experts"][:, :, 0, 0] != 255
    sampled = inputs["tool_mask"] * inputs["completion_mask"]
    expected = inputs["prompt_mask"].sum(1) + sampled.sum(1) - 1
    assert (sampled.sum(1) < inputs["completion_mask"].sum(1)).all() and torch.equal(recorded.sum(1), expected)


def test_with_the_right_experts_there_is_nothing_to_correct(tmp_path):
    trainer = build(tmp_path, router_replay="rollout")
    trainer.train()
    for entry in (e for e in trainer.state.log_history if "loss" in e):
        assert entry["router_replay/own_choice_differs"] == 0.0
        assert entry["rollout_correction/kl_k3"] < 1e-8


def test_the_gradient_goes_through_the_router_logits_at_the_replayed_experts():
    """Against finite differences, at experts that are not the router's own."""
    config = tiny_model().config
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(config, dtype=torch.float64, experts_implementation="eager").eval()
    ids = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    forced = torch.tensor([[0, 3], [2, 1]])[:, None].expand(2, 9, 2)
    weight = model.model.layers[0].mlp.router.weight

    def loss():
        with replay_routing(model, forced):
            return model(ids, labels=ids).loss

    loss().backward()
    entry, step = (3, 5), 3e-3  # norms and loss are float32 inside
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            weight[entry] += sign * step
            values.append(loss().item())
            weight[entry] -= sign * step
    assert weight.grad[entry].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=5e-3)
    assert weight.grad[entry].abs() > 1e-9 and weight.grad[1].abs().sum() == 0.0  # expert 1 is not taken in layer 0


@pytest.mark.parametrize(
    "settings", [pytest.param(PACKED, marks=pytest.mark.slow), IN_PARTS], ids=["packed", "in parts"]
)
def test_old_records_and_replays_packed_rows(tmp_path, monkeypatch, settings):
    kept = kept_inputs(monkeypatch)
    trainer = build(
        tmp_path, router_replay="old", num_iterations=2, max_steps=2, learning_rate=0.1, rollout_correction_level="off",
        model=tiny_model(attn_implementation="sink_fa3"), **settings,
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    whole = [i for i in kept if len(i["prompt_ids"]) == 4 and "routed_experts" in i]
    assert whole, "the second visit replays"
    inputs = whole[-1]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool()
    recorded = inputs["routed_experts"]
    assert (recorded[~mask] == 255).all() and (recorded[mask] < 4).all()
    trainer.model.load_state_dict(before)
    with torch.no_grad(), capture_routing(trainer.model.eval()) as record:
        trainer.model(ids, attention_mask=mask.long(), use_cache=False)
    own = record.indices().unflatten(1, ids.shape).permute(1, 2, 0, 3)
    assert torch.equal(own[mask].sort(-1).values, recorded[mask].sort(-1).values)  # those of the weights that sampled


def test_old_replays_the_forward_of_the_old_log_probs(tmp_path, monkeypatch):
    seen = []
    loss = GRPOTrainer._compute_loss

    def spy(this, model, inputs):
        with capture_routing(this.model) as record:
            value = loss(this, model, inputs)
        seen.append((inputs, record.indices()))
        return value

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", spy)
    trainer = build(
        tmp_path, router_replay="old", num_iterations=3, max_steps=3, learning_rate=0.1, rollout_correction_level="off"
    )
    trainer.train()
    (first, own), (second, replayed), (third, again) = seen
    assert "routed_experts" not in first and "old_per_token_logps" in second
    assert torch.equal(own, replayed) and torch.equal(own, again)
    mask = torch.cat([third["prompt_mask"], third["completion_mask"]], dim=1)
    with torch.no_grad(), capture_routing(trainer.model) as record:
        trainer.model(torch.cat([third["prompt_ids"], third["completion_ids"]], dim=1), attention_mask=mask)
    moved = (record.indices().sort(-1).values != own.sort(-1).values).any(-1)
    assert moved[:, mask.flatten().bool()].float().mean() > 0.01  # the control: by now the router would choose others


def test_a_rollout_func_may_report_experts_and_damage_is_refused(tmp_path):
    model = tiny_model().eval()

    def rollouts(damage):
        def rollout_func(prompts, trainer):
            prompt_ids, completion_ids = [[1, 2, 3 + i] for i in range(len(prompts))], [[4, 5, 6, 258]] * len(prompts)
            experts = []
            for prompt, completion in zip(prompt_ids, completion_ids):
                with torch.no_grad(), capture_routing(model) as record:
                    model(torch.tensor([prompt + completion[:-1]]), use_cache=False)
                experts.append(damage(record.indices().permute(1, 0, 2).numpy().copy()))
            logps = [[math.log(0.5)] * 4] * len(prompts)
            return {
                "prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logps,
                "routed_experts": experts,
            }  # fmt: skip

        return rollout_func

    def trainer(damage):
        args = GptOssGRPOConfig(
            str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_steps=1, use_cpu=True, bf16=False,
            report_to="none", save_strategy="no", disable_tqdm=True, log_trajectories=0, router_replay="rollout",
            gradient_checkpointing=False, logging_steps=1,
        )  # fmt: skip
        return GptOssGRPOTrainer(
            tiny_model(), length_reward, args, DATA, processing_class=TOKENIZER, rollout_func=rollouts(damage)
        )

    good = trainer(lambda r: r)
    good.train()
    assert any("router_replay/own_choice_differs" in e for e in good.state.log_history)
    with pytest.raises(DamagedRouting, match="too few"):
        trainer(lambda r: r[1:]).train()


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'off', 'rollout' or 'old'"):
        build(tmp_path, router_replay="on")
    with pytest.raises(ValueError, match="Set sequence_parallel_size=1"):
        build(tmp_path, router_replay="rollout", sequence_parallel_size=2)
    with pytest.raises(ValueError, match="Set on_policy='auto'"):
        build(tmp_path, router_replay="old", on_policy="off")
    for settings in ({"steps_per_generation": 2}, {"num_iterations": 2}):  # TRL's old log-probs, which replay nothing
        with pytest.raises(ValueError, match="would compare two functions. Set on_policy='auto'"):
            build(tmp_path, router_replay="rollout", on_policy="off", **settings)
    build(tmp_path, router_replay="rollout", on_policy="off")
    qwen = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match="is for GPT-OSS, got qwen2"):
        build(tmp_path, model=qwen, router_replay="rollout")
