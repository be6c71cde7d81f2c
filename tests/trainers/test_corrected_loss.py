"""Rollout correction inside of TRL's loss: against TRL's own correction, and against a float64 formula."""

import copy
import itertools
import logging
import math
import random

import numpy as np
import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset
from scripted_backend import HarmonyWriter
from tiny_policy import byte_tokenizer, tiny_model
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from trl_gptoss.harmony.channel_ids import CHANNEL_NAMES, channel_ids
from trl_gptoss.rollouts import Sample, SamplingOptions
from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer, corrected_loss

TOKENIZER = byte_tokenizer()
DATA = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(64)])


class NoVllm:
    """Stands for TRL's vLLM client, which `rollout_func` makes no use of here."""

    def __init__(self, **kwargs):
        pass

    def sync_weights(self):
        pass


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


@torch.no_grad()
def plain_logps(model, prompt, completion):
    """(T,) float64 log-probs from a copy of the model, one sequence at a time."""
    model = copy.deepcopy(model).double().eval()
    logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0]
    logps = logits.double().log_softmax(-1)[len(prompt) - 1 : -1]
    return logps.gather(1, torch.tensor(completion)[:, None])[:, 0]


class Rollouts:
    """A `rollout_func`: random ids, an observation in the middle, and log-probs of a sampler that is off by `noise`."""

    def __init__(self, noise=0.05, lengths=(5, 9), shift=None, missing=(), has_logps=True):
        self.noise, self.lengths, self.shift, self.missing, self.has_logps = noise, lengths, shift, missing, has_logps
        self.calls = 0

    def __call__(self, prompts, trainer):
        rng, gauss = random.Random(self.calls), np.random.default_rng(self.calls)
        self.calls += 1
        prompt_ids, completion_ids, logprobs, env_mask = [], [], [], []
        model = getattr(trainer, "plain", None) or trainer.model
        for i, _ in enumerate(prompts):
            prompt = [rng.randrange(256) for _ in range(rng.randint(2, 4))]
            completion = [rng.randrange(256) for _ in range(rng.randint(*self.lengths))] + [258]
            logps = plain_logps(model, prompt, completion) + torch.from_numpy(
                gauss.normal(0, self.noise, len(completion))
            )
            if self.shift is not None:
                logps = logps + self.shift(i)
            logps = [math.nan if (i, t) in self.missing else p for t, p in enumerate(logps.tolist())]
            mask = [1] * len(completion)
            mask[2] = 0
            prompt_ids.append(prompt)
            completion_ids.append(completion)
            logprobs.append(logps)
            env_mask.append(mask)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": logprobs if self.has_logps else None,
            "env_mask": env_mask,
        }


def build(tmp_path, rollouts, cls=GptOssGRPOTrainer, tools=None, **settings):
    config = GptOssGRPOConfig if cls is GptOssGRPOTrainer else GRPOConfig
    extra = {"log_trajectories": 0, "on_policy_check_steps": 0} if cls is GptOssGRPOTrainer else {}
    settings = {
        **ON_CPU,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_steps": 3,
        "max_completion_length": 32,
        "learning_rate": 1e-2,
        "router_aux_loss_coef": 0.0,
        **extra,
        **settings,
    }
    return cls(
        tiny_model(), length_reward, config(str(tmp_path), **settings), DATA, processing_class=TOKENIZER,
        rollout_func=rollouts, tools=tools,
    )  # fmt: skip


def curve(trainer):
    trainer.train()
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]


def count_forwards(monkeypatch):
    count, forward = [], GRPOTrainer._get_per_token_logps_and_entropies

    def counting(this, *args, **kwargs):
        count.append(torch.is_grad_enabled())
        return forward(this, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
    return count


TRL_OPTIONS = [
    ("token_truncate", 1.02, None),
    ("token_mask", 1.05, 0.95),
    ("sequence_truncate", 1.02, 0.98),
    ("sequence_mask", 1.1, 0.9),
]


@pytest.mark.parametrize(
    ("mode", "clip_max", "clip_min"),
    [pytest.param(*o, marks=() if o[0] == "token_truncate" else pytest.mark.slow) for o in TRL_OPTIONS],
)
def test_one_forward_gives_the_losses_of_trls_two(tmp_path, monkeypatch, mode, clip_max, clip_min):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", NoVllm)
    monkeypatch.setattr(grpo_trainer, "is_vllm_available", lambda: True, raising=False)
    options = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": clip_max,
        "vllm_importance_sampling_clip_min": clip_min,
        "gradient_accumulation_steps": 2,
    }
    count = count_forwards(monkeypatch)
    stock = curve(build(tmp_path, Rollouts(), GRPOTrainer, use_vllm=True, vllm_mode="colocate", **options))
    stock_forwards = list(count)
    count.clear()
    ours = curve(build(tmp_path, Rollouts(), **options))
    assert len(stock) == 3 and any(abs(loss) > 1e-3 for loss, _ in stock)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-6)
    assert count == [True] * 6  # one forward for each micro-batch
    # the control: two without gradient for each generation batch (chunks of a micro-batch inside count once)
    assert stock_forwards.count(True) == 6 and stock_forwards.count(False) == 3
    count.clear()
    uncorrected = curve(build(tmp_path, Rollouts(), rollout_correction_level="off", gradient_accumulation_steps=2))
    with pytest.raises(AssertionError):  # the weights do something
        torch.testing.assert_close(ours, uncorrected, rtol=1e-3, atol=1e-5)


