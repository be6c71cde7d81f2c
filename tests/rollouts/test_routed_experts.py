"""Experts that the sampler reports: what is refused, and how the rows of several turns come together."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from scripted_backend import HarmonyWriter, ScriptedBackend
from tiny_policy import byte_tokenizer, tiny_model
from transformers import GenerationConfig

from trl_gptoss.harmony import HarmonyVocabulary, render_prompt
from trl_gptoss.rollouts import DamagedRouting, Episode, RolloutLimits, RouterShape, Toolbox, ToolRunner, run_episodes
from trl_gptoss.rollouts.harmony_format import HarmonyFormat
from trl_gptoss.rollouts.routed_experts import RoutingOfBatch, check_routing
from trl_gptoss.rollouts.transformers_backend import TransformersBackend
from trl_gptoss.routing import capture_routing
from trl_gptoss.trajectory import Trajectory

SHAPE = RouterShape(layers=3, top_k=2, experts=8)
PROMPT, SAMPLED = 5, 4
TOKENIZER = byte_tokenizer()
VOCABULARY = HarmonyVocabulary.of(TOKENIZER)
WRITE = HarmonyWriter(TOKENIZER)


def healthy():
    rng = np.random.default_rng(0)
    rows = PROMPT + SAMPLED - 1
    return np.stack([[rng.permutation(8)[:2] for _ in range(3)] for _ in range(rows)]).astype(np.uint8)


def test_healthy_payloads_pass_in_any_integer_type():
    for dtype in (np.uint8, np.int16, np.int64):
        checked = check_routing(healthy().astype(dtype), SHAPE, PROMPT, SAMPLED)
        assert checked.dtype == np.uint8 and (checked == healthy()).all()
    one = np.zeros((1, 3, 1), dtype=np.uint8)  # with one expert per token a zero is an ordinary choice
    assert (check_routing(one, RouterShape(layers=3, top_k=1, experts=8), 1, 1) == one).all()


def at(position, value):
    def damage(routing):
        routing = routing.astype(np.int64)
        routing[position] = value
        return routing

    return damage


DAMAGE = {
    "missing": (lambda r: None, "reports no routing"),
    "floats": (lambda r: r.astype(np.float32), "array of integers, got float32"),
    "a list": (lambda r: r.tolist(), "array of integers, got list"),
    "flattened": (lambda r: r.reshape(len(r), -1), r"shape \(8, 3, 2\), got \(8, 6\)"),
    "a layer short": (lambda r: r[:, :2], "2 layers, the model that is trained has 3"),
    "another top-k": (lambda r: np.concatenate([r, r[:, :, :1]], axis=2), "3 experts per token, the model .* has 2"),
    "truncated": (lambda r: r[:-1], "7 positions, too few: 8"),
    "the new tokens only": (lambda r: r[PROMPT:], "too few.*enable_prefix_caching=False"),
    "too long": (lambda r: np.concatenate([r, r[-1:]]), "9 positions, too many"),
    "out of range": (at((6, 1, 0), 8), r"Position 6, layer 1 .* \[8, .*has 8"),
    "negative": (at((6, 1, 0), -2), "Position 6, layer 1"),
    "never filled": (np.zeros_like, "All expert ids are 0: .*never filled"),
    "an empty sampled row": (at(7, 0), "sampled position 7, layer 0 are 0"),
    "an empty layer": (at((6, 2), 0), "sampled position 6, layer 2 are 0"),
    "prompt not recorded": (at(slice(0, PROMPT), 0), "prompt position 0.*enable_prefix_caching=False"),
    "prompt marked as not recorded": (at(slice(0, 3), 255), "prompt position 0 was not recorded"),
    "a gap": (at(6, 255), "sampled position 6 was not recorded"),
    "an expert twice": (at((4, 1), 3), r"Position 4, layer 1 has an expert twice: \[3, 3\]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_payloads_are_refused(kind):
    damage, message = DAMAGE[kind]
    with pytest.raises(DamagedRouting, match=message):
        check_routing(damage(healthy()), SHAPE, PROMPT, SAMPLED)


@pytest.mark.parametrize("kind", DAMAGE)
def test_one_damaged_payload_in_a_batch_is_found(kind):
    damage, message = DAMAGE[kind]
    batch = RoutingOfBatch(SHAPE)
    with pytest.raises(DamagedRouting, match=message):
        for key in range(3):
            batch.add(key, 0, damage(healthy()) if key == 1 else healthy(), PROMPT, SAMPLED)
        list(batch.checked())


def second_turn(routing):
    """A rollout whose first turn has shown 4 rows, and whose second one shows these 8."""
    batch = RoutingOfBatch(SHAPE)
    batch.add(0, 0, healthy()[:4], 3, 2)
    batch.add(0, 1, routing, PROMPT, SAMPLED)
    return list(batch.checked())


def test_rows_from_earlier_turns_are_not_looked_at_again():
    (_, _, before), (key, turn, rows) = second_turn(at(slice(0, 4), 0)(healthy()))
    assert (key, turn) == (0, 1) and rows.dtype == np.uint8
    assert (np.concatenate([before, rows]) == healthy()).all() and len(before) == 4
    with pytest.raises(DamagedRouting, match="prompt position 4, layer 0 are 0"):
        second_turn(at(slice(0, 5), 0)(healthy()))
    with pytest.raises(DamagedRouting, match=r"Position 6, layer 1 .* \[8, "):  # counted from the start of the rollout
        second_turn(at((6, 1, 0), 8)(healthy()))
    with pytest.raises(DamagedRouting, match="7 positions, too few: 8"):
        second_turn(healthy()[:-1])


def test_rows_go_to_their_turns_in_whatever_order_samples_arrive():
    rng = np.random.default_rng(1)
    rows = rng.permuted(np.tile(np.arange(8), (2, 8, 3, 1)), axis=3)[..., :2].astype(np.uint8)
    batch = RoutingOfBatch(SHAPE)
    for key, turn, length in (
        (1, 0, 2),
        (0, 0, 3),
        (1, 1, 5),
        (1, 1, 6),
        (0, 1, 4),
        (1, 2, 8),
    ):  # one turn in two pieces
        batch.add(key, turn, rows[key, :length], length, 1)
    ends = {(0, 0): (0, 3), (0, 1): (3, 4), (1, 0): (0, 2), (1, 1): (2, 6), (1, 2): (6, 8)}
    found = {(key, turn): routing for key, turn, routing in batch.checked()}
    assert found.keys() == ends.keys()
    for (key, turn), (first, end) in ends.items():
        assert (found[key, turn] == rows[key, first:end]).all()


def test_too_many_experts_for_a_byte_are_refused():
    with pytest.raises(ValueError, match="256 experts are too many"):
        RouterShape(layers=1, top_k=1, experts=256)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first.
        b: second.
    """
    return a + b


