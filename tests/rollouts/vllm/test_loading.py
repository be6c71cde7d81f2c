"""What is written and read inside of the engine, on vLLM's module tree rebuilt in plain torch. With the real one: tests/vllm."""

import pytest
import torch
from fake_vllm_model import fake_vllm_model
from tiny_policy import tiny_model

from trl_gptoss.rollouts.vllm import loading
from trl_gptoss.rollouts.vllm.loading import (
    load_policy,
    merge_ranks,
    policy_checksums,
    policy_dtypes,
    trainer_checksums,
)


@pytest.fixture(params=[False, True], ids=["in place", "packed"])
def packed(request):
    return request.param


def sent(model, dtype=torch.float32):
    sums = {}
    for name, parameter in model.named_parameters():
        sums |= trainer_checksums(name, parameter.data, dtype)
    return sums


def random_model(**kwargs):
    """Biases and sinks are zero in a new model, and zeros have no checksum."""
    model = tiny_model(**kwargs)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_and_trainer_have_the_same_checksums_for_the_same_weights(packed, dtype, monkeypatch):
    monkeypatch.setattr(loading, "_EYE_ROWS", 7)
    model = random_model(dtype=dtype)
    engine = fake_vllm_model(model, packed)
    assert policy_checksums(engine) == sent(model, dtype)
    assert all(value != 0 for value in policy_checksums(engine).values())


@pytest.mark.parametrize(
    "name, stale",
    [
        ("model.layers.0.self_attn.sinks", "model.layers.0.self_attn.sinks"),
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight"),
        ("model.layers.1.mlp.router.bias", "model.layers.1.mlp.router.bias"),
        ("model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.2.down_proj"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers.0.mlp.experts.2.gate_up_proj_bias"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_one_changed_number_changes_the_checksum_of_its_tensor_alone(name, stale, packed):
    model = random_model()
    engine = fake_vllm_model(model, packed)
    with torch.no_grad():
        parameter = model.get_parameter(name)
        (parameter[2] if "experts" in name else parameter).flatten()[0].add_(1e-3)
    held, new = policy_checksums(engine), sent(model)
    assert [n for n in new if new[n] != held[n]] == [stale]


def test_dtypes_have_the_names_of_the_checkpoint(packed):
    model = random_model(dtype=torch.bfloat16)
    engine = fake_vllm_model(model, packed)
    engine.model.layers[0].attn.sinks.data = engine.model.layers[0].attn.sinks.data.float()
    expected = {name: "bfloat16" for name, _ in model.named_parameters()}
    assert policy_dtypes(engine) == {**expected, "model.layers.0.self_attn.sinks": "float32"}


def test_in_place_hands_over_one_tensor_at_a_time():
    calls, live = [], []

    class Model(torch.nn.Module):
        def load_weights(self, weights):
            calls.append([name for name, _ in weights])

    def stream():
        for name in "abc":
            live.append(name)
            yield name, torch.zeros(1)
            assert calls[-1] == [name]

    load_policy(Model(), None, stream(), "in_place")
    assert calls == [["a"], ["b"], ["c"]]


def test_a_loader_that_zeroes_what_it_is_given_leaves_the_trainer_its_weights():
    """As vLLM's does with the down projection's bias on all tensor-parallel ranks but the first."""
    model = random_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    class Model(torch.nn.Module):
        def load_weights(self, weights):
            for name, weight in weights:
                if name.endswith("down_proj_bias"):
                    weight.zero_()

    load_policy(Model(), None, ((n, p.data) for n, p in model.named_parameters()), "in_place")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_experts_get_a_name_each_and_sinks_are_kept_apart():
    model, sinks = random_model(), {}
    names = dict(loading._one_name_per_expert(((n, p.data) for n, p in model.named_parameters()), sinks))
    experts = model.model.layers[1].mlp.experts
    assert torch.equal(names["model.layers.1.mlp.experts.3.down_proj_bias"], experts.down_proj_bias[3])
    assert torch.equal(sinks["model.layers.0.self_attn.sinks"], model.model.layers[0].self_attn.sinks)
    assert len(names) == len(list(model.parameters())) - 2 * (1 + 4) + 2 * 4 * 4
    assert len(sinks) == 2


def test_parts_of_tensor_parallel_ranks_add_up_and_copies_count_once():
    parts = [{"split": 3, "copied": 7}, {"split": 4, "copied": 7}]
    held = merge_ranks(parts)
    assert 7 in held["split"] and 3 not in held["split"]
    assert 7 in held["copied"]
    assert merge_ranks(parts[:1]) == {"split": {3}, "copied": {7}}
