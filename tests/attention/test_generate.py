"""Generation: every cache type, left-padded batches, chunked prefill, assisted decoding, against eager one row at a time."""

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.generation.continuous_batching import continuous_api

LENGTHS = (3, 20, 11)
NEW = 12
WINDOW = 10  # shorter than a prompt and than what is generated, so that sliding caches start full, or fill up and roll


def greedy(model, ids, mask=None, **kwargs):
    settings = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, disable_compile=True)
    out = model.generate(
        input_ids=ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **(settings | kwargs)
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def alone(model, seqs):
    rows = [greedy(model, x[None], torch.ones_like(x[None])) for x in seqs]
    return torch.cat([ids for ids, _ in rows]), torch.cat([logits for _, logits in rows])


def prepare(place, models, seqs, compare):
    """Model on sink_fa3, oracle, and how far logits may be off: twice as far as eager's in the same precision."""
    device, dtypes = place
    if dtypes[0] == torch.float64:
        eager, ours = models(window=WINDOW)
        return ours.to(device), alone(eager, seqs), 1e-5
    settings = dict(heads=8, kv_heads=1, head_dim=64, window=128, experts_used=4)
    eager, ours = models(**settings)
    oracle = alone(eager, seqs)
    half = alone(eager.to(dtypes[0]), seqs)
    return ours.to(device, dtypes[0]), oracle, max(2 * compare.distance(half[1][:, 0], oracle[1][:, 0]), 2e-2)


def assert_same(ours, oracle, tolerance, compare):
    """Same tokens in double precision. In half precision greedy paths part at near ties: compare up to there."""
    if tolerance <= 1e-5:
        assert torch.equal(ours[0].cpu(), oracle[0])
    agree = (ours[0].cpu() == oracle[0]).int().cumprod(1)
    steps = [int(row.sum()) + 1 for row in agree]
    assert sum(steps) > len(steps)
    for row, n in enumerate(steps):
        assert compare.distance(ours[1][row, :n], oracle[1][row, :n]) < tolerance


@pytest.mark.parametrize("cache", ["dynamic", "static", "static_no_sliding", "dynamic_full", None])
def test_left_padded_batch(place, cache, models, sequences, padded, compare):
    seqs = sequences(*LENGTHS)
    ours, oracle, tolerance = prepare(place, models, seqs, compare)
    ids, mask = (x.to(place[0]) for x in padded(seqs, "left"))
    longest = ids.shape[1] + NEW
    kwargs = {
        "dynamic": dict(cache_implementation="dynamic"),  # knows the config, so sliding layers keep one window
        "static": dict(cache_implementation="static"),
        "static_no_sliding": dict(cache=StaticCache(config=_full_layers(ours.config), max_cache_len=longest)),
        "dynamic_full": dict(cache=DynamicCache()),  # keeps everything in sliding layers too
        None: dict(use_cache=False),
    }[cache]
    assert_same(greedy(ours, ids, mask, **kwargs), oracle, tolerance, compare)


def _full_layers(config):
    """A config that makes a static cache keep everything."""
    import copy

    config = copy.deepcopy(config)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.sliding_window = None
    return config


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_one_row_without_padding(place, cache, models, sequences, compare):
    """generate drops the mask of ones, and a static cache then hands over its whole buffer with no mask."""
    seqs = sequences(20)
    ours, oracle, tolerance = prepare(place, models, seqs, compare)
    ids = seqs[0][None].to(place[0])
    assert_same(greedy(ours, ids, torch.ones_like(ids), cache_implementation=cache), oracle, tolerance, compare)


@pytest.mark.parametrize("chunk", [1, 7, 15])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunked_prefill(cache, chunk, models, sequences, padded, compare):
    eager, ours = models(window=WINDOW)
    seqs = sequences(*LENGTHS)
    oracle = alone(eager, seqs)
    ids, mask = padded(seqs, "left")
    got = greedy(ours, ids, mask, cache_implementation=cache, prefill_chunk_size=chunk)
    assert torch.equal(got[0], oracle[0]) and compare.distance(got[1], oracle[1]) < 1e-5


@pytest.mark.parametrize("control", ["mask", "end"])
def test_the_comparison_notices(control, models, sequences, padded, compare, monkeypatch):
    """Padding ignored, or the end of what is written to a static buffer off by one."""
    from trl_gptoss.attention import mask as mask_module

    eager, ours = models(window=WINDOW)
    seqs = sequences(*LENGTHS)
    oracle = alone(eager, seqs)
    ids, mask = padded(seqs, "left")
    if control == "mask":
        mask = torch.ones_like(mask)
    else:
        row_ranges = mask_module.row_ranges
        off = torch.tensor([0, 0, 0, 1], dtype=torch.int32)
        monkeypatch.setattr(mask_module, "row_ranges", lambda *args: (row_ranges(*args) - off).clamp(min=0))
    assert compare.distance(greedy(ours, ids, mask, cache_implementation="static")[1], oracle[1]) > 1e-2


@pytest.mark.slow
def test_compiled_static_decoding(models, sequences, padded, compare):
    """The shapes of masks and caches never change, so decoding compiles to one graph, whole."""
    torch._dynamo.reset()
    eager, ours = models(dtype=torch.float32, window=WINDOW)
    seqs = sequences(*LENGTHS)
    oracle = alone(eager, seqs)
    ids, mask = padded(seqs, "left")
    ours.set_experts_implementation("grouped_mm")
    ours.forward = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    got = greedy(ours, ids, mask, cache_implementation="static", max_new_tokens=6, min_new_tokens=6)
    assert torch.equal(got[0], oracle[0][:, :6])


def test_assisted_decoding(models, sequences, compare):
    """A draft model proposes, so queries come five at a time and caches are cropped."""
    eager, ours = models(window=WINDOW)
    _, draft = models(seed=3, window=WINDOW)
    seqs = sequences(20)
    oracle = alone(eager, seqs)
    ids = seqs[0][None]
    got = greedy(ours, ids, torch.ones_like(ids), assistant_model=draft)
    assert torch.equal(got[0], oracle[0])
    got = greedy(ours, ids, torch.ones_like(ids), prompt_lookup_num_tokens=3)
    assert torch.equal(got[0], oracle[0])


def test_beam_search(models, sequences, padded):
    eager, ours = models()
    ids, mask = padded(sequences(9, 4), "left")
    settings = dict(input_ids=ids, attention_mask=mask, num_beams=3, do_sample=False, max_new_tokens=10)
    assert torch.equal(ours.generate(**settings), eager.generate(**settings))


def test_continuous_batching_refuses_the_name(models):
    """transformers accepts only names it knows for its paged cache; pinned here so that a change is noticed."""
    _, ours = models()

    class Manager:
        _original_attn_impl = None

    with pytest.raises(ValueError, match="sink_fa3 is not supported for continuous batching"):
        continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn(
            Manager(), ours, auto_switch_to_flash=False
        )
