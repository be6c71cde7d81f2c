import copy

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from tiny_policy import tiny_model
from torch import nn
from trl.distributed import DistributedBackend

from trl_gptoss.trainers.policy_weights import PolicyWeights

TARGETS = {
    "target_modules": ["q_proj", "k_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def weights(model):
    return {name: tensor.clone() for name, tensor in PolicyWeights(model, DistributedBackend(Accelerator(cpu=True)))}


def adapted(model, **config):
    """Adapters that do something."""
    config = LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **{**TARGETS, **config})
    return get_peft_model(model, config)


def test_a_plain_model_is_what_it_is():
    model = tiny_model()
    seen = weights(model)
    assert list(seen) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(seen[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 5}}])
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 24}])
def test_lora_is_merged_as_peft_merges_it(options, sizes):
    model = adapted(tiny_model(dtype=torch.float64, **sizes), **options)
    seen = weights(model)
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert set(seen) == set(merged)
    changed = 0
    for name, parameter in tiny_model(dtype=torch.float64, **sizes).named_parameters():
        torch.testing.assert_close(seen[name], merged[name].data, rtol=1e-12, atol=1e-13)
        changed += not torch.equal(seen[name], parameter)
    assert changed == 2 * 5  # three linear and two expert weights in each of two layers


def test_base_weights_are_left_as_they_are():
    """PEFT's merge and unmerge, which TRL uses, moves bf16 weights: the control."""
    model = adapted(tiny_model(dtype=torch.bfloat16))
    before = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(3):
        weights(model)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    model.merge_adapter()
    model.unmerge_adapter()
    assert not all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_bfloat16_is_rounded_once():
    model = adapted(tiny_model(dtype=torch.bfloat16), target_parameters=[])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    down, up = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = layer.get_base_layer().weight.double() + up @ down * layer.scaling["default"]
    seen = weights(model)["model.layers.0.self_attn.q_proj.weight"]
    assert seen.dtype == torch.bfloat16
    assert (seen.double() - exact).abs().max() <= 0.51 * 2**-8 * exact.abs().max() * 2


def test_disabled_and_merged_adapters():
    base = dict(tiny_model(dtype=torch.float64).named_parameters())
    model = adapted(tiny_model(dtype=torch.float64))
    expected = weights(model)
    with model.disable_adapter():
        off = weights(model)
    assert all(torch.equal(off[name], base[name]) for name in base)
    model.merge_adapter()  # must not be added twice
    merged = weights(model)
    assert all(torch.allclose(merged[name], expected[name], rtol=1e-12, atol=1e-13) for name in expected)


def test_fully_trained_copies_go_before_the_originals():
    model = adapted(tiny_model(), modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.add_(1.0)
    seen = weights(model)
    assert set(seen) == {name for name, _ in tiny_model().named_parameters()}
    assert torch.equal(seen["lm_head.weight"], tiny_model().lm_head.weight + 1.0)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_variants_that_cannot_be_merged_are_refused(options):
    model = adapted(tiny_model(), target_parameters=[], **options)
    with pytest.raises(NotImplementedError, match="plain LoRA"):
        weights(model)


def test_adapters_on_embeddings_are_refused():
    model = adapted(tiny_model(), target_modules=["embed_tokens"], target_parameters=[])
    with pytest.raises(NotImplementedError, match="embed_tokens"):
        weights(model)


def test_fsdp1_is_refused():
    sharding = DistributedBackend(Accelerator(cpu=True))
    sharding.fsdp_version = 1
    with pytest.raises(NotImplementedError, match="fsdp_version: 2"):
        PolicyWeights(nn.Linear(1, 1), sharding)
