"""Adapters on everything GPT-OSS has, sinks included: what plain PEFT loads, what merging gives, what it leaves behind."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_policy import tiny_model
from torch import nn

from trl_gptoss.experts import fuse_expert_lora
from trl_gptoss.hub.adapters import (
    adapter_sinks,
    base_state_dict,
    merge_adapters_,
    merged_weights,
    sink_parameters,
    train_sinks,
)
from trl_gptoss.trainers.rollout_weights import quantised, sampling_weights

IDS = torch.tensor([[5, 77, 99, 3, 3, 142, 210, 7, 64, 31, 12, 8]])
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = {
    "attention": {"target_modules": ATTENTION},
    "experts": {"target_modules": [], "target_parameters": EXPERTS},
    "router": {"target_modules": [], "target_parameters": ["mlp.router.weight"]},
    "everything": {"target_modules": ATTENTION, "target_parameters": [*EXPERTS, "mlp.router.weight"]},
    "rank-stabilised": {"target_modules": ATTENTION, "use_rslora": True},
    "DoRA": {"target_modules": ["q_proj"], "use_dora": True},
    "biases": {"target_modules": ["q_proj"], "lora_bias": True},
}


def adapted(targets: str, dtype=torch.float64, sinks: bool = False) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, **TARGETS[targets])
    base = tiny_model(dtype=dtype)
    base.set_experts_implementation("eager")  # grouped_mm knows no float64
    model = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    if sinks:
        train_sinks(model)
        for parameter in sink_parameters(model).values():
            parameter.data += torch.randn_like(parameter)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("targets", TARGETS)
def test_merged_weights_give_the_same_logits_and_leave_nothing_behind(targets):
    model = adapted(targets)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apart = logits(model)
    with model.disable_adapter():
        assert (logits(model) - apart).abs().max() > 1e-2  # the adapters do something
    with merged_weights(model):
        torch.testing.assert_close(logits(model), apart, rtol=0, atol=1e-9)
        alone = tiny_model(dtype=torch.float64).eval()
        alone.set_experts_implementation("eager")
        alone.load_state_dict(base_state_dict(model))
    torch.testing.assert_close(logits(alone), apart, rtol=0, atol=1e-9)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(model), apart)


def test_fused_expert_adapters_merge_alike():
    model = adapted("everything", torch.float32)
    model.get_base_model().set_experts_implementation("gptoss_fused")
    fuse_expert_lora(model)
    apart = logits(model)
    with merged_weights(model):
        torch.testing.assert_close(logits(model), apart, rtol=0, atol=1e-4)
    assert torch.equal(logits(model), apart)


def test_weights_come_back_when_something_fails_inside():
    model = adapted("everything", torch.float32)
    before = logits(model)
    with pytest.raises(RuntimeError, match="out of memory"), merged_weights(model):
        raise RuntimeError("out of memory")
    assert torch.equal(logits(model), before)
    model.get_base_model().model.layers[1].mlp.experts.base_layer.base_layer.down_proj.data[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"), merged_weights(model, quantised):
        pass
    assert not any(module.merged_adapters for module in model.modules() if hasattr(module, "merged_adapters"))


def test_merging_in_bfloat16_rounds_once():
    model = adapted("everything", torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj"
    layer = model.get_base_model().get_submodule(name)
    factors = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    exact = layer.base_layer.weight.double() + layer.scaling["default"] * factors
    rounded = exact.to(torch.bfloat16)
    twice = layer.base_layer.weight + layer.get_delta_weight("default").to(torch.bfloat16)
    assert not torch.equal(twice, rounded)  # the control: PEFT's own merge
    merged = merge_adapters_(model)
    assert torch.equal(merged.get_submodule(name).weight, rounded)
    assert not any("lora" in key for key in merged.state_dict())


def test_plain_peft_loads_adapters_and_sinks(tmp_path):
    model = adapted("everything", torch.float32, sinks=True)
    tiny_model().save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    without = len(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    adapter_sinks(model, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(saved) == without + 2
    assert "base_model.model.model.layers.1.self_attn.sinks" in saved
    plain = tiny_model()
    plain.set_experts_implementation("eager")
    plain = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert torch.equal(logits(plain), logits(model))
    torch.testing.assert_close(logits(plain.merge_and_unload()), logits(model), rtol=0, atol=1e-5)


def trained_whole(name: str = "default", **settings) -> PeftModel:
    """An adapter on attention beside parts that are trained as they are: a whole head, rows of the embedding."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False, **settings)
    model = get_peft_model(tiny_model(), config, adapter_name=name).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key or "trainable_tokens" in key:
                parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", ["default", "other"])