class Continuing:
    """A script that goes on where it was cut off."""

    def __init__(self, script):
        self.script, self.turns = script, []

    def __call__(self, prompt, rng):
        for base, full in self.turns:
            done = prompt[len(base) :]
            if prompt[: len(base)] == base and 0 < len(done) < len(full) and full[: len(done)] == done:
                return full[len(done) :]
        self.turns.append((list(prompt), self.script(prompt, rng)))
        return self.turns[-1][1]


def call_then_answer(prompt, rng):
    if VOCABULARY.call not in prompt:
        return WRITE.analysis("hm" * rng.randrange(1, 4)) + WRITE.call("add", a=rng.randrange(9), b=1)
    return WRITE.final("x" * rng.randrange(1, 30))


class Recording(ScriptedBackend):
    """Reports the experts of the model on prompt and sample, one sequence at a time."""

    def __init__(self, model, damage=None):
        super().__init__(Continuing(call_then_answer))
        self.model, self.damage = model, damage

    def generate(self, prompts, max_new_tokens, sampling=None):
        samples = super().generate(prompts, max_new_tokens)
        for prompt, sample in zip(prompts, samples):
            sample.routing = routes(self.model, prompt + sample.ids[:-1])
            if self.damage is not None:
                sample.routing = self.damage(sample.routing)
        return samples


@torch.no_grad()
def routes(model, ids):
    with capture_routing(model) as record:
        model(torch.tensor([ids]), use_cache=False)
    return record.indices().permute(1, 0, 2).numpy()


def episodes(n):
    return [
        Episode(
            trajectory=Trajectory(prompt_ids=render_prompt([{"role": "user", "content": "x" * i}], TOKENIZER, [add])),
            toolbox=Toolbox(functions={"add": add}, declared=[add]),
        )
        for i in range(n)
    ]


def run(batch, backend, **limits):
    limits = RolloutLimits(**{"max_turns": None, "max_rollout_tokens": 4096, "max_context": 8192, **limits})
    runner = ToolRunner(output_limit=300, max_concurrent=8)
    shape = RouterShape(layers=2, top_k=2, experts=4)
    run_episodes(
        batch, backend, HarmonyFormat(TOKENIZER), runner, limits, VOCABULARY.stop_ids, lambda here: here, shape
    )


@pytest.mark.parametrize("pieces", [{}, {"max_seconds": 60.0, "piece_tokens": 5}])
def test_a_trajectory_has_one_row_for_every_id_but_the_last(pieces):
    model = tiny_model().eval()
    batch = episodes(3)
    run(batch, Recording(model), **pieces)
    for episode in batch:
        trajectory = episode.trajectory
        assert len(trajectory.turns) == 2
        ids = trajectory.prompt_ids + trajectory.completion_ids
        assert trajectory.routing.shape == (len(ids) - 1, 2, 2) and trajectory.routing.dtype == np.uint8
        assert (trajectory.routing == routes(model, ids[:-1])).all()


def test_a_backend_that_reports_damage_ends_the_batch_with_its_reason():
    with pytest.raises(DamagedRouting, match="too few"):
        run(episodes(1), Recording(tiny_model().eval(), damage=lambda r: r[1:]))
    with pytest.raises(DamagedRouting, match="reports no routing"):
        run(episodes(1), ScriptedBackend(call_then_answer))


def test_sampling_through_transformers_records_what_a_forward_chooses():
    model = tiny_model().eval()

    @contextmanager
    def open_model():
        yield model

    def record(model):
        return capture_routing(model, every_forward=True)

    config = GenerationConfig(pad_token_id=257, eos_token_id=[258], do_sample=True)
    backend = TransformersBackend(open_model, config, [258], 257, torch.device("cpu"), False, record)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [30, 31, 32]]
    for prompt, sample in zip(prompts, backend.generate(prompts, [6, 1, 9])):
        expected = routes(model, prompt + sample.ids[:-1])
        checked = check_routing(
            sample.routing, RouterShape(layers=2, top_k=2, experts=4), len(prompt), len(sample.ids)
        )
        assert (np.sort(checked) == np.sort(expected)).all()
