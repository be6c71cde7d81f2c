"""Packing against TRL's padded rows and eager attention, and what must be refused."""

import itertools
import random

import pytest
import torch
from cpu_settings import ON_CPU
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from tiny_policy import byte_tokenizer, tiny_model

from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer
from trl_gptoss.trainers.packed_forward import model_inputs
from trl_gptoss.trainers.packing import micro_batches, pack

TOKENIZER = byte_tokenizer()
DATA = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(64)])
LENGTHS = [(5, 9), (17, 0), (3, 12), (40, 1), (8, 33), (1, 6)]


def test_layout():
    ids = torch.tensor([[0, 10, 11, 12, 0], [0, 0, 20, 21, 22]])
    packed = pack(ids, [(2, 1), (1, 2)], 2, multiple_of=4)
    assert packed.input_ids.tolist() == [[10, 11, 12, 20, 21, 22, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert packed.shift_labels.tolist() == [[-100, 12, -100, 21, 22, -100, -100, -100]]
    assert packed.cu_seqlens.tolist() == [0, 3, 6, 8] and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_length == 3
    values = torch.arange(8.0, requires_grad=True)
    unpacked = packed.unpack(values)
    assert unpacked.tolist() == [[1, 0], [3, 4]]
    unpacked.sum().backward()
    assert values.grad.tolist() == [0, 1, 0, 1, 1, 0, 0, 0]


def test_rows_without_tokens_still_make_a_forward():
    packed = pack(torch.full((2, 5), 7), [(0, 0), (0, 0)], 3, multiple_of=4)
    assert packed.input_ids.shape == (1, 4) and packed.cu_seqlens.tolist() == [0, 4]
    assert packed.unpack(torch.ones(4)).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("lengths", [[(3, 2)], [(2, 4), (2, 2)], [(-1, 2), (2, 2)], [(0, 1), (2, 2)]])
def test_lengths_that_do_not_fit(lengths):
    with pytest.raises(ValueError, match="lengths|tokens"):
        pack(torch.zeros(2, 5, dtype=torch.long), lengths, 3)


def test_micro_batches():
    rng = random.Random(0)
    assert (
        micro_batches([4, 3, 3, 2, 2], 7) == [[0, 3], [1, 2, 4]]
        or sum(map(len, micro_batches([4, 3, 3, 2, 2], 7))) == 5
    )
    assert micro_batches([5, 2], None) == [[0, 1]] and micro_batches([], 7) == [[]]
    for _ in range(300):
        lengths = [rng.choice((0, rng.randrange(1, 200))) for _ in range(rng.randrange(1, 20))]
        budget = rng.randrange(1, 400)
        parts = micro_batches(lengths, budget)
        assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
        loads = [sum(lengths[row] for row in part) for part in parts]
        assert all(parts) and max(loads) <= max(budget, max(lengths))
        assert len(parts) <= 2 * sum(lengths) / max(budget, max(lengths)) + 1
        assert max(loads) - min(loads) <= max(lengths)  # balanced


def build(tmp_path, attention="sink_fa3", lora=False, **settings):
    settings = {
        **ON_CPU,
        "per_device_train_batch_size": len(LENGTHS),
        "num_generations": len(LENGTHS),
        "max_steps": 3,
        "max_rollout_tokens": 9,
        "learning_rate": 1e-2,
        "log_trajectories": 0,
        **settings,
    }
    model = tiny_model()
    model.set_attn_implementation(attention)
    return GptOssGRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 11) for ids in completion_ids],
        GptOssGRPOConfig(str(tmp_path), **settings),
        DATA,
        processing_class=TOKENIZER,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if lora else None,
    )


