"""The PPO trainer: its gradient, its ratio, its mini-batches, its critics, and what they leave alone."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from ppo_run import (
    CRITICS,
    TOKENIZER,
    build,
    critic_weights,
    logged,
    policy_weights,
    random_bytes,
    settings_of,
    some_reward,
)
from scripted_backend import HarmonyWriter, ScriptedBackend
from tiny_policy import tiny_model
from transformers import TrainerCallback

from trl_gptoss.trainers import GptOssGRPOConfig, GptOssPPOTrainer
from trl_gptoss.trainers.critics import load_backbone
from trl_gptoss.trainers.policy_weights import PolicyWeights
from trl_gptoss.trajectory import StopReason

WRITE = HarmonyWriter(TOKENIZER)


class KeepGradients(TrainerCallback):
    """Gradients of each optimizer step, before clipping would matter (`max_grad_norm=0`)."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        named = [(n, p.grad) for n, p in model.named_parameters() if ".critic." not in n]
        self.seen.append({n: gradient.clone() for n, gradient in named if gradient is not None})


def gradients(output_dir, **settings):
    keep = KeepGradients()
    trainer = build(output_dir, callbacks=[keep], max_grad_norm=0.0, **settings)
    trainer.train()
    return keep.seen, trainer


# ---- gradient ----


@pytest.mark.parametrize("critic", CRITICS)
def test_without_a_baseline_the_gradient_is_reinforce(tmp_path, critic):
    """One step, values of 0, no whitening: -sum(R * grad log pi) / tokens, one sequence at a time with eager attention."""
    rollouts = []

    def reward(trajectories, completion_ids, **kwargs):
        rewards = some_reward(completion_ids)
        rollouts.extend(zip([t.prompt_ids for t in trajectories], completion_ids, rewards))
        return rewards

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if critic == "lora" else None
    [found], _ = gradients(
        tmp_path, reward=reward, script=random_bytes, critic=critic, max_steps=1, whiten_advantages=False,
        max_rollout_tokens=8, per_device_train_batch_size=4, gradient_accumulation_steps=2, lora=lora,
        **({"critic_detach": True} if critic == "shared" else {}),
    )  # fmt: skip
    policy = tiny_model()
    if lora is not None:
        torch.manual_seed(0)
        policy = build(tmp_path, critic="lora", lora=lora).model
    policy.set_attn_implementation("eager")
    loss, tokens = 0.0, 0
    for prompt, completion, paid in rollouts:
        logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1)[range(len(completion)), completion]
        loss, tokens = loss - paid * logps.sum(), tokens + len(completion)
    (loss / tokens).backward()
    expected = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    assert len(rollouts) == 8 and expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    largest = max(g.abs().max().item() for g in expected.values())
    assert largest > 1e-3  # control: 1e-6 is small beside them


def test_micro_batches_of_any_size_are_one_mini_batch(tmp_path, monkeypatch):
    """Completions of 1 to 8 tokens: 8 at once, or in 4 micro-batches of 2."""
    for mode in ("token_mean", "sequence_mean", "fixed_length"):
        settings = {"script": random_bytes, "max_steps": 1, "max_rollout_tokens": 8, "loss_normalization": mode}
        [whole], _ = gradients(tmp_path, per_device_train_batch_size=8, **settings)
        [parts], trainer = gradients(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, **settings
        )
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], atol=1e-6, rtol=1e-4)
        # The control: every micro-batch by its own counts.
        control = build(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, callbacks=[keep := KeepGradients()],
            max_grad_norm=0.0, **settings,
        )  # fmt: skip
        monkeypatch.setattr(control, "_count", lambda slices, name, own=control._count: _OwnCounts(own(slices, name)))
        control.train()
        difference = max((keep.seen[0][n] - whole[n]).abs().max().item() for n in whole)
        # Completions are as many in each micro-batch, tokens are not.
        assert difference > 1e-3 if mode == "token_mean" else difference < 1e-6


