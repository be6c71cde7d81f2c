"""The faults are what they say, and the package would not train with them."""

import math

import pytest
import torch
from causes import CAUSES, CORRECTIONS
from faults import RIGHT, attention, register_fault
from pretrain import make_model
from transformers import GptOssForCausalLM

from trl_gptoss import GptOssGRPOConfig
from trl_gptoss.trainers import check_model


@pytest.fixture(scope="module")
def model(tokenizer):
    """With sinks that matter."""
    model = make_model("test", tokenizer, dense=False, seed=0).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, 0.0, 2.0, -1.0]))
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 600, (2, 70), generator=torch.Generator().manual_seed(0))


def logits(model, ids, name=RIGHT, **kwargs):
    with torch.no_grad(), attention(model, name):
        return model(input_ids=ids, **kwargs).logits


def eager(model, ids, sink):
    """Transformers' own attention, with `sink(s)` in the place of each sink: the oracle."""
    config = model.config.__class__.from_dict(model.config.to_dict())
    other = GptOssForCausalLM._from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="grouped_mm"
    ).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.sinks.copy_(sink(layer.self_attn.sinks))
        return other(input_ids=ids).logits


def test_without_sinks_the_model_is_another_function(model, ids):
    found = logits(model, ids, register_fault("no_sinks"))
    assert (found - logits(model, ids)).abs().max() > 0.05
    torch.testing.assert_close(found, eager(model, ids, lambda s: torch.full_like(s, -math.inf)), atol=1e-5, rtol=1e-4)


def test_strength_is_the_share_of_the_sink_that_is_missing(model, ids):
    right = logits(model, ids)
    torch.testing.assert_close(right, eager(model, ids, lambda s: s), atol=1e-5, rtol=1e-4)
    distances = []
    for strength in (0.1, 0.6, 0.95, 1.0):
        found = logits(model, ids, register_fault("no_sinks", strength))
        distances.append((found - right).norm())
        if strength < 1:
            weaker = eager(model, ids, lambda s, left=1 - strength: (s.exp() * left).log())
            torch.testing.assert_close(found, weaker, atol=1e-5, rtol=1e-4)
    assert all(a < b for a, b in zip(distances, distances[1:]))


def test_packed_sequences_stay_apart_without_sinks(model, ids):
    """The trainer packs its rows: the fault must not change more than the sinks."""
    name = register_fault("no_sinks")
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    packed = logits(model, ids[:1], name, position_ids=positions)
    alone = torch.cat([logits(model, ids[:1, :30], name), logits(model, ids[:1, 30:], name)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)
    assert (packed - logits(model, ids[:1], name)).abs().max() > 1e-3  # control: they do see each other if not packed


def gradients(model, ids, name):
    model.zero_grad(set_to_none=True)
    with attention(model, name):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def test_the_lost_gradient_is_that_of_the_sinks_and_no_other(model, ids):
    right_loss, right = gradients(model, ids, RIGHT)
    loss, found = gradients(model, ids, register_fault("no_sink_gradient"))
    assert torch.equal(loss, right_loss)
    assert torch.equal(logits(model, ids, "reproduction_no_sink_gradient"), logits(model, ids))
    sinks = [name for name in found if name.endswith("sinks")]
    assert len(sinks) == 2
    for name, grad in found.items():
        if name in sinks:
            assert grad is None or not grad.any()
            assert right[name].abs().max() > 1e-6  # control
        else:
            torch.testing.assert_close(grad, right[name])


@pytest.mark.parametrize("fault, strength", [("no_sinks", 1.0), ("no_sinks", 0.5), ("no_sink_gradient", 1.0)])
def test_the_package_refuses_each_fault(model, fault, strength):
    check_model(model, packed=True)  # control
    with attention(model, register_fault(fault, strength)), pytest.raises(ValueError, match="cannot train GPT-OSS"):
        check_model(model)
    check_model(model)  # and the attention is back


@pytest.mark.parametrize(
    "fault, strength, message",
    [("sinkless", 1.0, "expected one of"), ("no_sinks", 0.0, "above 0"), ("no_sinks", math.nan, "above 0"),
     ("no_sink_gradient", 0.5, "is for 'no_sinks'")],
)  # fmt: skip
def test_bad_faults_are_errors(fault, strength, message):
    with pytest.raises(ValueError, match=message):
        register_fault(fault, strength)


def test_every_letter_of_the_issue_has_a_cause_and_every_correction_is_valid(tmp_path):
    assert {part for c in CAUSES.values() for part in c.letter.split("+")} == set("abcdefgh")
    assert {c.correction for c in CAUSES.values()} == set(CORRECTIONS)
    for options in CORRECTIONS.values():
        GptOssGRPOConfig(str(tmp_path), bf16=False, **{f"rollout_correction_{k}": v for k, v in options.items()})
