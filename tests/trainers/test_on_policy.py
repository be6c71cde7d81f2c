"""The ratio, seen from inside of TRL's loss: what reaches `torch.exp`, and under which weights."""

import itertools

import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset
from peft import LoraConfig
from tiny_policy import byte_tokenizer, tiny_model
from trl import GRPOTrainer

from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.schedule import check_on_policy_schedule, is_always_on_policy

TOKENIZER = byte_tokenizer()
DATA = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(64)])


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


def fingerprint(model):
    return tuple(p.detach().double().sum().item() for p in model.parameters() if p.requires_grad)


class Spy:
    """Watches a trainer from outside: the weights that generated, those of each micro-batch, and the loss's ratio."""

    def __init__(self, trainer, monkeypatch):
        self.trainer = trainer
        self.generating = None
        self.generating_state = None
        self.steps = []  # (on-policy by the weights, max |log ratio| in the loss, old log-probs, inputs)
        generate, loss = GRPOTrainer._generate_and_score_completions, GRPOTrainer._compute_loss
        exp = torch.exp

        def spy_generate(this, inputs):
            self.generating = fingerprint(this.model)
            self.generating_state = {k: v.clone() for k, v in this.model.state_dict().items()}
            return generate(this, inputs)

        def spy_loss(this, model, inputs):
            shape, seen = inputs["completion_ids"].shape, []

            def spy_exp(x, *args, **kwargs):
                if x.shape == shape:
                    seen.append(x.detach())
                return exp(x, *args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(torch, "exp", spy_exp)
                result = loss(this, model, inputs)
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            [log_ratio] = seen  # without a KL term the loss takes one exponential of this shape
            on_policy = self.generating == fingerprint(this.model)
            largest = (log_ratio * mask).abs().max().item()
            self.steps.append((on_policy, largest, inputs.get("old_per_token_logps"), inputs, self.generating_state))
            return result

        monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", spy_generate)
        monkeypatch.setattr(GRPOTrainer, "_compute_loss", spy_loss)


def build(tmp_path, *, dropout=0.0, dtype=torch.float32, lora=True, **settings):
    settings = {
        **ON_CPU,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_steps": 4,
        "max_rollout_tokens": 6,
        "learning_rate": 1e-2,
        "bf16": dtype == torch.bfloat16,
        "log_trajectories": 0,
        **settings,
    }
    peft_config = None
    if lora:
        peft_config = LoraConfig(
            r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
    return GptOssGRPOTrainer(
        tiny_model(dtype=dtype),
        length_reward,
        GptOssGRPOConfig(str(tmp_path), **settings),
        DATA,
        processing_class=TOKENIZER,
        peft_config=peft_config,
    )


GRID = list(itertools.product([0.0, 0.1], [1, 2], ["aligned", "misaligned"], [torch.float32, torch.bfloat16]))


@pytest.mark.parametrize(("dropout", "num_iterations", "alignment", "dtype"), GRID)
def test_the_ratio_is_exactly_one_on_policy(tmp_path, monkeypatch, dropout, num_iterations, alignment, dtype):
    accumulation = 2 * num_iterations if alignment == "aligned" else 3
    trainer = build(
        tmp_path,
        dropout=dropout,
        dtype=dtype,
        num_iterations=num_iterations,
        steps_per_generation=2,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
    )
    spy = Spy(trainer, monkeypatch)
    trainer.train()
    on = [largest for on_policy, largest, *_ in spy.steps if on_policy]
    off = [largest for on_policy, largest, *_ in spy.steps if not on_policy]
    assert len(on) + len(off) == 2 * accumulation
    assert max(on) == 0.0
    assert bool(off) == (alignment == "misaligned")
    assert not off or max(off) > 0.0  # there the stored log-probs are used
    forced = [e["on_policy/forced"] for e in trainer.state.log_history if "on_policy/forced" in e]
    assert sum(forced) / len(forced) == pytest.approx(len(on) / len(spy.steps))
    largest = max(e["on_policy/max_log_ratio"] for e in trainer.state.log_history if "on_policy/forced" in e)
    assert (largest == 0.0) == (not off)


def test_control_trl_is_off_by_more_than_a_thousandth(tmp_path, monkeypatch):
    trainer = build(
        tmp_path, dropout=0.1, on_policy="off", steps_per_generation=2, gradient_accumulation_steps=3, num_iterations=1
    )
    spy = Spy(trainer, monkeypatch)
    trainer.train()
    assert max(largest for on_policy, largest, *_ in spy.steps if on_policy) > 1e-3


@torch.no_grad()
def plain_logps(state, inputs):
    """Log-probs of the completion straight from the logits of another model that has the given weights."""
    model = tiny_model(seed=1).eval()
    model.load_state_dict(state)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logps = model(ids, attention_mask=mask, use_cache=False).logits.double().log_softmax(-1)
    width = inputs["completion_ids"].size(1)
    return logps[:, -width - 1 : -1].gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


def step_in_backward(trainer):
    """As DeepSpeed does: behind its `backward` of the last micro-batch the weights are new already."""

    def backward(loss, **kwargs):
        loss.backward()
        if trainer.accelerator.sync_gradients:
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

    trainer.accelerator.backward = backward


@pytest.mark.parametrize(
    ("spg", "num_iterations", "accumulation", "engine"),
    [
        (2, 2, 1, False),
        (2, 2, 1, True),
        (4, 1, 3, False),
        *(pytest.param(*c, False, marks=pytest.mark.slow) for c in ((4, 1, 1), (1, 3, 1), (2, 2, 3), (4, 2, 2))),
    ],
)
def test_later_steps_use_the_log_probs_of_the_generating_weights(
    tmp_path, monkeypatch, spg, num_iterations, accumulation, engine
):
    trainer = build(
        tmp_path,
        lora=False,
        steps_per_generation=spg,
        num_iterations=num_iterations,
        gradient_accumulation_steps=accumulation,
        max_steps=4,
        learning_rate=1e-3,
    )
    spy = Spy(trainer, monkeypatch)
    current = []
    loss = GRPOTrainer._compute_loss

    def keep_weights(this, model, inputs):
        current.append({k: v.clone() for k, v in this.model.state_dict().items()})
        return loss(this, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", keep_weights)
    if engine:
        step_in_backward(trainer)
    trainer.train()
    off = [(step, now) for step, now in zip(spy.steps, current) if not step[0]]
    assert off
    moved = 0.0
    for (_, _, old, inputs, generating), now in off:
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        right = plain_logps(generating, inputs)
        assert (old - right)[mask].abs().max() < 2e-5
        moved = max(moved, (old - plain_logps(now, inputs))[mask].abs().max().item())
    assert moved > 1e-3  # the control: log-probs of the weights of that step are something else


def test_no_forward_is_wasted(tmp_path, monkeypatch):
    """Aligned: no second forward at all. Misaligned: one per slice that is visited after a step."""
    for spg, accumulation, expected in ((2, 2, 0), (4, 2, 2), (4, 3, None)):
        trainer = build(
            tmp_path,
            steps_per_generation=spg,
            gradient_accumulation_steps=accumulation,
            max_steps=4 if accumulation != 2 or spg != 4 else 2,
            on_policy_check_steps=0,
        )
        count = [0]
        forward = GRPOTrainer._get_per_token_logps_and_entropies

        def counting(this, *args, _count=count, _forward=forward, **kwargs):
            _count[0] += not torch.is_grad_enabled()
            return _forward(this, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
            trainer.train()
        if expected is None:  # micro-batches 3 | 6 7 | 9 10 11 of three generations come after a step
            expected = 1 + 2 + 3
        assert count[0] == expected


def test_the_recomputation_shows_what_the_ratio_hides(tmp_path):
    def measured(**settings):
        trainer = build(tmp_path, on_policy_check_steps=2, gradient_accumulation_steps=2, **settings)
        trainer.train()
        key = "on_policy/max_log_ratio_recomputed"
        return {e["step"]: e[key] for e in trainer.state.log_history if e.get(key) is not None}

    assert measured(dropout=0.0) == {1: 0.0, 3: 0.0}  # at optimizer steps 0 and 2, logged after them
    noisy = measured(dropout=0.1)
    assert set(noisy) == {1, 3} and min(noisy.values()) > 1e-3


def test_force_refuses_settings_with_off_policy_steps(tmp_path):
    build(tmp_path, on_policy="force", steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="gradient_accumulation_steps to a multiple of 4 .*for example 12"):
        build(tmp_path, on_policy="force", steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=3)


def test_the_schedule_against_a_simulation():
    for accumulation, spg, iterations in itertools.product(range(1, 7), range(1, 5), range(1, 4)):
        updates, generated_at, always = 0, None, True
        for micro in range(200):
            if micro % (spg * iterations) == 0:
                generated_at = updates
            always &= generated_at == updates
            updates += (micro + 1) % accumulation == 0
        assert is_always_on_policy(accumulation, spg, iterations) == always
        if always:
            check_on_policy_schedule(accumulation, spg, iterations)
        else:
            with pytest.raises(ValueError, match="on_policy"):
                check_on_policy_schedule(accumulation, spg, iterations)


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        pytest.param({"loss_type": "cispo", "epsilon_high": 5.0}, marks=pytest.mark.slow),
        pytest.param({"loss_type": "dr_grpo"}, marks=pytest.mark.slow),
        pytest.param({"loss_type": "bnpo", "delta": 2.0}, marks=pytest.mark.slow),
        pytest.param({"loss_type": "sapo"}, marks=pytest.mark.slow),
        {"loss_type": "vespo"},
        pytest.param({"loss_type": "luspo", "importance_sampling_level": "sequence"}, marks=pytest.mark.slow),
        {"off_policy_mask_threshold": 0.1},
        pytest.param({"top_entropy_quantile": 0.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_without_dropout_on_policy_gradients_are_those_of_trl(tmp_path, settings):
    """The override changes nothing where a second forward would give the same numbers."""
    gradients = []
    for on_policy in ("auto", "off"):
        trainer = build(
            tmp_path,
            on_policy=on_policy,
            steps_per_generation=2,
            gradient_accumulation_steps=3,  # misaligned: TRL computes old log-probs
            max_steps=2,
            **settings,
        )
        trainer.train()
        gradients.append([(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert len(gradients[0]) == 2 and any(g > 0 for _, g in gradients[0])