class _OwnCounts:
    def __init__(self, normalizer):
        self.normalizer = normalizer

    def __call__(self, loss, mask):
        n = self.normalizer
        return type(n).from_mask(mask, n.mode, length=n.length)(loss, mask) / 4


def test_the_entropy_bonus_and_the_kl_in_the_loss_change_the_gradient_as_written(tmp_path):
    """Both against autograd on the model's own logits."""
    settings = {"script": random_bytes, "max_steps": 1, "reward": lambda prompts, **k: [1.0] * len(prompts)}
    # All advantages are equal, so whitening leaves 0 and only the extra term has a gradient.
    [found], trainer = gradients(tmp_path, entropy_coef=0.5, **settings)
    assert logged(trainer, "policy_loss") == [0.0]
    policy, rows = tiny_model(), trainer._buffered_inputs[0]
    logits = policy(
        torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1),
        attention_mask=torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1),
    ).logits[:, -rows["completion_ids"].shape[1] - 1 : -1]
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    (-0.5 * entropy[rows["policy_mask"]].mean()).backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-3)


# ---- passes of the critic ----


def test_critic_epochs_and_mini_batches_are_the_updates_they_say(tmp_path):
    """Three passes in two groups of two micro-batches, against gradient descent that is written out, row by row."""
    start = tiny_model()
    settings = {
        "script": random_bytes, "max_rollout_tokens": 8, "per_device_train_batch_size": 2, "max_steps": 1,
        "gradient_accumulation_steps": 4, "optim": "sgd", "critic_learning_rate": 0.02, "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    trainer = build(tmp_path, model=start, critic_epochs=3, critic_mini_batches=2, **settings)
    expected = copy.deepcopy(trainer.critic.model)
    trainer.train()

    optimizer = torch.optim.SGD(expected.parameters(), lr=0.02)
    slices = trainer._buffered_inputs
    updates = 0
    for _ in range(3):
        for group in (slices[:2], slices[2:]):
            loss, tokens = 0.0, sum(int(s["policy_mask"].sum()) for s in group)
            for s in group:
                for row in range(2):
                    ids = torch.cat([x[row][m[row].bool()] for x, m in rows_of(s)])
                    length = int(s["completion_mask"][row].sum())
                    values = expected(ids[None], torch.ones_like(ids)[None], length)[0, :-1]
                    loss = loss + 0.5 * (values - s["returns"][row, :length]).square().sum()
            optimizer.zero_grad()
            (loss / tokens).backward()
            optimizer.step()
            updates += 1
    assert updates == 6
    start_of = dict(expected.named_parameters())
    for name, value in trainer.critic.model.named_parameters():
        torch.testing.assert_close(value, start_of[name], atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    # control: a single pass ends somewhere else
    once = build(tmp_path, model=tiny_model(), **settings)
    once.train()
    assert (once.critic.head.weight - trainer.critic.head.weight).abs().max() > 1e-4


def trained(output_dir, **settings):
    trainer = build(output_dir, **settings)
    trainer.train()
    return trainer


def rows_of(inputs):
    return [(inputs[f"{part}_ids"], inputs[f"{part}_mask"]) for part in ("prompt", "completion")]


@pytest.mark.parametrize("critic", ["separate", "lora"])
def test_passes_of_the_critic_leave_the_policy_as_it_would_be(tmp_path, critic):
    """On the first batch, whose advantages come from the untrained critic; and the ratio stays 1 all the time."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if critic == "lora" else None
    settings = {"critic": critic, "lora": lora, "gradient_accumulation_steps": 2, "script": random_bytes}
    once, more = (
        trained(tmp_path, max_steps=1, critic_epochs=n, critic_mini_batches=1 + (n > 1), **settings) for n in (1, 3)
    )
    for name, value in policy_weights(once).items():
        assert torch.equal(value, policy_weights(more)[name]), name
    critics = [torch.cat([p.flatten() for p in critic_weights(t).values()]) for t in (once, more)]
    assert (critics[0] - critics[1]).abs().max() > 1e-4
    assert all(p.grad is None for p in critic_weights(more).values())
    longer = trained(tmp_path, max_steps=4, critic_epochs=2, critic_warmup_steps=1, on_policy="force", **settings)
    assert logged(longer, "ratio/std") == [0.0] * 3 and logged(longer, "critic/warmup") == [1, 0, 0, 0]


def test_the_schedule_of_the_critic_counts_steps_and_not_updates(tmp_path):
    rates = []
    for epochs in (1, 3):
        trainer = build(tmp_path, max_steps=4, critic_epochs=epochs, critic_learning_rate=0.1)
        trainer.train()
        rates.append(logged(trainer, "critic/learning_rate"))
    assert rates[0] == pytest.approx(rates[1]) and rates[0] == pytest.approx([0.1, 0.075, 0.05, 0.025])


# ---- the ratio, mini-batches, epochs ----


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(tmp_path):
    trainer = build(tmp_path, max_steps=3, gradient_accumulation_steps=2, on_policy="force", dual_clip=3.0)
    trainer.train()
    assert logged(trainer, "ratio/mean") == [1.0] * 3 and logged(trainer, "ratio/std") == [0.0] * 3
    assert logged(trainer, "approx_kl") == [0.0] * 3 and logged(trainer, "on_policy/max_log_ratio") == [0.0] * 3
    for name in ("low", "high", "dual"):
        assert logged(trainer, f"clip_ratio/{name}_mean") == [0.0] * 3


@pytest.mark.parametrize("critic", CRITICS)
def test_later_mini_batches_and_epochs_compare_with_the_policy_that_sampled(tmp_path, critic):
    """Two mini-batches, two epochs: the first step is on-policy, the other three are not."""
    trainer = build(tmp_path, steps_per_generation=2, ppo_epochs=2, max_steps=8, critic=critic)
    trainer.train()
    assert logged(trainer, "on_policy/forced") == [1, 0, 0, 0] * 2
    deviation = logged(trainer, "ratio/std")
    assert deviation[0] == deviation[4] == 0 and all(d > 1e-4 for i, d in enumerate(deviation) if i % 4)
    clipped = [a + b for a, b in zip(logged(trainer, "clip_ratio/low_mean"), logged(trainer, "clip_ratio/high_mean"))]
    assert clipped[0] == clipped[4] == 0 and max(clipped) > 0


# ---- warm-up ----


@pytest.mark.parametrize("critic", CRITICS)
def test_the_warm_up_trains_the_critic_only(tmp_path, critic, caplog):
    trainer = build(
        tmp_path, critic=critic, critic_warmup_steps=3, max_steps=3, steps_per_generation=2, weight_decay=0.1
    )
    policy, before = policy_weights(trainer), critic_weights(trainer)
    trainer.train()
    for name, value in policy_weights(trainer).items():
        assert torch.equal(value, policy[name]), name
    moved = [n for n, value in critic_weights(trainer).items() if not torch.equal(value, before[n])]
    assert "head.weight" in moved and (critic == "shared" or len(moved) > 2)
    assert logged(trainer, "critic/warmup") == [1.0] * 3
    assert "critic_warmup_steps=3 and the run has 3 optimizer steps" in caplog.text


def test_the_first_step_after_the_warm_up_is_on_policy(tmp_path, caplog):
    """The warm-up ends inside of a generation batch, whose weights are still those that sampled it."""
    trainer = build(tmp_path, critic_warmup_steps=1, max_steps=4, steps_per_generation=2, ppo_epochs=2)
    trainer.train()
    assert logged(trainer, "on_policy/forced") == [1, 0, 0] and "critic_warmup_steps" not in caplog.text
    assert logged(trainer, "ratio/std")[0] == 0 and logged(trainer, "ratio/std")[1] > 1e-4


# ---- KL ----


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """TRL loads the reference from where the policy came from."""
    folder = tmp_path_factory.mktemp("policy")
    tiny_model().save_pretrained(folder)
    return {"model": str(folder), "model_init_kwargs": {"dtype": "float32"}}


def move(model, part=""):
    """Away from the reference, which otherwise is where the policy starts."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("critic", CRITICS)
def test_a_penalty_in_the_reward_lowers_the_return_by_what_it_measured(tmp_path, saved_model, critic):
    trainer = build(
        tmp_path, critic=critic, max_steps=1, kl_placement="reward", script=random_bytes, beta=0.5, on_policy="off",
        reward=lambda prompts, **k: [1.0] * len(prompts), **saved_model,
    )  # fmt: skip
    move(trainer.model if critic == "lora" else trainer.ref_model, "lora_B.default" if critic == "lora" else "")
    add_targets = trainer._add_targets

    def expected_kl(output):
        trainer._chosen = trainer._eval_logps(output) - output["ref_per_token_logps"]
        add_targets(output)
        torch.testing.assert_close(output["reward_kl"], trainer._chosen * output["policy_mask"], atol=1e-5, rtol=1e-4)

    trainer._add_targets = expected_kl
    trainer.train()
    rows = trainer._buffered_inputs[0]
    mask = rows["policy_mask"]
    assert logged(trainer, "kl") == pytest.approx([(rows["reward_kl"] * mask).sum().item() / mask.sum().item()])
    # gamma = lambda = 1: the return of the first token is everything that is paid.
    first = rows["returns"][torch.arange(4), mask.int().argmax(1)]
    torch.testing.assert_close(first, 1 - 0.5 * (rows["reward_kl"] * mask).sum(1), atol=1e-5, rtol=1e-5)
    assert logged(trainer, "kl")[0] != 0 and logged(trainer, "kl_coef") == [0.5]


def test_the_adaptive_coefficient_moves_after_each_step(tmp_path, saved_model):
    trainer = build(
        tmp_path, beta=0.1, max_steps=4, kl_controller="adaptive", kl_target=1e-3, kl_horizon=8, script=random_bytes,
        ppo_epochs=2, **saved_model,
    )  # fmt: skip
    trainer.train()
    coefficient, expected = 0.1, []
    for kl in logged(trainer, "kl"):
        expected.append(coefficient)
        coefficient *= 1 + min(max(kl / 1e-3 - 1, -0.2), 0.2) * 4 / 8
    assert logged(trainer, "kl_coef") == pytest.approx(expected) and expected[-1] != 0.1
    assert trainer.kl_term.coef == pytest.approx(coefficient)


# ---- truncation, turns, unscorable rows ----


def short_or_cut(prompt, rng):
    return WRITE.final("ok") if rng.random() < 0.5 else WRITE.text("z" * 50)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_cut_off_rollout_goes_on_with_the_value_of_its_last_state(tmp_path, bootstrap):
    trainer = build(
        tmp_path, script=short_or_cut, max_rollout_tokens=24, max_steps=1, bootstrap_truncated=bootstrap,
        per_device_train_batch_size=8, reward=lambda prompts, **k: [1.0] * len(prompts), whiten_advantages=False,
    )  # fmt: skip
    with torch.no_grad():
        trainer.critic.head.bias.fill_(0.5)  # a value of 0.5 everywhere
    trainer.train()
    cut = torch.tensor([row["trajectories"].stop_reason == StopReason.TRUNCATED for row in trainer._rows])
    rows = trainer._buffered_inputs[0]  # shuffled: compare as sets
    returns = rows["returns"][torch.arange(8), rows["policy_mask"].int().argmax(1)]
    assert 0 < cut.sum() < 8
    expected = torch.where(cut, 1.5 if bootstrap else 1.0, 1.0)
    torch.testing.assert_close(returns.sort().values, expected.sort().values)


def call_then_answer(prompt, rng):
    vocabulary = WRITE.vocabulary
    results = [i for i, t in enumerate(prompt) if t == vocabulary.start]
    answered = any(vocabulary.decode(prompt[i + 1 : i + 10]).startswith("functions") for i in results)
    return WRITE.final("3") if answered else WRITE.call("add", a=1, b=2)


def test_turns_are_steps_and_tool_results_are_not(tmp_path):
    for level, per_rollout in (("token", None), ("turn", 2)):
        trainer = build(
            tmp_path, script=call_then_answer, max_rollout_tokens=400, max_steps=1, gae_level=level, gae_gamma=0.5,
            reward=lambda prompts, **k: [1.0] * len(prompts), whiten_advantages=False,
        )  # fmt: skip
        trainer.train()
        rows = trainer._buffered_inputs[0]
        sampled = rows["completion_mask"].bool() & rows["tool_mask"].bool()
        assert torch.equal(rows["policy_mask"], sampled) and (rows["completion_mask"].bool() & ~sampled).any()
        assert not rows["returns"][~sampled].any() and not rows["advantages"][~sampled].any()
        if per_rollout:
            assert rows["value_mask"].sum(1).tolist() == [2] * 4
            assert sorted(rows["advantages"][0].unique().tolist()) == [0.0, 0.5, 1.0]


def test_rollouts_without_a_score_are_not_trained_on(tmp_path):
    def reward(prompts, **kwargs):
        return [None if i % 2 else 1.0 for i in range(len(prompts))]

    trainer = build(tmp_path, reward=reward, max_steps=1, per_device_train_batch_size=8)
    trainer.train()
    rows = trainer._buffered_inputs[0]
    assert rows["policy_mask"].any(1).sum() == 4 and rows["value_mask"].any(1).sum() == 4


def test_a_failed_reward_function_costs_its_batch_only(tmp_path):
    calls = [0]

    def reward(completion_ids, **kwargs):
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("judge is down")
        return some_reward(completion_ids)

    trainer = build(tmp_path, reward=reward, max_steps=3)
    trainer.train()
    losses = logged(trainer, "value_loss")
    assert len(losses) == 3 and losses[1] == 0 and losses[2] > 0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


# ---- the critics ----


@pytest.mark.parametrize("critic", CRITICS)
def test_a_critic_learns_and_evaluation_runs(tmp_path, critic):
    """Rewards that the first sampled token decides: the values of later tokens can know them."""

    def reward(completion_ids, **kwargs):
        return [float(ids[0] % 2) for ids in completion_ids]

    trainer = build(
        tmp_path, reward=reward, critic=critic, script=lambda p, rng: [65 + rng.randrange(2), *WRITE.text("zz")],
        max_steps=25, critic_warmup_steps=25, critic_learning_rate=1e-2, per_device_train_batch_size=8,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.train()
    explained = logged(trainer, "explained_variance")
    assert explained[0] == pytest.approx(0, abs=1e-6)  # the head starts at 0
    # A shared critic has only its head to train while the policy stands still.
    assert max(explained[-5:]) > (0.2 if critic == "shared" else 0.3)
    metrics = trainer.evaluate(trainer.train_dataset.select(range(8)))
    assert 0 <= metrics["eval_rewards/reward/mean"] <= 1 and math.isfinite(metrics["eval_loss"])


@pytest.mark.parametrize("detach", [True, False])
def test_the_shared_critic_reaches_the_policy_unless_detached(tmp_path, monkeypatch, detach):
    """With advantages of 0 only the value loss can move the policy."""
    trainer = build(tmp_path, critic="shared", critic_detach=detach, max_steps=1)
    with torch.no_grad():
        trainer.critic.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    add_targets = trainer._add_targets

    def no_advantages(output):
        add_targets(output)
        output["advantages"].zero_()

    monkeypatch.setattr(trainer, "_add_targets", no_advantages)
    before = policy_weights(trainer)
    trainer.train()
    assert detach is all(torch.equal(value, before[name]) for name, value in policy_weights(trainer).items())


def test_the_adapter_critic_leaves_the_policys_parameters_alone(tmp_path):
    """Also those that are trained beside the adapter, such as sinks, and through checkpointed layers."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    trainer = build(tmp_path, critic="lora", lora=lora, max_steps=1, gradient_checkpointing=True)
    sinks = {n: p for n, p in trainer.model.named_parameters() if n.endswith("sinks")}
    for parameter in sinks.values():
        parameter.requires_grad_(True)
    flags = {n: p.requires_grad for n, p in trainer.model.named_parameters()}
    seen = {}
    train_critic = trainer._train_critic

    def watch(model, inputs, last):
        before = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
        train_critic(model, inputs, last)
        after = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None and ".critic." not in n}
        seen["same"] = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in after)
        seen["critic"] = list(trainer._critic_optimizer._set_aside)

    trainer._train_critic = watch
    trainer.train()
    assert seen["same"] and len(seen["critic"]) == len(trainer.critic.local_parameters())
    assert {n: p.requires_grad for n, p in trainer.model.named_parameters()} == flags
    assert trainer.model.active_adapter == "default"


@pytest.mark.parametrize("critic", CRITICS)
def test_the_policys_gradient_is_clipped_by_itself(tmp_path, critic):
    """The adapter critic's gradient, which lies among the policy's parameters, is no part of the norm."""

    class Norm(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            assert not any(".critic." in n for n in gradients)
            norms.append(torch.stack([g.norm() for g in gradients.values()]).norm().item())

    norms = []
    build(tmp_path, critic=critic, max_steps=1, max_grad_norm=1e-3, callbacks=[Norm()]).train()
    assert norms == pytest.approx([1e-3], rel=1e-3)


@pytest.mark.parametrize("critic", CRITICS)
def test_the_critic_is_in_the_checkpoint_and_nowhere_else(tmp_path, critic):
    trainer = build(tmp_path, critic=critic, max_steps=1, save_strategy="steps", save_steps=1)
    names = {n for n, _ in trainer.model.named_parameters()}
    if critic != "lora":
        assert names == {n for n, _ in tiny_model().named_parameters()}
    else:  # what TRL sends to the sampler: merged weights, without the tensors of adapters
        assert all("lora_" in n for n in names if "critic" in n)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.create_model_card(model_name="tiny")
    assert "GptOssPPOTrainer" in (tmp_path / "README.md").read_text()
    for folder in (tmp_path / "saved", tmp_path / "checkpoint-1"):
        files = [
            p for p in folder.iterdir() if p.suffix in (".safetensors", ".json") and p.name != "trainer_state.json"
        ]
        assert not any("critic" in p.read_bytes().decode("latin-1") for p in files)
    assert not (tmp_path / "saved" / "critic").exists()
    assert (tmp_path / "checkpoint-1" / "critic" / "critic_state.pt").is_file()
    # and plain transformers or PEFT loads the policy as it is
    if critic == "lora":
        loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "saved")
        assert list(loaded.peft_config) == ["default"]
    else:
        loaded = type(tiny_model()).from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids = torch.arange(40).unsqueeze(0)
    trainer.model.eval()
    torch.testing.assert_close(loaded.eval()(ids).logits, trainer.model(ids).logits, atol=1e-5, rtol=1e-5)


def test_what_an_engine_gets_has_nothing_of_the_critic(tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["router"])
    trainer = build(tmp_path, critic="lora", lora=lora, max_steps=2)
    trainer.train()
    sent = list(PolicyWeights(trainer.model, trainer._dist))
    names = [name for name, _ in sent]
    assert sorted(names) == sorted(n for n, _ in tiny_model().named_parameters())
    plain = tiny_model().eval()
    plain.load_state_dict(dict(sent))
    model = trainer.model.eval()
    ids = torch.arange(40).unsqueeze(0)
    before = model(ids).logits
    torch.testing.assert_close(plain(ids).logits, before, atol=1e-5, rtol=1e-5)
    model.set_adapter("critic")
    assert (model(ids).logits - before).abs().max() > 1e-3  # control: the critic's adapter is another one


def test_a_run_starts_from_the_critic_of_another(tmp_path):
    first = build(tmp_path / "first", max_steps=2)
    first.train()
    first.save_critic(str(tmp_path / "kept"))
    second = build(tmp_path / "second", critic_model_name_or_path=str(tmp_path / "kept" / "critic"))
    found, expected = critic_weights(second), critic_weights(first)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_options_of_the_experts_reach_the_critic(tmp_path):
    model = tiny_model()
    model.set_experts_implementation("gptoss_fused")
    trainer = build(tmp_path, model=model, router_dtype="float32", experts_token_chunk=8, max_steps=1)
    ours = [type(m) for m in trainer.critic.backbone.modules() if "Router" in type(m).__name__]
    assert ours == [type(m) for m in trainer.model.modules() if "Router" in type(m).__name__]
    text = trainer.critic.backbone.config
    assert text._experts_implementation == "gptoss_fused"
    trainer.train()


# ---- errors ----


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(TypeError, match="needs a GptOssPPOConfig"):
        GptOssPPOTrainer(
            tiny_model(), some_reward, GptOssGRPOConfig(str(tmp_path), bf16=False, use_cpu=True),
            processing_class=TOKENIZER,
        )  # fmt: skip
    with pytest.raises(ValueError, match="has no adapter"):
        build(tmp_path, critic="lora", lora=False)
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="set critic='separate'"):
        build(tmp_path, lora=lora, critic_model_name_or_path="x")
    with pytest.raises(RuntimeError, match="not been trained"):
        build(tmp_path).save_critic(str(tmp_path))
    from peft import get_peft_model

    with pytest.raises(ValueError, match="cannot be copied from a PeftModel"):
        build(tmp_path, model=get_peft_model(tiny_model(), lora), critic="separate")
    with pytest.raises(ValueError, match="already has an adapter named 'critic'"):
        build(tmp_path, model=get_peft_model(tiny_model(), lora, adapter_name="critic"))


def test_a_model_in_parts_is_no_source_of_a_critic(tmp_path):
    """What ZeRO-3 leaves of a model that is loaded after the training arguments: parameters without elements."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.new_empty(0)
    with pytest.raises(ValueError, match="ZeRO-3 has taken apart"):
        load_backbone(settings_of(tmp_path), model)


def test_trajectories_are_logged_with_their_mean_advantage(tmp_path):
    build(tmp_path, max_steps=1, log_completions=True, num_completions_to_print=0).train()
    records = [json.loads(line) for line in Path(tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert len(records) == 4 and any(r["advantage"] != 0 for r in records)


# ---- rollout correction ----


class UnlikelySamples(ScriptedBackend):
    """Says that it found every token far less likely than the trainer does, so that all weights are at their bound."""

    def generate(self, prompts, max_new_tokens, sampling=None):
        samples = super().generate(prompts, max_new_tokens, sampling)
        return [replace(s, logps=[-50.0] * len(s.ids)) for s in samples]


@pytest.mark.parametrize("critic", CRITICS)
def test_rollout_correction_weighs_the_surrogate_and_not_the_critic(tmp_path, critic):
    found = {}
    for level in ("off", "token"):
        keep = KeepGradients()
        trainer = build(
            tmp_path, critic=critic, max_steps=1, max_grad_norm=0.0, callbacks=[keep], rollout_correction_level=level,
            lora=LoraConfig(r=4, target_modules=["q_proj"]) if critic == "lora" else None,
            **({"rollout_correction_mode": "truncate", "rollout_correction_high": 3.0} if level == "token" else {}),
            **({"critic_detach": True} if critic == "shared" else {}),
        )  # fmt: skip
        trainer._engine.backend = UnlikelySamples(random_bytes)
        trainer.train()
        found[level] = keep.seen[0], logged(trainer, "value_loss"), critic_weights(trainer)
    for name, gradient in found["off"][0].items():
        torch.testing.assert_close(found["token"][0][name], 3 * gradient, atol=1e-6, rtol=1e-4)
    assert found["off"][1] == found["token"][1]
    assert all(torch.equal(value, found["token"][2][name]) for name, value in found["off"][2].items())
