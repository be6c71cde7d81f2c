"""Rollout correction against per-element Python loops in numpy, TRL's own lines, and what must hold for any input."""

import csv
import inspect
import itertools
import math
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from trl import GRPOTrainer

from trl_gptoss.correction import (
    LONG_ROLLOUTS,
    ess_warning,
    from_trl_options,
    rollout_correction,
    summarize_stats,
)

LEVELS = ("token", "sequence", "geometric", "turn")
MODES = ("truncate", "mask", "icepop")
CHANNELS = ("analysis", "commentary", "final")
NAN, INF = math.nan, math.inf


def turns_of(row: np.ndarray) -> list[list[int]]:
    """[1 1 0 1] -> [[0, 1], [3]]"""
    return [[t for t, _ in run] for on, run in itertools.groupby(enumerate(row), key=lambda item: bool(item[1])) if on]


def oracle(trainer, sampling, mask, level, mode, low=None, high=None, veto=None, token_cap=None, clamp=20.0):
    """Weights and keep, one element after the other. Ratios are compared as ratios, not as logarithms."""
    weights, keep = np.zeros(mask.shape), np.zeros(mask.shape, dtype=bool)
    for b in range(mask.shape[0]):
        logs = {}
        for t in range(mask.shape[1]):
            p, q = float(trainer[b, t]), float(sampling[b, t])
            if mask[b, t] and not math.isnan(p) and p != INF and math.isfinite(q):
                logs[t] = max(p - q, -300.0)
        if veto is not None and any(math.exp(value) < veto for value in logs.values()):
            continue
        limited = {t: min(max(value, -clamp), clamp) for t, value in logs.items()}
        for turn in turns_of(mask[b]):
            for t in turn:
                if t not in logs:
                    continue
                if level == "token":
                    log = limited[t]
                elif level == "turn":
                    log = math.fsum(limited[s] for s in turn if s in limited)
                else:
                    log = math.fsum(limited.values()) / (len(limited) if level == "geometric" else 1)
                ratio = math.exp(min(max(log, -700), 700))
                bounded = math.exp(min(max(log, -clamp), clamp))
                inside = (low is None or ratio >= low) and (high is None or ratio <= high)
                if mode == "truncate":
                    keep[b, t] = True
                    weights[b, t] = max(min(bounded, high or INF), low or 0.0)
                else:
                    keep[b, t] = inside or mode == "icepop"
                    weight = bounded if token_cap is None else min(math.exp(limited[t]), token_cap)
                    weights[b, t] = weight if inside else 0.0
    return weights, keep


def metrics_oracle(trainer, sampling, mask, weights, channels):
    """From the definitions, on finite inputs."""
    log_ratio = (np.asarray(trainer, dtype=np.float64) - np.asarray(sampling, dtype=np.float64))[mask]
    ratio = np.exp(log_ratio)
    rows = [np.asarray(p - q)[m] for p, q, m in zip(trainer, sampling, mask) if m.any()]
    sequence = np.exp([row.sum() for row in rows])
    used = [w[m].any() for w, m in zip(weights, mask) if m.any()]
    expected = {
        "tokens": len(ratio), "sequences": len(rows), "untrusted_fraction": 0.0, "vetoed_fraction": 0.0,
        "kept_fraction": (weights[mask] > 0).mean(), "kept_sequence_fraction": np.mean(used),
        "kl_k1": -log_ratio.mean(), "kl_k3": (ratio - 1 - log_ratio).mean(), "abs_log_ratio": np.abs(log_ratio).mean(),
        "log_ppl_diff": np.mean([-row.mean() for row in rows]), "weight_mean": weights[mask].mean(),
        "ratio_max": ratio.max(), "sequence_ratio_max": sequence.max(),
        "chi2_token": (ratio**2).mean() - 1, "chi2_sequence": (sequence**2).mean() - 1,
        "ess_token": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "ess_sequence": sequence.sum() ** 2 / (len(sequence) * (sequence**2).sum()),
        "ess_weights": weights[mask].sum() ** 2 / (mask.sum() * (weights[mask] ** 2).sum()) if weights.any() else 0.0,
    }  # fmt: skip
    for index, name in enumerate(CHANNELS):
        inside = channels[mask] == index
        if inside.any():
            expected[f"token_fraction/{name}"] = inside.mean()
            expected[f"abs_log_ratio/{name}"] = np.abs(log_ratio[inside]).mean()
            expected[f"kl_k3/{name}"] = (ratio - 1 - log_ratio)[inside].mean()
    return expected


