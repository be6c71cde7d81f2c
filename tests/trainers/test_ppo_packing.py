"""PPO on packed rows and in parts of a micro-batch is PPO on padded rows, for policy and critic."""

import random

import pytest
import torch
from peft import LoraConfig
from ppo_run import CRITICS, build, critic_weights, logged, policy_weights
from tiny_policy import tiny_model

from trl_gptoss.trainers.critic_rows import CriticRows
from trl_gptoss.trainers.value_head import SeparateCritic, split_values


def model():
    found = tiny_model()
    found.set_attn_implementation("sink_fa3")
    return found


def by_prompt(prompt: list[int], _: random.Random) -> list[int]:
    rng = random.Random(str(prompt))
    return [rng.randrange(256) for _ in range(rng.choice((1, 2, 12)))]


def run(output_dir, critic, **settings):
    trainer = build(
        output_dir, critic=critic, model=model(), script=by_prompt, max_steps=3, critic_warmup_steps=1, optim="sgd",
        lora=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if critic == "lora" else None, max_rollout_tokens=12,
        learning_rate=0.5, critic_learning_rate=0.2, bootstrap_truncated=True, steps_per_generation=2, ppo_epochs=2,
        on_policy_check_steps=0, **settings,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("critic", CRITICS)
def test_packed_rows_and_parts_of_them_train_the_same(tmp_path, critic):
    padded = run(tmp_path / "padded", critic, padding_free=False)
    others = [run(tmp_path / "packed", critic, padding_free=True)]
    if critic != "shared":
        # Prompts have about 60 tokens: a row or two at a time.
        others.append(run(tmp_path / "parts", critic, max_tokens_per_micro_batch=150))
        assert max(len(others[-1]._turns(x)) for x in others[-1]._buffered_inputs) > 1
    for other in others:
        assert other._padding_free and not padded._padding_free
        for weights in (policy_weights, critic_weights):
            for name, value in weights(padded).items():
                torch.testing.assert_close(
                    weights(other)[name], value, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: n + m
                )
        for name in ("value_loss", "policy_loss", "explained_variance", "clip_ratio/value_mean", "ratio/std"):
            assert logged(other, name) == pytest.approx(logged(padded, name), rel=1e-3, abs=1e-5), name


def test_a_shared_critic_refuses_parts(tmp_path):
    with pytest.raises(ValueError, match="Use critic='separate' or 'lora'"):
        build(tmp_path, critic="shared", max_tokens_per_micro_batch=100)


def test_values_of_packed_rows_are_those_of_padded_ones():
    """Prompts and completions of several lengths, one completion and one whole row of them empty."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(5, 4), (3, 0), (0, 0), (6, 2), (1, 3)]
    filled = torch.tensor([True, True, False, True, True])
    prompt_mask, completion_mask = torch.zeros(5, 6, dtype=torch.long), torch.zeros(5, 4, dtype=torch.long)
    for row, (prompt, completion) in enumerate(lengths):
        prompt_mask[row, 6 - prompt :] = 1
        completion_mask[row, :completion] = 1
    inputs = {
        "prompt_ids": torch.randint(0, 256, (5, 6), generator=generator),
        "completion_ids": torch.randint(0, 256, (5, 4), generator=generator),
        "prompt_mask": prompt_mask,
        "completion_mask": completion_mask,
    }
    critic = SeparateCritic(model().model)
    with torch.no_grad():
        critic.head.weight.normal_(generator=generator)
    found = {}
    for kind, rows in (("padded", CriticRows(inputs)), ("packed", CriticRows(inputs, lengths))):
        values = rows.values(critic.head, critic.backbone(**rows.model_inputs()).last_hidden_state)
        assert values.shape == (5, 5)
        found[kind] = split_values(values, completion_mask)
    for padded, packed in zip(found["padded"], found["packed"]):
        kept = completion_mask.bool() if padded.ndim == 2 else filled
        torch.testing.assert_close(packed[kept], padded[kept], atol=1e-5, rtol=1e-5)
    assert (found["packed"][1] - found["packed"][1].roll(1)).abs().min() > 1e-3  # control: rows differ
