import math

import pytest
import torch
from tiny_policy import VOCABULARY, tiny_model

from trl_gptoss.trainers.sync_probe import (
    StaleWeightsError,
    compare,
    probe_ids,
    stale_tensors,
    summarise,
    trainer_scores,
)

SENT = {"a.0.weight": 5, "a.1.weight": 6, "b": 7}
HELD = {name: {value} for name, value in SENT.items()}


def test_what_is_equal_passes():
    result = compare(SENT, HELD, [[-1.0, -2.0], [-3.0]], [[-1.0, -2.01], [-3.0]], tolerance=0.01)
    assert result.passed and result.tokens == 3 and result.tensors == 3
    assert result.mean == pytest.approx(0.01 / 3) and result.max == pytest.approx(0.01)
    result.check("now")


@pytest.mark.parametrize(
    "held, stale",
    [
        ({**HELD, "b": {8}}, ["b"]),
        ({**HELD, "b": {8, 7}}, []),  # tensor parallelism: either reading
        ({name: HELD[name] for name in ("a.0.weight", "b")}, ["a.1.weight"]),
        ({**HELD, "c": {1}}, ["c"]),
    ],
)
def test_stale_tensors(held, stale):
    assert stale_tensors(SENT, held) == stale


def test_checksums_that_differ_stop_the_run_with_their_names_even_if_log_probs_agree():
    result = compare(SENT, {**HELD, "a.1.weight": {0}}, [[-1.0]], [[-1.0]], 0.01)
    with pytest.raises(StaleWeightsError, match="(?s)At step 7.*Stale tensors, 1 of 3: a.1.weight"):
        result.check("step 7")


@pytest.mark.parametrize("theirs", [-1.1, math.nan, -math.inf])
def test_log_probs_that_differ_stop_the_run_even_if_checksums_agree(theirs):
    result = compare(SENT, HELD, [[-1.0]], [[theirs]], 0.01)
    with pytest.raises(StaleWeightsError, match="All 3 tensors have arrived"):
        result.check("step 7")


def test_an_infinite_log_prob_on_both_sides_is_no_proof():
    assert not compare(SENT, HELD, [[-math.inf]], [[-math.inf]], 0.01).passed


def test_long_lists_are_folded():
    names = [f"model.layers.{i}.self_attn.sinks" for i in range(24)] + ["lm_head.weight"]
    assert summarise(names) == (
        "model.layers.0.self_attn.sinks and 23 more of model.layers.*.self_attn.sinks; lm_head.weight"
    )


def test_the_probe_is_fixed_and_longer_than_the_window():
    ids = probe_ids(VOCABULARY, 2048)
    assert ids == probe_ids(VOCABULARY, 2048)
    assert max(map(len, ids)) > 128 and max(max(row) for row in ids) < VOCABULARY
    assert [len(row) for row in probe_ids(VOCABULARY, 50)] == [40, 49, 49]


def test_scores_are_those_of_eval_mode_and_training_mode_comes_back():
    model = tiny_model(attention_dropout=0.5).train()
    sequences = [[1, 2, 3, 4], [9, 8]]
    seen = trainer_scores(model, sequences, torch.device("cpu"))
    assert model.training
    model.eval()
    for ids, row in zip(sequences, seen, strict=True):
        with torch.no_grad():
            logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert row == pytest.approx([logps[t, i].item() for t, i in enumerate(ids[1:])], abs=1e-6)