def batch(seed: int = 0, rows: int = 6, length: int = 17, scale: float = 0.3):
    """Row 1 has no sampled token, row 2 only one; masks have several turns."""
    rng = np.random.default_rng(seed)
    trainer = (-rng.exponential(1.0, (rows, length))).astype(np.float32)
    sampling = (trainer - scale * rng.standard_normal((rows, length))).astype(np.float32)
    mask = rng.random((rows, length)) < 0.7
    mask[1] = False
    mask[2] = np.arange(length) == 3
    channels = rng.integers(-1, 3, (rows, length))
    return trainer, sampling, mask, channels


def run(trainer, sampling, mask, **options):
    return rollout_correction(torch.as_tensor(trainer), torch.as_tensor(sampling), torch.as_tensor(mask), **options)


@pytest.mark.parametrize("limits", [(None, None), (None, 1.25), (0.8, None), (0.8, 1.25)])
@pytest.mark.parametrize(
    "extra", [{}, {"veto": 0.55}, {"clamp": 0.25, "veto": 0.55}, {"token_cap": 1.1, "clamp": 0.23}], ids=str
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_and_mode_against_loops(level, mode, extra, limits):
    if mode == "truncate" and "token_cap" in extra:
        with pytest.raises(ValueError, match="token_cap"):
            run(*batch()[:3], level=level, mode=mode, **extra)
        return
    trainer, sampling, mask, channels = batch()
    options = {"level": level, "mode": mode, "low": limits[0], "high": limits[1], **extra}
    result = run(trainer, sampling, mask, channels=torch.as_tensor(channels), channel_names=CHANNELS, **options)
    weights, keep = oracle(trainer, sampling, mask, **options)
    np.testing.assert_allclose(result.weights.numpy(), weights, rtol=2e-7, atol=0)
    np.testing.assert_array_equal(result.keep.numpy(), keep)
    expected = metrics_oracle(trainer.astype(np.float64), sampling.astype(np.float64), mask, weights, channels)
    vetoed = [
        m.any() and not k.any()
        for k, m in zip(oracle(trainer, sampling, mask, level, "truncate", veto=extra.get("veto"))[1], mask)
    ]
    expected["vetoed_fraction"] = sum(vetoed) / mask.any(1).sum()
    assert result.metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


def test_the_options_matter():
    """Control of the grid above: it would pass with options that do nothing if they changed nothing here."""
    base = {"level": "turn", "mode": "mask", "low": 0.8, "high": 1.25}
    reference = oracle(*batch()[:3], **base)
    changes = ({"level": "token"}, {"level": "sequence"}, {"level": "geometric"}, {"mode": "truncate"}, {"low": 0.9},
               {"high": 1.1}, {"veto": 0.55}, {"token_cap": 1.1}, {"clamp": 0.2})  # fmt: skip
    for change in changes:
        assert not np.array_equal(oracle(*batch()[:3], **base | change)[0], reference[0]), change
    assert not np.array_equal(oracle(*batch()[:3], **base | {"mode": "icepop"})[1], reference[1])


def test_documented_token_example():
    log_ratio = torch.tensor([[0.1, -0.3, 5.0, 0.2, 0.0, 0.4]])
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    expected = {
        "token": [0.1, -0.3, 0.2, 0.0, 0.4],
        "turn": [-0.2, -0.2, 0.6, 0.6, 0.6],
        "sequence": [0.4] * 5,
        "geometric": [0.08] * 5,
    }
    for level, logs in expected.items():
        weights = rollout_correction(log_ratio, torch.zeros(1, 6), mask, level=level, mode="truncate").weights
        assert weights[0, 2] == 0
        torch.testing.assert_close(weights[mask.bool()], torch.tensor(logs).exp())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_untrusted_positions_touch_nothing_else(level, mode):
    """A NaN changes its own row as if the token had not been sampled, and no other row at all."""
    options = {"level": level, "mode": mode, "low": 0.8, "high": 1.25, "veto": 0.3}
    trainer, sampling, mask, _ = batch()
    mask[0] = True  # one turn: an untrusted token must not split it
    clean = run(trainer, sampling, mask, **options)
    for tensor, value in ((sampling, NAN), (trainer, NAN), (sampling, -INF), (sampling, INF), (trainer, INF)):
        before = tensor[0, 4]
        tensor[0, 4] = value
        result = run(trainer, sampling, mask, **options)
        tensor[0, 4] = before
        assert result.weights.isfinite().all() and all(map(math.isfinite, result.metrics.values()))
        assert result.weights[0, 4] == 0 and not result.keep[0, 4]
        assert torch.equal(result.weights[1:], clean.weights[1:]) and torch.equal(result.keep[1:], clean.keep[1:])
        assert result.metrics["untrusted_fraction"] == pytest.approx(1 / mask.sum())
        without = [np.delete(x, 4, axis=1)[:1] for x in (trainer, sampling, mask)]
        expected = run(*without, **options)
        others = [t for t in range(mask.shape[1]) if t != 4]
        assert torch.equal(result.weights[0, others], expected.weights[0])
        assert torch.equal(result.keep[0, others], expected.keep[0])


def test_nothing_trusted_and_nothing_sampled():
    options = {"level": "sequence", "mode": "mask", "low": 0.5, "high": 2.0, "veto": 1e-4}
    nothing = run(np.full((2, 5), NAN, np.float32), np.zeros((2, 5), np.float32), np.ones((2, 5)), **options)
    assert not nothing.keep.any() and nothing.weights.sum() == 0
    assert nothing.metrics == {
        "tokens": 10, "sequences": 2, "untrusted_fraction": 1, "kept_fraction": 0, "kept_sequence_fraction": 0,
        "vetoed_fraction": 0,
    }  # fmt: skip
    for shape in ((2, 5), (2, 0), (0, 5)):
        empty = run(np.full(shape, NAN, np.float32), np.zeros(shape, np.float32), np.zeros(shape), **options)
        assert empty.metrics == {"tokens": 0, "sequences": 0} and empty.weights.shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_log_ratios_of_100(level, mode, dtype):
    log_ratio = torch.zeros(4, 300, dtype=dtype)
    log_ratio[0], log_ratio[1], log_ratio[2, 5], log_ratio[3, 5] = 100, -100, 100, -100
    for clamp in (20.0, 80.0):
        result = rollout_correction(
            log_ratio, torch.zeros_like(log_ratio), torch.ones(4, 300), level=level, mode=mode, clamp=clamp
        )
        assert result.weights.isfinite().all() and (result.weights > 0).all() and result.keep.all()
        assert all(map(math.isfinite, result.metrics.values()))
        assert result.metrics["ratio_max"] == pytest.approx(math.exp(100))
        assert result.metrics["ess_sequence"] == pytest.approx(0.25)  # exponents of 30000 do not blur it
    result = rollout_correction(
        log_ratio, torch.zeros_like(log_ratio), torch.ones(4, 300), level=level, mode=mode, veto=1e-4
    )
    assert result.keep.any(dim=1).tolist() == [True, False, True, False] and result.metrics["vetoed_fraction"] == 0.5


def test_a_token_the_trainer_excludes_is_a_ratio_of_zero():
    trainer = torch.tensor([[-1.0, -INF, -1.0], [-1.0, -1.0, -1.0]])
    result = rollout_correction(
        trainer, -torch.ones(2, 3), torch.ones(2, 3), level="token", mode="truncate", veto=1e-4
    )
    assert result.keep.tolist() == [[False] * 3, [True] * 3] and result.metrics["untrusted_fraction"] == 0


@pytest.mark.parametrize("level", LEVELS)
def test_no_gradient_flows_into_weights(level):
    trainer = torch.randn(3, 8, requires_grad=True)
    sampling = trainer.detach() + 0.1 * torch.randn(3, 8)
    result = rollout_correction(trainer, sampling, torch.ones(3, 8), level=level, mode="truncate", high=1.05)
    assert not (result.weights.requires_grad or result.stats.requires_grad)
    (result.weights * trainer).sum().backward()
    assert torch.equal(trainer.grad, result.weights)  # a weight with a gradient would add l's derivative
    control = torch.randn(3, 8, requires_grad=True)
    ((control - sampling).exp() * control).sum().backward()
    assert not torch.allclose(control.grad, (control - sampling).exp().detach())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_waits_for_the_device(level, mode):
    """Fake tensors hold no values: whatever would copy one to the host raises."""
    cap = None if mode == "truncate" else 2.0
    with FakeTensorMode():
        logps, ids = torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.long)
        result = rollout_correction(
            logps,
            logps,
            ids,
            level=level,
            mode=mode,
            low=0.5,
            high=2.0,
            veto=1e-4,
            token_cap=cap,
            channels=ids,
            channel_names=CHANNELS,
        )
        assert result.weights.shape == result.keep.shape == (3, 8)
        with pytest.raises(DataDependentOutputException):
            _ = result.metrics  # control