class Recorder:
    """The micro-batches as they reach the correction, the model's log-probs there, and what the loss gave."""

    def __init__(self, monkeypatch):
        self.seen = []
        loss = corrected_loss.CorrectionMixin._compute_loss

        def spy(this, model, inputs):
            logps = this._eval_logps(inputs).double()
            value = loss(this, model, inputs)
            self.seen.append((inputs, logps, value.item(), this.current_gradient_accumulation_steps))
            return value

        monkeypatch.setattr(corrected_loss.CorrectionMixin, "_compute_loss", spy)


def formula_weights(logps, sampling, mask, level, mode, low, high, veto=None, token_cap=None):
    """(weights, keep) in numpy, one row after the other."""
    weights, keep = np.zeros(logps.shape), np.zeros(logps.shape, dtype=bool)
    low, high = low or 0.0, high or math.inf
    for b in range(len(logps)):
        at = [t for t in range(logps.shape[1]) if mask[b, t] and not np.isnan(sampling[b, t])]
        ratio = {t: np.exp(logps[b, t] - sampling[b, t]) for t in at}
        if not at or (veto and min(ratio.values()) < veto):
            continue
        product = np.prod([ratio[t] for t in at])
        level_ratio = {"token": None, "sequence": product, "geometric": product ** (1 / len(at))}
        for t in at:
            r = ratio[t] if level == "token" else level_ratio[level]
            if mode == "truncate":
                weights[b, t], keep[b, t] = min(max(r, low), high), True
            elif low <= r <= high:
                weights[b, t], keep[b, t] = r if token_cap is None else min(ratio[t], token_cap), True
            else:
                keep[b, t] = mode == "icepop"
    return weights, keep


def formula_loss(inputs, weights, keep, loss_type, steps, max_length):
    """On-policy GRPO losses: the ratio is 1, so that every token has -advantage * weight."""
    per_token = -inputs["advantages"].numpy()[:, None] * weights
    if loss_type == "grpo":
        return (np.where(keep, per_token, 0).sum(1) / keep.sum(1).clip(1)).mean() / steps
    if loss_type == "bnpo":
        return np.where(keep, per_token, 0).sum() / max(keep.sum(), 1) / steps
    if loss_type == "dr_grpo":
        return np.where(keep, per_token, 0).sum() / (len(keep) * max_length) / steps
    return np.where(keep, per_token, 0).sum() / inputs["num_items_in_batch"].item()  # dapo: all sampled tokens


OPTIONS = [
    {"level": "geometric", "mode": "mask", "low": 0.97, "high": 1.03, "veto": 0.8, "token_cap": 1.01},
    {"level": "geometric", "mode": "icepop", "low": 0.98, "high": 1.02},
    {"level": "token", "mode": "truncate", "low": None, "high": 1.01},
    {"level": "token", "mode": "mask", "low": 0.95, "high": 1.05},
    {"level": "sequence", "mode": "truncate", "low": 0.9, "high": 1.1},
]
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo")


@pytest.mark.parametrize(
    ("options", "loss_type"),
    [
        pytest.param(o, kind, marks=() if kind == "dapo" or i == 0 else pytest.mark.slow)
        for (i, o), kind in itertools.product(enumerate(OPTIONS), LOSSES)
    ],
    ids=str,
)
def test_losses_against_the_formula(tmp_path, monkeypatch, options, loss_type):
    recorder = Recorder(monkeypatch)
    settings = {f"rollout_correction_{name}": value for name, value in options.items()}
    rollouts = Rollouts(missing={(0, 1), (2, 0)})
    trainer = build(tmp_path, rollouts, loss_type=loss_type, gradient_accumulation_steps=2, max_steps=2, **settings)
    trainer.train()
    assert len(recorder.seen) == 4
    rejected = 0
    for inputs, logps, loss, steps in recorder.seen:
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool().numpy()
        weights, keep = formula_weights(
            logps.numpy(), inputs["sampling_per_token_logps"].double().numpy(), mask, **options
        )
        rejected += int((mask & ~keep).sum())
        assert loss == pytest.approx(formula_loss(inputs, weights, keep, loss_type, steps, 32), rel=1e-4, abs=1e-6)
        plain = formula_loss(inputs, mask.astype(float), mask, loss_type, steps, 32)
        assert abs(loss - plain) > 1e-5  # the control: without the correction it is another number
    assert rejected > 0


