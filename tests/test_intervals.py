"""Intervals of accuracies against closed formulas, the bootstrap, and their own promise: how often they cover the truth."""

import itertools
import math
import random

import pytest

from trl_gptoss.intervals import accuracy_interval, effective_size, pass_at, wilson


@pytest.mark.parametrize(
    ("right", "size", "low", "high"),
    [(0, 10, 0.0, 0.2775), (1, 10, 0.0179, 0.4042), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (57, 200, 0.2269, 0.3511)],
)  # fmt: skip
def test_wilson_against_published_values(right, size, low, high):
    """Newcombe (1998) and the usual tables, four decimals."""
    assert wilson(right / size, size) == pytest.approx((low, high), abs=6e-5)


def test_wilson_is_the_inversion_of_the_score_test():
    for right, size in ((3, 17), (40, 41), (1, 500)):
        for bound in wilson(right / size, size, 0.9):
            z = (right / size - bound) / math.sqrt(bound * (1 - bound) / size)
            assert abs(z) == pytest.approx(1.6448536, abs=1e-5)


def test_one_answer_per_problem_is_plain_wilson():
    outcomes = [[1.0]] * 30 + [[0.0]] * 10
    interval = accuracy_interval(outcomes)
    assert (interval.low, interval.high) == wilson(0.75, 40)
    assert "clustered" not in interval.method


def test_effective_size_between_problems_and_answers():
    assert effective_size([[1.0, 0.0]] * 50) == 100  # problems are alike: every answer counts
    assert effective_size([[1.0] * 8] * 25 + [[0.0] * 8] * 25) == pytest.approx(49)  # answers are alike: n - 1
    assert effective_size([[1.0, 1.0]] * 7) == 7  # all right: nothing says how they vary, so a problem counts once
    assert "clustered" in accuracy_interval([[1.0, 0.0], [1.0, 1.0]]).method


def test_agrees_with_the_bootstrap_over_problems():
    rng = random.Random(0)
    outcomes = []
    for _ in range(150):
        p = rng.betavariate(0.8, 0.8)
        outcomes.append([float(rng.random() < p) for _ in range(4)])
    means = [sum(each) / len(each) for each in outcomes]
    resampled = sorted(sum(rng.choices(means, k=150)) / 150 for _ in range(4000))
    interval = accuracy_interval(outcomes)
    assert interval.low == pytest.approx(resampled[100], abs=0.012)
    assert interval.high == pytest.approx(resampled[3900], abs=0.012)
    naive = wilson(sum(means) / 150, 600)  # the control: answers taken for independent
    assert naive[1] - naive[0] < 0.75 * (interval.high - interval.low)


@pytest.mark.parametrize(("mean", "answers"), [(0.5, 1), (0.5, 4), (0.93, 4)])
def test_covers_the_truth_about_as_often_as_promised(mean, answers):
    """Problems of differing difficulty, drawn anew each time."""
    rng = random.Random(answers)
    covered = 0
    for _ in range(600):
        outcomes = []
        for _ in range(60):
            p = rng.betavariate(mean, 1 - mean)
            outcomes.append([float(rng.random() < p) for _ in range(answers)])
        interval = accuracy_interval(outcomes)
        covered += interval.low <= mean <= interval.high
    assert 0.92 <= covered / 600 <= 0.985


def test_pass_at_against_enumeration():
    for answers, right, k in ((5, 2, 2), (6, 1, 3), (4, 4, 2), (4, 0, 4), (8, 7, 2)):
        results = [1] * right + [0] * (answers - right)
        subsets = list(itertools.combinations(results, k))
        assert pass_at(right, answers, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("outcomes", [[], [[1.0], []], [[1.5]], [[-0.1]]])
def test_bad_outcomes_are_refused(outcomes):
    with pytest.raises(ValueError):
        accuracy_interval(outcomes)