@pytest.mark.parametrize(
    "settings", [{"modules_to_save": ["lm_head", "router"]}, {"modules_to_save": ["norm"]}], ids=str
)
def test_modules_that_are_trained_whole_are_part_of_every_export(tmp_path, settings, name):
    model = trained_whole(name, **settings)
    apart = logits(model)
    close = {"rtol": 1e-5, "atol": 1e-5}
    with merged_weights(model):
        alone = tiny_model().eval()
        alone.load_state_dict(base_state_dict(model))
    torch.testing.assert_close(logits(alone), apart, **close)
    assert torch.equal(logits(model), apart)
    model.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(tiny_model(), tmp_path / ("" if name == "default" else name)).eval()
    assert torch.equal(logits(plain), apart)
    merged = merge_adapters_(model)
    torch.testing.assert_close(logits(merged), apart, **close)
    assert merged.state_dict().keys() == tiny_model().state_dict().keys()


def test_of_several_adapters_the_active_one_is_exported():
    model = trained_whole(modules_to_save=["lm_head"])
    model.add_adapter("second", model.peft_config["default"])
    base, trained = tiny_model().lm_head.weight, model.get_base_model().lm_head.modules_to_save["default"].weight
    assert torch.equal(base_state_dict(model)["lm_head.weight"], trained) and not torch.equal(base, trained)
    model.set_adapter("second")
    assert torch.equal(base_state_dict(model)["lm_head.weight"], base)
    model.set_adapter("default")
    with model.disable_adapter():
        assert torch.equal(base_state_dict(model)["lm_head.weight"], base)
    assert base_state_dict(model).keys() == tiny_model().state_dict().keys()


def test_trained_rows_of_the_embedding_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"only LoRA can be merged here, found TrainableTokensLayer at .*embed_tokens"
    ):
        merge_adapters_(trained_whole(trainable_token_indices=[1, 2, 3]))
    with pytest.raises(ValueError, match="needs a PeftModel, found GptOssForCausalLM"):
        merge_adapters_(tiny_model())


def test_without_trained_sinks_the_file_is_left_as_it_is(tmp_path):
    model = adapted("attention", torch.float32)
    model.save_pretrained(tmp_path)
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    adapter_sinks(model, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before


def test_sinks_are_trained_in_float32():
    model = adapted("attention", torch.bfloat16)
    model.get_base_model().set_attn_implementation("sink_fa3")
    assert train_sinks(model) == 8  # two layers of four heads
    assert {parameter.dtype for parameter in sink_parameters(model).values()} == {torch.float32}
    model(IDS).logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in sink_parameters(model).values())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name or name.endswith("sinks") for name in trained)


def test_models_without_sinks_are_refused():
    with pytest.raises(ValueError, match="no attention sinks"):
        train_sinks(nn.Linear(2, 2))


@pytest.mark.parametrize("targets", ["attention", "everything"])
def test_sampling_weights_are_the_shipped_ones(targets):
    """Merged, then quantised; in the model that is trained nothing stays of it."""
    model = adapted(targets, torch.float32)
    before = logits(model)
    with sampling_weights(model, "trained"):
        assert torch.equal(logits(model), before)
    with sampling_weights(model, "mxfp4"):
        shipped = logits(model)
        inside = {name: tensor.clone() for name, tensor in base_state_dict(model).items()}
    assert torch.equal(logits(model), before) and not torch.allclose(shipped, before, atol=1e-3)
    with merged_weights(model):
        merged = {name: tensor.clone() for name, tensor in base_state_dict(model).items()}
    for name, tensor in merged.items():
        assert torch.equal(inside[name], quantised(name, tensor)), name
        assert torch.equal(inside[name], tensor) != name.endswith(("experts.gate_up_proj", "experts.down_proj")), name
