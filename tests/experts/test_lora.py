"""LoRA on expert parameters: `gptoss_fused` beside PEFT's own path."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, GptOssForCausalLM

import trl_gptoss  # noqa: F401  registers the implementation
from trl_gptoss.experts import fuse_expert_lora

peft = pytest.importorskip("peft")

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def build(implementation: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=48,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,
    )
    return GptOssForCausalLM._from_config(config, dtype=torch.float64, experts_implementation=implementation)


def adapted(implementation: str, fuse: bool, rank: int = 3) -> torch.nn.Module:
    config = peft.LoraConfig(r=rank, lora_alpha=7, target_modules=["q_proj"], target_parameters=TARGETS)
    model = peft.get_peft_model(build(implementation), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    if fuse:
        assert fuse_expert_lora(model) == 4
    return model


def losses_and_gradients(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_private_names_we_rely_on() -> None:
    from peft.tuners.lora import ParamWrapper
    from peft.tuners.lora.layer import _LoraFactorsProxy

    assert list(inspect.signature(ParamWrapper._activate_lora).parameters) == ["self", "active_adapters"]
    assert list(inspect.signature(ParamWrapper.get_delta_factors).parameters) == ["self", "adapter_name"]
    assert list(inspect.signature(_LoraFactorsProxy.__init__).parameters) == ["self", "lhs", "rhs", "scaling"]


@pytest.mark.parametrize("fuse", [True, False])
def test_equals_peft(fuse: bool) -> None:
    loss, grads = losses_and_gradients(adapted("eager", fuse=False))
    ours, our_grads = losses_and_gradients(adapted("gptoss_fused", fuse=fuse))
    torch.testing.assert_close(ours, loss, rtol=1e-12, atol=0)
    assert grads.keys() == our_grads.keys() and any("experts" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=1e-9, atol=1e-12, msg=name)
    base = adapted("eager", fuse=False)
    with base.disable_adapter(), torch.no_grad():
        assert (losses_of(base) - loss).abs() > 1e-3  # control: the adapter matters


def losses_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, labels=ids).loss


class Shapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and func is not torch.ops.aten.detach.default:
            self.seen.add(tuple(out.shape))
        return out


def test_no_adapted_weight_is_materialised() -> None:
    stacks = {(4, 24, 40), (4, 20, 24)}
    for fuse in (True, False):
        model = adapted("gptoss_fused", fuse)
        with Shapes() as shapes, torch.no_grad():
            losses_of(model)
        assert bool(stacks & shapes.seen) is not fuse  # without the call, PEFT makes one


def test_state_dict_saved_adapter_and_merge(tmp_path) -> None:
    plain, fused = adapted("gptoss_fused", False), adapted("gptoss_fused", True)
    assert plain.state_dict().keys() == fused.state_dict().keys()
    fused.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build("eager"), tmp_path)
    with torch.no_grad():
        expected = losses_of(fused)
        torch.testing.assert_close(losses_of(again), expected)
        torch.testing.assert_close(losses_of(fused.merge_and_unload()), expected)


def test_two_adapters_and_disabling() -> None:
    pair = []
    for implementation, fuse in (("eager", False), ("gptoss_fused", True)):
        model = adapted(implementation, fuse)
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], target_parameters=TARGETS)
        model.add_adapter("second", config)
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".second." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
            found = [losses_of(model)]
            model.base_model.set_adapter(["default", "second"])
            found.append(losses_of(model))
            model.base_model.set_adapter(["second"])
            found.append(losses_of(model))
            with model.disable_adapter():
                found.append(losses_of(model))
        pair.append(torch.stack(found))
    torch.testing.assert_close(pair[1], pair[0], rtol=1e-10, atol=0)
    assert pair[0].unique().numel() == 4


def test_another_implementation_still_gets_the_adapted_weight() -> None:
    model = adapted("gptoss_fused", True)
    with torch.no_grad():
        expected = losses_of(model)
        model.get_base_model().set_experts_implementation("eager")
        torch.testing.assert_close(losses_of(model), expected)


def test_checkpointing_recomputes_with_the_adapter() -> None:
    model, again = adapted("gptoss_fused", True), adapted("gptoss_fused", True)
    again.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    again.train(), model.train()
    for name, grad in losses_and_gradients(model)[1].items():
        torch.testing.assert_close(losses_and_gradients(again)[1][name], grad)
        break