@given(
    data=st.data(),
    rows=st.integers(1, 4),
    length=st.integers(1, 9),
    level=st.sampled_from(LEVELS),
    mode=st.sampled_from(MODES),
    limits=st.sampled_from([(None, None), (0.5, 2.0), (None, 3.0), (0.999, 1.002)]),
    veto=st.sampled_from([None, 1e-4]),
)
@settings(max_examples=150, deadline=None)
def test_properties(data, rows, length, level, mode, limits, veto):
    logps = st.one_of(st.floats(-100, 0, width=32), st.sampled_from([NAN, -INF, INF]))

    def draw(kind: st.SearchStrategy) -> np.ndarray:
        values = data.draw(st.lists(kind, min_size=rows * length, max_size=rows * length))
        return np.array(values).reshape(rows, length)

    trainer, sampling, mask = draw(logps), draw(logps), draw(st.booleans())
    options = {"level": level, "mode": mode, "low": limits[0], "high": limits[1], "veto": veto}
    result = run(trainer, sampling, mask, **options)
    weights, keep = oracle(trainer, sampling, mask, **options)
    np.testing.assert_allclose(result.weights.numpy(), weights, rtol=1e-6)
    np.testing.assert_array_equal(result.keep.numpy(), keep)
    assert not (result.keep.numpy() & ~mask).any() and not (result.weights.numpy()[~result.keep.numpy()] != 0).any()
    assert all(map(math.isfinite, result.metrics.values()))
    assert all(
        -1e-9 <= value <= 1 + 1e-9
        for name, value in result.metrics.items()
        if name.startswith("ess") or name.endswith("fraction")
    )
    assert result.metrics.get("kl_k3", 0) >= 0
    outside = np.where(mask, 0, 50).astype(np.float64)  # what stands outside the mask does not matter
    again = run(trainer + outside, sampling, mask, **options)
    assert torch.equal(again.weights, result.weights) and torch.equal(again.stats, result.stats)
    order = data.draw(st.permutations(range(rows)))
    permuted = run(trainer[order], sampling[order], mask[order], **options)
    torch.testing.assert_close(permuted.weights, result.weights[order], rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_statistics_of_ranks_are_those_of_the_whole_batch(level):
    trainer, sampling, mask, channels = batch(rows=9, scale=0.5)
    sampling[0, 0] = NAN
    options = {"level": level, "mode": "mask", "low": 0.7, "high": 1.4, "veto": 0.3, "channel_names": CHANNELS}
    whole = run(trainer, sampling, mask, channels=torch.as_tensor(channels), **options)
    parts = [slice(0, 1), slice(1, 2), slice(2, 7), slice(7, 9)]  # the second holds no token
    rows = [run(trainer[p], sampling[p], mask[p], channels=torch.as_tensor(channels[p]), **options) for p in parts]
    combined = summarize_stats(torch.stack([row.stats for row in rows]), CHANNELS)
    assert combined == pytest.approx(whole.metrics, rel=1e-12)
    averages = np.mean([row.metrics.get("ess_sequence", NAN) for row in rows if row.metrics["tokens"]])
    assert averages != pytest.approx(whole.metrics["ess_sequence"], rel=0.05)  # control: averaging ranks is not it


def test_sequence_ess_where_exponentials_overflow():
    """Two sequences of log-ratio -1000 and one of -1000 + log 2: weights 1, 1, 2."""
    log_ratio = torch.full((3, 100), -10.0)
    log_ratio[2, 0] += math.log(2)
    result = rollout_correction(
        log_ratio.double(), torch.zeros(3, 100), torch.ones(3, 100), level="sequence", mode="truncate"
    )
    assert result.metrics["ess_sequence"] == pytest.approx(16 / (3 * 6), rel=1e-6)
    assert result.metrics["chi2_sequence"] == -1


TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def trl_ratio(trainer, sampling, mask, mode, clip_max, clip_min) -> torch.Tensor:
    """The installed TRL's own lines, cut out of the method that holds them."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.index(
        "                mask = completion_mask if tool_mask is None else completion_mask * tool_mask\n"
    )
    end = source.index("            # Compute the per-token log probabilities for the reference model", start)
    options = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=clip_max,
        vllm_importance_sampling_clip_min=clip_min,
    )
    scope = {
        "torch": torch, "math": math, "self": options, "completion_mask": mask, "tool_mask": None,
        "old_per_token_logps": trainer, "sampling_per_token_logps": sampling,
    }  # fmt: skip
    exec(textwrap.dedent(source[start:end]), scope)
    return scope["vllm_importance_sampling_ratio"].expand_as(mask)


@pytest.mark.parametrize("clips", [(3.0, None), (1.2, 0.8), (None, 0.8)])
@pytest.mark.parametrize("mode", TRL_MODES)
def test_trl_options_give_trl_weights(mode, clips):
    trainer, sampling, mask, _ = map(torch.as_tensor, batch(scale=1.0))
    result = rollout_correction(trainer, sampling, mask, **from_trl_options(mode, *clips))
    expected = trl_ratio(trainer, sampling, mask.int(), mode, *clips)
    torch.testing.assert_close(result.weights[mask], expected[mask], rtol=1e-5, atol=1e-6)
    assert torch.equal(result.keep, mask)  # TRL averages over rejected tokens too
    swapped = mode.replace("truncate", "mask") if "truncate" in mode else mode.replace("mask", "truncate")
    other = rollout_correction(trainer, sampling, mask, **from_trl_options(swapped, *clips))
    assert not torch.allclose(other.weights[mask], expected[mask])  # control


def test_unknown_trl_mode_is_refused():
    for mode in ("sequence", "token_icepop", "turn_mask", ""):
        with pytest.raises(ValueError, match="sequence_mask"):
            from_trl_options(mode)


def test_warning_names_the_choice():
    torch.manual_seed(0)
    log_ratio = 0.02 * torch.randn(16, 16384) - 0.0002
    zeros, ones = torch.zeros_like(log_ratio), torch.ones_like(log_ratio)
    sequence = rollout_correction(log_ratio, zeros, ones, level="sequence", mode="truncate", high=3.0).metrics
    assert "level='geometric'" in ess_warning(sequence, "sequence")
    assert ess_warning(rollout_correction(log_ratio, zeros, ones, **LONG_ROLLOUTS).metrics, "geometric") is None
    assert ess_warning(sequence | {"sequences": 4.0}, "sequence") is None
    stale = rollout_correction(log_ratio * 70, zeros, ones, level="sequence", mode="truncate", high=3.0).metrics
    assert "stale weights" in ess_warning(stale, "sequence")
    narrow = rollout_correction(log_ratio, zeros, ones, level="token", mode="mask", low=0.999, high=1.001).metrics
    assert "Widen" in ess_warning(narrow, "token")
    unknown = torch.where(torch.arange(16).unsqueeze(1) < 9, torch.nan, zeros)  # the others agree perfectly
    for sampler, share in ((unknown, "56%"), (zeros + torch.nan, "100%")):
        silent = rollout_correction(zeros, sampler, ones, level="token", mode="truncate", high=2.0).metrics
        assert f"{share} of 262144 sampled tokens have no usable" in ess_warning(silent, "token")
    few = rollout_correction(zeros[:2], zeros[:2] + torch.nan, ones[:2], level="token", mode="truncate").metrics
    assert "100% of 32768 sampled tokens have no usable" in ess_warning(few, "token")  # counted, not estimated
    flat = torch.full_like(log_ratio, -0.01)  # every turn at the clamp: equal weights of e^-20
    held = rollout_correction(flat, zeros, ones, level="turn", mode="truncate", high=2.0).metrics
    assert held["ess_weights"] == pytest.approx(1) and "level='geometric'" in ess_warning(held, "turn")
    one = log_ratio.clone()
    one[0, :10] = 15.0
    assert "high=2.0" in ess_warning(
        rollout_correction(one, zeros, ones, level="token", mode="truncate").metrics, "token"
    )
    assert "tokens" in ess_warning(
        {"tokens": 8.0, "sequences": 8.0, "ess_weights": 0.0, "abs_log_ratio": 1.0, "weight_mean": 0.0}, "token"
    )


@pytest.mark.parametrize("level", ["sequence", "turn"])
def test_a_sum_of_tokens_may_pass_the_clamp(level):
    """So an interval of it may, too: 30 tokens of 1 are e^30."""
    log_ratio = torch.ones(1, 30)
    for high, kept in ((math.exp(29), False), (math.exp(31), True)):
        result = rollout_correction(log_ratio, log_ratio * 0, log_ratio, level=level, mode="mask", high=high)
        assert bool(result.keep.all()) == kept and bool(result.keep.any()) == kept


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "word"}, "level='word'.*geometric"),
        ({"mode": "clip"}, "mode='clip'.*icepop"),
        ({"low": 0.0}, "low=0.0.*None"),
        ({"high": INF}, "high=inf"),
        ({"high": NAN}, "high=nan"),
        ({"low": 2.0, "high": 2.0}, "below high"),
        ({"low": 1.5}, "low=1.5 leaves out 1"),
        ({"low": 1.5, "mode": "truncate"}, "low=1.5 leaves out 1"),
        ({"low": 0.5, "high": 0.9}, "high=0.9 leaves out 1"),
        ({"low": 1e-9}, r"low=1e-09 lies beyond clamp=20, which holds these ratios at 2.1e-09"),
        ({"high": 1e9, "level": "turn", "mode": "truncate"}, r"high=1000000000.0 lies beyond clamp=20, .* 4.9e\+08"),
        ({"high": 2.0, "clamp": 0.5}, "high=2.0 lies beyond clamp=0.5"),
        ({"token_cap": 1e9}, "token_cap=1000000000.0 lies beyond"),
        ({"veto": 1.5}, "veto=1.5"),
        ({"clamp": 100.0}, "clamp=100.0"),
        ({"token_cap": -1.0}, "token_cap=-1.0"),
        ({"token_cap": 0.9}, "token_cap=0.9 lies below 1"),
        ({"channel_names": ("final",)}, "both or neither"),
        ({"channels": torch.zeros(2, 3), "channel_names": ("final",)}, "integer ids"),
        ({"channels": torch.zeros(2, 4, dtype=torch.long), "channel_names": ("final",)}, r"channels.*\(2, 4\)"),
        ({"mask": torch.ones(2, 4)}, r"mask.*\(2, 4\)"),
        ({"trainer_logps": torch.zeros(2, 3, dtype=torch.long)}, "floating-point"),
    ],
)
def test_bad_input_is_refused(change, message):
    valid = {
        "trainer_logps": torch.zeros(2, 3),
        "sampling_logps": torch.zeros(2, 3),
        "mask": torch.ones(2, 3),
        "level": "token",
        "mode": "mask",
    }
    arguments = valid | change
    positional = [arguments.pop(name) for name in ("trainer_logps", "sampling_logps", "mask")]
    with pytest.raises(ValueError, match=message):
        rollout_correction(*positional, **arguments)


def test_summary_refuses_other_channels():
    result = run(*batch()[:3], level="token", mode="truncate")
    with pytest.raises(ValueError, match="channel names"):
        summarize_stats(result.stats, CHANNELS)


def test_simulated_bias_without_correction_is_the_closed_form():
    """The committed numbers, against densities computed here: uncorrected, sum s_t / sqrt(T) moves the success by c times it."""
    path = Path(__file__).parents[1] / "benchmarks/correction/simulate.csv"
    with path.open() as file:
        rows = [
            row for row in csv.DictReader(file) if row["method"] == "none" and row["scenario"] != "broken rollouts"
        ]
    assert len(rows) == 6
    for row in rows:
        tokens = int(row["tokens"])
        flips = len(range(0, tokens, 200)) if row["scenario"] == "router flips" else 0
        shift = 0.1 * (0.02 * (tokens - flips) + 0.5 * flips) / math.sqrt(tokens)
        expected = math.exp(-0.5) / math.exp(-0.5 * (1 - shift) ** 2) - 1
        assert abs(float(row["bias"]) - expected) < 4 * float(row["bias_se"])
