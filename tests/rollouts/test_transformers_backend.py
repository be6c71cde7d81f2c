from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tiny_policy import tiny_model
from transformers import GenerationConfig

from trl_gptoss.rollouts import SamplingOptions
from trl_gptoss.rollouts.transformers_backend import TransformersBackend

PAD = 257
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [30, 31, 32], [100] * 40]


@pytest.fixture(scope="module")
def model():
    return tiny_model(attention_dropout=0.5).train()


def backend(model, stop_ids=(), collective=False, **config):
    @contextmanager
    def open_model():
        yield model

    generation = GenerationConfig(pad_token_id=PAD, eos_token_id=list(stop_ids) or None, max_new_tokens=1, **config)
    return TransformersBackend(open_model, generation, list(stop_ids), PAD, torch.device("cpu"), collective)


@torch.no_grad()
def greedy(model, prompt, n):
    """One token at a time, no batch, no cache."""
    model.eval()
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    model.train()
    return ids[len(prompt) :]


def test_a_padded_batch_samples_what_each_prompt_alone_would(model):
    expected = [greedy(model, p, 12) for p in PROMPTS]
    samples = backend(model, do_sample=False).generate(PROMPTS, [12, 12, 12, 12])
    assert [s.ids for s in samples] == expected
    assert all(s.logps == [0.0] * 12 for s in samples)  # there was nothing to draw
    assert model.training  # and no dropout while sampling: the greedy tokens above are those of eval mode


def test_rows_are_cut_at_their_own_limit_and_at_the_first_stop_id(model):
    expected = [greedy(model, p, 12) for p in PROMPTS]
    stop = expected[0][4]
    samples = backend(model, stop_ids=[stop], do_sample=False).generate(PROMPTS, [12, 1, 5, 12])
    for sample, full, limit in zip(samples, expected, [12, 1, 5, 12]):
        end = full.index(stop) + 1 if stop in full else 12
        assert sample.ids == full[: min(end, limit)]
    assert samples[0].ids[-1] == stop and len(samples[0].ids) <= 5


def test_without_prompts_only_sharded_weights_run_the_model(model):
    assert backend(model).generate([], []) == []
    forwards = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    assert backend(model, collective=True).generate([], []) == []
    handle.remove()
    assert forwards


def test_training_mode_comes_back_after_a_failure(model):
    with pytest.raises(IndexError):
        backend(model, do_sample=False).generate([[10**6]], [2])
    assert model.training


@torch.no_grad()
def distribution(model, ids, temperature=1.0, top_p=1.0):
    """(V,) float64 probabilities of the next token: temperature, then the smallest set of at least `top_p`."""
    was = model.training
    model.eval()
    probs = (model(torch.tensor([ids]), use_cache=False).logits[0, -1].double() / temperature).softmax(-1)
    model.train(was)
    order = probs.argsort(descending=True)
    before = probs[order].cumsum(0) - probs[order]
    probs[order[before >= top_p]] = 0.0
    return probs / probs.sum()


OPTIONS = [
    SamplingOptions(seed=3),
    SamplingOptions(temperature=0.6, seed=4),
    SamplingOptions(temperature=1.3, top_p=0.7, seed=5),
    SamplingOptions(temperature=0.0, seed=6),
]


def test_log_probs_are_those_of_the_distribution_the_row_was_drawn_from(model):
    samples = backend(model, do_sample=True).generate(PROMPTS, [10] * 4, OPTIONS)
    for prompt, sample, options in zip(PROMPTS[:3], samples, OPTIONS):
        for i, (token, logp) in enumerate(zip(sample.ids, sample.logps, strict=True)):
            probs = distribution(model, prompt + sample.ids[:i], options.temperature, options.top_p)
            assert logp == pytest.approx(probs[token].log().item(), abs=2e-4)
    assert samples[3].ids == greedy(model, PROMPTS[3], 10)


def test_a_row_samples_the_same_in_any_company(model):
    together = backend(model, do_sample=True).generate(PROMPTS, [10] * 4, OPTIONS)
    for i in (2, 0, 1):
        [alone] = backend(model, do_sample=True).generate([PROMPTS[i]], [10], [OPTIONS[i]])
        assert alone.ids == together[i].ids
    other = [replace(o, seed=o.seed + 1) for o in OPTIONS[:3]]
    changed = backend(model, do_sample=True).generate(PROMPTS[:3], [10] * 3, other)
    assert all(a.ids != b.ids for a, b in zip(changed, together))  # the control


def test_tokens_come_as_often_as_their_probability(model):
    n = 4000
    rows = [SamplingOptions(temperature=0.5, seed=i) for i in range(n)]
    samples = backend(model, do_sample=True).generate([PROMPTS[0]] * n, [1] * n, rows)
    counts = torch.bincount(torch.tensor([s.ids[0] for s in samples]), minlength=268)
    probs = distribution(model, PROMPTS[0], temperature=0.5)
    expected = probs * n
    likely = expected > 5
    chi2 = ((counts - expected) ** 2 / expected)[likely].sum().item()
    degrees = int(likely.sum()) - 1
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5
    uniform = torch.full_like(expected, n / len(expected))
    assert ((counts - uniform) ** 2 / uniform)[likely].sum().item() > degrees + 4 * (2 * degrees) ** 0.5


def test_rows_without_a_seed_follow_the_global_generator(model):
    def sample():
        return backend(model, do_sample=True).generate([PROMPTS[0]] * 2, [10, 10])

    torch.manual_seed(1)
    first = sample()
    second = sample()
    torch.manual_seed(1)
    assert sample() == first != second and first[0].ids != first[1].ids