def batch(lengths=LENGTHS):
    """A batch as TRL makes it, with a tool result in every third completion."""
    generator = torch.Generator().manual_seed(0)
    prompt_width, width = (max(column) for column in zip(*lengths))
    prompt, completion = (torch.arange(n).expand(len(lengths), n) for n in (prompt_width, width))
    sizes = torch.tensor(lengths)
    prompt_mask = (prompt >= prompt_width - sizes[:, :1]).long()
    completion_mask = (completion < sizes[:, 1:]).long()
    return {
        "prompt_ids": torch.randint(0, 256, prompt_mask.shape, generator=generator),
        "completion_ids": torch.randint(0, 256, completion_mask.shape, generator=generator),
        "prompt_mask": prompt_mask,
        "completion_mask": completion_mask,
        "tool_mask": (completion % 4 > 0).long() * (torch.arange(len(lengths)) % 3 == 0)[:, None] + (torch.arange(len(lengths)) % 3 > 0)[:, None].long(),
        "advantages": torch.randn(len(lengths), generator=generator),
        "old_per_token_logps": -5 - torch.rand(completion_mask.shape, generator=generator),
        "ref_per_token_logps": -5 - torch.rand(completion_mask.shape, generator=generator),
        "num_items_in_batch": completion_mask.sum(),
    }  # fmt: skip


def loss_and_gradients(trainer, inputs, **attributes):
    trainer.current_gradient_accumulation_steps = 1
    for name, value in attributes.items():
        setattr(trainer, name, value)
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    # not on-policy: the old log-probs of the batch are used
    trainer.args.on_policy = "off"
    trainer._reported_loss = None
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    value = loss if trainer._reported_loss is None else trainer._reported_loss
    grads = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return value.item(), grads, {n: v[-1] for n, v in trainer._metrics["train"].items()}


def largest_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-12)) for n in ours)


LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Padded and eager: the oracle. Packed whole. Packed with a budget that most rows do not share."""
    folder = tmp_path_factory.mktemp("trainers")
    return (
        build(folder / "padded", "eager"),
        build(folder / "packed"),
        build(folder / "budget", max_tokens_per_micro_batch=45),
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_packed_is_padded(trainers, loss_type, level):
    attributes = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1}
    padded, packed, budget = trainers
    assert (padded._padding_free, packed._padding_free, budget._padding_free) == (False, True, True)
    loss, grads, metrics = loss_and_gradients(padded, batch(), **attributes)
    assert len(budget._micro_batches(LENGTHS)) == 4
    for trainer in (packed, budget):
        ours, our_grads, our_metrics = loss_and_gradients(trainer, batch(), **attributes)
        assert ours == pytest.approx(loss, rel=1e-5)
        assert largest_difference(our_grads, grads) < 2e-5
        assert our_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)


def test_control_a_wrong_share_of_the_loss_is_seen(trainers, monkeypatch):
    padded, _, budget = trainers
    _, grads, _ = loss_and_gradients(padded, batch(), loss_type="grpo", importance_sampling_level="token", beta=0.0)
    monkeypatch.setattr(type(budget), "_share_of_loss", lambda self, batch, rows, count: 1.0)
    _, wrong, _ = loss_and_gradients(budget, batch(), loss_type="grpo", importance_sampling_level="token", beta=0.0)
    assert largest_difference(wrong, grads) > 0.1


def test_documents_are_apart_and_boundaries_matter():
    model = tiny_model(dtype=torch.float64)
    model.set_attn_implementation("sink_fa3")
    model.set_experts_implementation("gptoss_fused")
    inputs = batch()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    packed = pack(ids, LENGTHS, inputs["completion_ids"].shape[1])
    logits = model(**model_inputs(packed)).logits[0]
    alone = tiny_model(dtype=torch.float64)  # eager, one sequence at a time
    alone.set_experts_implementation("eager")
    width, begin = inputs["prompt_ids"].shape[1], 0
    for row, (prompt, completion) in enumerate(LENGTHS):
        own = ids[row : row + 1, width - prompt : width + completion]
        theirs = alone(own).logits[0]
        torch.testing.assert_close(logits[begin : begin + len(theirs)], theirs, rtol=1e-10, atol=1e-10)
        begin += len(theirs)
    leaking = model_inputs(packed)
    leaking["cu_seq_lens_q"] = leaking["cu_seq_lens_k"] = packed.cu_seqlens[[0, -1]]
    leaking["max_length_q"] = leaking["max_length_k"] = packed.input_ids.shape[1]
    assert (model(**leaking).logits[0] - logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    "settings", [{}, {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 3}]
)
def test_runs_with_and_without_packing_follow_one_curve(tmp_path, settings):
    runs = {}
    for name, extra in {
        "padded": {"padding_free": False},
        "packed": {},
        "budget": {"max_tokens_per_micro_batch": 300},
    }.items():
        # Adam would make steps of full size out of the rounding of vanishing gradients
        trainer = build(tmp_path / name, optim="sgd", learning_rate=0.3, **settings, **extra)
        trainer.train()
        runs[name] = trainer
    reference = runs.pop("padded")
    for trainer in runs.values():
        for (name, ours), theirs in zip(trainer.model.named_parameters(), reference.model.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5, msg=name)
        logs = list(zip(trainer.state.log_history, reference.state.log_history))
        for key in ("loss", "reward", "entropy", "on_policy/max_log_ratio", "grad_norm", "clip_ratio/region_mean"):
            assert [o[key] for o, t in logs if "loss" in o] == pytest.approx(
                [t[key] for o, t in logs if "loss" in o], rel=1e-3, abs=1e-4
            )
    first = [e["on_policy/max_log_ratio"] for e in runs["budget"].state.log_history if "loss" in e][0]
    assert first == 0.0  # exactly


def test_adaptive_entropy_moves_once_per_step(tmp_path):
    """The controller must not notice turns."""
    settings = {"use_adaptive_entropy": True, "entropy_target": 100.0, "loss_type": "bnpo"}
    coefficients = []
    for extra in ({"padding_free": False}, {"max_tokens_per_micro_batch": 300}):
        trainer = build(tmp_path, **settings, **extra)
        trainer.train()
        coefficients.append(trainer.entropy_coef)
    assert (
        coefficients[0]
        == coefficients[1]
        == pytest.approx(3 * trainer.args.entropy_coef_delta + trainer.args.entropy_coef)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "eager", "padding_free": True}, "attend to each other"),
        ({"attention": "eager", "max_tokens_per_micro_batch": 10}, "attend to each other"),
        ({"max_tokens_per_micro_batch": 10, "router_aux_loss_coef": 0.1}, "product of means"),
        ({"max_tokens_per_micro_batch": 10, "top_entropy_quantile": 0.5}, "top_entropy_quantile=1.0"),
        ({"max_tokens_per_micro_batch": 10, "entropy_coef": 0.1, "loss_type": "dapo"}, "entropy bonus"),
        (
            {
                "max_tokens_per_micro_batch": 10,
                "rollout_correction_level": "token",
                "rollout_correction_mode": "truncate",
                "loss_type": "bnpo",
            },
            "rollout correction keeps",
        ),
        ({"max_tokens_per_micro_batch": 0}, "at least 1"),
        ({"sequence_parallel_size": 0}, "at least 1"),
        ({"max_tokens_per_micro_batch": 10, "padding_free": False}, "work on packed rows"),
        ({"sequence_parallel_size": 2}, "Start a multiple of 2"),
        ({"sequence_parallel_size": 2, "attention": "eager"}, "attend to each other"),
        ({"sequence_parallel_size": 3}, "Possible: \\[1, 2, 4\\]"),
    ],
)
def test_refusals(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **settings)


@pytest.mark.parametrize("padding_free", [True, False])
def test_prompt_learning_is_refused(tmp_path, padding_free):
    model = tiny_model()
    model.set_attn_implementation("sink_fa3")
    args = GptOssGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", padding_free=padding_free)
    peft = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="PROMPT_TUNING adds virtual tokens, .* another policy"):
        GptOssGRPOTrainer(model, lambda **_: [], args, DATA, processing_class=TOKENIZER, peft_config=peft)
