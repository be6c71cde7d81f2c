from contextlib import contextmanager

import pytest
import torch
from tiny_policy import tiny_model
from transformers import GenerationConfig

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
    assert all(s.logps is None for s in samples)
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
    broken = backend(model, do_sample=False)
    broken.generation_config.temperature = -1.0
    broken.generation_config.do_sample = True
    with pytest.raises(ValueError):
        broken.generate([[1]], [2])
    assert model.training
