"""Confidence intervals of an accuracy that was measured by sampling answers to a set of problems.

Two things vary: which answers are sampled, and which problems happen to be in the set. The interval covers both. With one
answer per problem it is Wilson's score interval. With several, the answers to one problem are alike (a cluster), and n
problems with k answers are worth less than n k independent ones: Wilson's interval at the effective sample size that the
variance between the problems' means implies (as is done for proportions in cluster surveys). Unlike the bootstrap it
does not collapse to a point when every answer is right.

    4 problems, 2 answers each          effective size
    [1 0] [1 0] [1 0] [1 0]  mean 1/2   8: the problems do not differ
    [1 1] [1 1] [0 0] [0 0]  mean 1/2   3: the answers to a problem do not differ (4 less the correction by 3/4)
"""

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """low, high (`float`): bounds in [0, 1]. method (`str`): how they were computed, in words."""

    low: float
    high: float
    method: str


def wilson(mean: float, size: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion.

    Args:
        mean (`float`): the observed proportion.
        size (`float`): how many independent observations it is the mean of; need not be whole.
        confidence (`float`, *optional*, defaults to 0.95): coverage.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(mean * (1 - mean) / size + z * z / (4 * size * size))
    return max(0.0, centre - half), min(1.0, centre + half)


def effective_size(outcomes: list[list[float]]) -> float:
    """How many independent answers are worth as much as these; see the top of this file.

    Args:
        outcomes (`list[list[float]]`): the answers to each problem, 1.0 right and 0.0 wrong.
    """
    means = [sum(each) / len(each) for each in outcomes]
    mean = sum(means) / len(means)
    answers = sum(map(len, outcomes))
    if answers == len(outcomes) or mean in (0.0, 1.0) or len(means) == 1:
        return float(len(outcomes))
    variance = sum((m - mean) ** 2 for m in means) / (len(means) - 1) / len(means)
    return min(answers, mean * (1 - mean) / variance) if variance > 0 else float(answers)


def accuracy_interval(outcomes: list[list[float]], confidence: float = 0.95) -> Interval:
    """The interval of the mean over problems of the mean over answers.

    Args:
        outcomes (`list[list[float]]`): the answers to each problem, 1.0 right and 0.0 wrong; at least one each.
        confidence (`float`, *optional*, defaults to 0.95): coverage.

    Raises:
        `ValueError`: no problem, a problem without an answer, or an outcome outside of [0, 1].
    """
    if not outcomes or not all(outcomes):
        raise ValueError("an accuracy needs at least one problem, and at least one answer to each")
    if any(not 0.0 <= x <= 1.0 for each in outcomes for x in each):
        raise ValueError("outcomes must lie between 0 (wrong) and 1 (right)")
    mean = sum(sum(each) / len(each) for each in outcomes) / len(outcomes)
    clustered = any(len(each) > 1 for each in outcomes)
    low, high = wilson(mean, effective_size(outcomes), confidence)
    method = f"{confidence:.0%} Wilson score interval"
    return Interval(low=low, high=high, method=f"{method}, answers clustered by problem" if clustered else method)


def pass_at(right: int, answers: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of `k` answers is right, from `right` of `answers`."""
    if answers - right < k:
        return 1.0
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)