@pytest.mark.parametrize(
    "loss_type",
    ["vespo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cispo", "sapo", "luspo"))],
)
def test_other_losses_take_the_weights_as_trl_does(tmp_path, monkeypatch, loss_type):
    """TRL multiplies the loss of a token by the ratio; this trainer multiplies its advantage."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", NoVllm)
    settings = {"loss_type": loss_type, "vllm_importance_sampling_clip_max": 1.02}
    settings["vllm_importance_sampling_mode"] = "token_truncate"
    if loss_type == "cispo":
        settings["epsilon_high"] = 5.0
    if loss_type == "luspo":
        settings["importance_sampling_level"] = "sequence"
    stock = curve(build(tmp_path, Rollouts(), GRPOTrainer, use_vllm=True, vllm_mode="colocate", **settings))
    ours = curve(build(tmp_path, Rollouts(), **settings))
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-6)


def test_no_gradient_flows_into_the_weights(tmp_path, monkeypatch):
    """With one token per rollout and plain importance weights, d(-A w logp) = -A w dlogp, and not more."""
    gradients = []
    for level in ("token", "off"):
        options = {"rollout_correction_level": level}
        if level == "token":
            options |= {"rollout_correction_mode": "truncate"}
        trainer = build(tmp_path, Rollouts(noise=0.0, shift=lambda i: -math.log(3.0)), max_steps=1, **options)
        gradients.append(curve(trainer)[0][1])
    assert gradients[0] == pytest.approx(3 * gradients[1], rel=1e-4)  # 1 + w more if it flowed


def test_a_batch_that_is_rejected_as_a_whole_changes_nothing_and_ends_nothing(tmp_path, caplog):
    options = {f"rollout_correction_{k}": v for k, v in {"level": "geometric", "mode": "mask", "high": 1.01}.items()}
    for loss_type in LOSSES:
        trainer = build(tmp_path, Rollouts(shift=lambda i: -1.0), loss_type=loss_type, max_steps=2, **options)
        before = [p.clone() for p in trainer.model.parameters()]
        losses = curve(trainer)
        assert losses == [(0.0, 0.0)] * 2
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
        [kept] = {e["rollout_correction/kept_fraction"] for e in trainer.state.log_history if "loss" in e}
        assert kept == 0.0


def test_metrics_at_every_step_are_those_of_the_whole_batch(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    trainer = build(tmp_path, Rollouts(missing={(1, 3)}), gradient_accumulation_steps=2)
    trainer.train()
    entries = [e for e in trainer.state.log_history if "loss" in e]
    assert len(entries) == 3
    for step, entry in enumerate(entries):
        log_ratio, rows = [], 0
        for inputs, logps, _, _ in recorder.seen[2 * step : 2 * step + 2]:
            mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
            delta = (logps - inputs["sampling_per_token_logps"].double())[mask]
            log_ratio += delta[~delta.isnan()].tolist()
            rows += len(mask)
        log_ratio = np.array(log_ratio)
        ratio = np.exp(log_ratio)
        expected = {
            "kl_k1": -log_ratio.mean(),
            "kl_k3": (ratio - 1 - log_ratio).mean(),
            "chi2_token": (ratio**2).mean() - 1,
            "ess_token": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
            "ratio_max": ratio.max(),
            "sequences": rows,
        }
        for name, value in expected.items():
            assert entry[f"rollout_correction/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-6), name
        for name in ("log_ppl_diff", "ess_sequence", "kept_fraction", "untrusted_fraction"):
            assert math.isfinite(entry[f"rollout_correction/{name}"])


def test_a_small_sample_size_is_said_once(tmp_path, caplog):
    options = {"rollout_correction_level": "sequence", "rollout_correction_mode": "truncate"}
    options |= {"per_device_train_batch_size": 8}
    with caplog.at_level(logging.WARNING, logger="trl_gptoss"):
        build(tmp_path, Rollouts(noise=0.5), **options).train()
    said = [r.getMessage() for r in caplog.records if "ess_sequence" in r.getMessage()]
    assert len(said) == 1 and "little of the batch is left" in said[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trl_gptoss"):
        build(tmp_path, Rollouts(noise=0.5), rollout_correction_min_ess=0.0, **options).train()
    assert not [r for r in caplog.records if "ess_sequence" in r.getMessage()]


def test_a_level_without_log_probs_is_refused_and_auto_does_without(tmp_path):
    options = {"rollout_correction_level": "token", "rollout_correction_mode": "truncate"}
    with pytest.raises(ValueError, match="reports no log-probs"):
        build(tmp_path, Rollouts(has_logps=False), **options).train()
    trainer = build(tmp_path, Rollouts(has_logps=False), max_steps=1)
    trainer.train()
    assert not any("rollout_correction/kl_k3" in e for e in trainer.state.log_history)


def test_off_policy_steps_use_the_stored_log_probs(tmp_path, monkeypatch):
    """Second iteration: the weight is generating policy / sampler, not current policy / sampler."""
    seen = []
    correct = corrected_loss.CorrectionMixin._correct

    def spy(this, logps, inputs):
        seen.append((logps.clone(), inputs, "old_per_token_logps" in inputs))
        return correct(this, logps, inputs)

    monkeypatch.setattr(corrected_loss.CorrectionMixin, "_correct", spy)
    trainer = build(tmp_path, Rollouts(), num_iterations=2, max_steps=2)
    trainer.train()
    (first, inputs, stored_first), (second, _, stored_second) = seen
    assert (stored_first, stored_second) == (False, True)
    mask = inputs["completion_mask"].bool()
    torch.testing.assert_close(first[mask], second[mask], rtol=0, atol=1e-5)
    now = trainer._eval_logps(inputs)
    assert (now - first)[mask].abs().max() > 1e-3  # the control: the weights have moved


def test_evaluations_are_not_corrected(tmp_path):
    losses = []
    narrow = {"level": "token", "mode": "mask", "low": 0.9999, "high": 1.0001}  # next to nothing is left
    for options in ({"level": "off"}, narrow):
        options = {f"rollout_correction_{name}": value for name, value in options.items()}
        trainer = build(tmp_path, Rollouts(noise=0.5), per_device_eval_batch_size=4, **options)
        metrics = trainer.evaluate(DATA.select(range(4)))
        assert not [name for name in metrics if "rollout_correction" in name]
        losses.append(metrics["eval_loss"])
    assert losses[0] == losses[1] != 0.0


class KnownSampler:
    """The engine's own backend, with log-probs that are the model's plus `shift` on one channel's tokens."""

    def __init__(self, script, model, shift):
        self.script, self.model, self.shift = script, model, shift
        self.collective, self.sampling = False, SamplingOptions()

    def generate(self, prompts, max_new_tokens, sampling=None):
        # by the rollout's seed, because rollouts advance in no fixed order
        draws = [random.Random(1000 * options.seed + len(prompt)) for prompt, options in zip(prompts, sampling)]
        rows = zip(prompts, draws, max_new_tokens, strict=True)
        samples = [Sample(ids=self.script(prompt, rng)[:n]) for prompt, rng, n in rows]
        for prompt, sample in zip(prompts, samples):
            logps = plain_logps(self.model, prompt, sample.ids).tolist()
            channels = channel_ids(sample.ids, [1] * len(sample.ids), TOKENIZER)
            sample.logps = [p - self.shift * (CHANNEL_NAMES[c] == "final") for p, c in zip(logps, channels)]
        return samples


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first.
        b: second.
    """
    return a + b


def call_then_answer(prompt, rng):
    write = HarmonyWriter(TOKENIZER)
    if write.vocabulary.call not in prompt:
        return write.analysis("hm") + write.call("add", a=rng.randrange(9), b=1)
    return write.final(str(rng.randrange(99)))


@pytest.mark.parametrize("level", ["auto", pytest.param("token", marks=pytest.mark.slow)])
def test_the_mismatch_is_told_by_channel(tmp_path, level):
    explicit = {"rollout_correction_mode": "truncate", "rollout_correction_high": 2.0} if level == "token" else {}
    trainer = build(tmp_path, None, tools=[add], max_completion_length=400, rollout_correction_level=level, **explicit)
    trainer._engine.backend = KnownSampler(call_then_answer, trainer.model, shift=0.3)
    trainer.train()
    for entry in (e for e in trainer.state.log_history if "loss" in e):
        assert entry["rollout_correction/abs_log_ratio/final"] == pytest.approx(0.3, abs=1e-4)
        assert entry["rollout_correction/abs_log_ratio/analysis"] < 1e-4
        assert entry["rollout_correction/abs_log_ratio/commentary"] < 1e-4
        fractions = [entry[f"rollout_correction/token_fraction/{name}"] for name in CHANNEL_NAMES]
        assert sum(fractions) == pytest.approx(1.0)
    # The policy itself samples (as far as the trainer knows): "auto" measures and does not touch the loss.
    reference = build(tmp_path, None, tools=[add], max_completion_length=400, rollout_correction_level="off")
    reference._engine.backend = KnownSampler(call_then_answer, reference.model, shift=0.3)
    reference.train()
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (trainer, reference)]
    assert (losses[0] == losses[1]) == (level == "auto")
