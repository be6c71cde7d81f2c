"""Every feature of GPT-OSS is on in the tiny model, and the wide vocabulary is what the warm start assumed."""

import math
import random

import pytest
import torch

from trl_gptoss.tiny.demonstrations import Demonstration
from trl_gptoss.tiny.model import special_ids, tiny_config, tiny_generation_config, tiny_model, widen_vocabulary
from trl_gptoss.tiny.tokenizer import byte_tokenizer
from trl_gptoss.tiny.warm_start import (
    CONTEXT_WEIGHT,
    WarmStart,
    collate,
    deterministic_algorithms,
    train,
    weighted_loss,
)

SPECIAL = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_config(40, SPECIAL), seed=0)


def test_every_architectural_feature_is_on(model):
    config = model.config
    assert model.num_parameters() < 1.2e6
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.num_attention_heads > config.num_key_value_heads > 1
    assert config.num_local_experts > config.num_experts_per_tok > 1
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["factor"] > 1
    assert not config.tie_word_embeddings and model.lm_head.weight is not model.model.embed_tokens.weight
    names = dict(model.named_parameters())
    for kind in ("sinks", "q_proj.bias", "experts.gate_up_proj_bias", "router.bias"):
        assert any(name.endswith(kind) for name in names), kind


@pytest.mark.parametrize("feature", ["sinks", "window", "yarn"])
def test_each_feature_changes_the_logits(model, feature):
    """Control: without the feature the same weights give other logits on a conversation of 60 tokens."""
    ids = torch.arange(60)[None] % 40
    other = tiny_model(tiny_config(40, SPECIAL), seed=0)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert torch.equal(other(input_ids=ids).logits, expected)
        if feature == "sinks":
            for layer in other.model.layers:
                layer.self_attn.sinks.fill_(-math.inf)
        elif feature == "window":
            other.config.sliding_window = 64
            for layer in other.model.layers:
                if layer.self_attn.sliding_window is not None:
                    layer.self_attn.sliding_window = 64
        else:
            config = tiny_config(40, SPECIAL)
            config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
            other = tiny_model(config, seed=0)
            other.load_state_dict(model.state_dict())
        assert (other(input_ids=ids).logits - expected).abs().max() > 1e-3


def test_a_seed_determines_the_weights_and_leaves_the_random_state_alone(model):
    before = torch.random.get_rng_state()
    same, other = tiny_model(model.config, seed=0), tiny_model(model.config, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(same.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_generation_stops_where_gpt_oss_stops():
    tokenizer = byte_tokenizer()
    config = tiny_generation_config(tokenizer)
    assert [tokenizer.convert_ids_to_tokens(i) for i in config.eos_token_id] == [
        "<|return|>",
        "<|endoftext|>",
        "<|call|>",
    ]
    assert tokenizer.convert_ids_to_tokens(special_ids(tokenizer)["pad_token_id"]) == "<|endoftext|>"


def test_the_widened_model_computes_what_the_warm_start_assumed(model):
    """Same loss and gradients in the wide vocabulary as in the narrow one with absent ids."""
    ids = sorted(torch.randperm(300, generator=torch.Generator().manual_seed(0))[:40].tolist())
    wide = widen_vocabulary(model, ids, tiny_config(300, SPECIAL), seed=1)
    narrow_batch = torch.randint(0, 40, (2, 20), generator=torch.Generator().manual_seed(0))
    wide_batch = torch.tensor(ids)[narrow_batch]
    logits = wide(input_ids=wide_batch).logits
    assert logits.shape[-1] == 300
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wide_batch[:, 1:].flatten())
    loss = weighted_loss(model(input_ids=narrow_batch).logits, narrow_batch, torch.ones(2, 20), n_absent=260)
    torch.testing.assert_close(loss, expected)
    name = "model.layers.0.self_attn.sinks"
    (expected_grad,) = torch.autograd.grad(expected, [wide.get_parameter(name)])
    (grad,) = torch.autograd.grad(loss, [model.get_parameter(name)])
    torch.testing.assert_close(grad, expected_grad)
    control = weighted_loss(model(input_ids=narrow_batch).logits, narrow_batch, torch.ones(2, 20), n_absent=0)
    assert control < expected - 0.5


def test_collate_weighs_policy_tokens_fully_and_padding_not_at_all():
    batch = [Demonstration(ids=[5, 6, 7], policy_mask=[0, 1, 1]), Demonstration(ids=[8, 9], policy_mask=[0, 1])]
    ids, weights = collate(batch, pad_id=1)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 1]]
    torch.testing.assert_close(weights, torch.tensor([[CONTEXT_WEIGHT, 1, 1], [CONTEXT_WEIGHT, 1, 0]]))


def test_padding_changes_neither_loss_nor_gradient(model):
    """A short conversation next to a long one has the loss it has alone."""
    short = Demonstration(ids=[5, 6, 7, 8], policy_mask=[0, 0, 1, 1])
    alone, weights = collate([short], pad_id=1)
    padded, padded_weights = collate([short, Demonstration(ids=list(range(3, 30)), policy_mask=[0] * 27)], pad_id=1)
    loss = weighted_loss(model(input_ids=alone).logits, alone, weights, 0)
    logits = model(input_ids=padded).logits[:1]
    torch.testing.assert_close(weighted_loss(logits, padded[:1], padded_weights[:1], 0), loss)


def test_training_lowers_the_loss():
    def stream():
        while True:
            yield Demonstration(ids=[3, 9, 4, 11, 5], policy_mask=[0, 1, 1, 1, 1])

    losses = train(tiny_model(tiny_config(40, SPECIAL), seed=0), stream(), WarmStart(steps=15, batch_size=2))
    assert len(losses) == 15 and losses[-1] < 0.5 * losses[0]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def long_conversations():
    numbers = random.Random(0)
    while True:
        yield Demonstration(ids=numbers.choices(range(3, 40), k=60), policy_mask=[1] * 60)


@pytest.mark.usefixtures("two_threads")
def test_two_warm_starts_on_two_threads_are_equal_bit_for_bit():
    """Without `deterministic_algorithms` each of 3 further runs has other weights than the first, whichever way it is run."""

    def weights():
        model = tiny_model(tiny_config(40, SPECIAL), seed=0)
        train(model, long_conversations(), WarmStart(steps=2, batch_size=32))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first = weights()
    assert all(torch.equal(weights(), first) for _ in range(3))


@pytest.mark.parametrize("before, inside", [(0, 1), (1, 1), (2, 2)])
def test_the_setting_of_torch_comes_back_after_an_exception(before, inside):
    torch.set_deterministic_debug_mode(before)
    try:
        with pytest.raises(ZeroDivisionError), deterministic_algorithms():
            assert torch.get_deterministic_debug_mode() == inside
            1 / 0  # noqa: B018
        assert torch.get_deterministic_debug_mode() == before
    finally:
        torch.set_deterministic_debug_mode(0)
