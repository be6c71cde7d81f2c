"""What is refused for GPT-OSS, each with the control that passes, and where it can be run here, that it is wrong."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_policy import byte_tokenizer, tiny_model
from transformers import GptOssConfig, Qwen2Config
from transformers.integrations import deepgemm, sonicmoe
from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from trl_gptoss.trainers import GptOssGRPOConfig, GptOssGRPOTrainer, check_attention, check_experts, check_model

REFUSED_ATTENTION = {
    "sdpa": "no attention sinks",
    "flash_attention_2": "drops the sinks",
    "flash_attention_3": "drops the sinks",
    "kernels-community/flash-attn": "no attention sinks",
    "kernels-community/flash-attn2": "no attention sinks",
    "kernels-community/flash-attn2@main": "no attention sinks",
    "kernels-community/flash-attn3": "no attention sinks",
    "kernels-community/vllm-flash-attn3": "returns no gradient",
    "kernels-community/vllm-flash-attn3@v1:flash_attn": "returns no gradient",
    "kernels-community/aiter-flash-attn": "not known",
    "someone/kernel": "not known",
    "paged|eager": "paged cache",
    "paged|sdpa": "not known",
    "my_attention": "not known",
}


def gpt_oss_config(attention):
    config = tiny_model().config
    # transformers refuses or replaces most of these names when no kernel is installed; a machine that has one ends up
    # with exactly this in the config.
    config._attn_implementation_internal = attention
    assert config._attn_implementation == attention
    return config


@pytest.mark.parametrize(("name", "reason"), REFUSED_ATTENTION.items())
def test_attention_without_sinks_or_their_gradient_is_refused(name, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        check_attention(gpt_oss_config(name))
    assert repr(name) in str(refused.value) and "sink_fa3" in str(refused.value)


@pytest.mark.parametrize("name", ["sink_fa3", "eager", "flex_attention", "flash_attention_4"])
def test_control_attention_with_sinks_and_their_gradient_passes(name):
    check_attention(gpt_oss_config(name))


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_eager_and_flex_are_refused_under_packing_only(name):
    with pytest.raises(ValueError, match="attend to each other"):
        check_attention(gpt_oss_config(name), packed=True)
    check_attention(gpt_oss_config(name), packed=False)
    for packs in ("sink_fa3", "flash_attention_4"):
        check_attention(gpt_oss_config(packs), packed=True)


@pytest.mark.parametrize("name", REFUSED_ATTENTION)
def test_control_other_models_may_use_any_attention(name):
    config = Qwen2Config()
    config._attn_implementation_internal = name
    check_attention(config, packed=True)


@pytest.mark.parametrize(
    ("name", "reason"), {"sonicmoe": "SwiGLU", "deepgemm": "gradient", "batched_mm": "133 MB"}.items()
)
def test_experts_that_cannot_train_are_refused(name, reason):
    model = tiny_model()
    model.set_experts_implementation(name)
    with pytest.raises(ValueError, match=reason):
        check_experts(model)
    for fine in ("grouped_mm", "eager"):
        model.set_experts_implementation(fine)
        check_experts(model)


def test_hub_kernels_for_whole_layers_are_refused():
    model = tiny_model()
    check_model(model)
    model._use_kernels = True
    with pytest.raises(ValueError, match="use_kernels=True"):
        check_model(model)


@pytest.mark.parametrize("attention", ["sdpa", "kernels-community/vllm-flash-attn3"])
def test_the_trainer_refuses_such_a_model(tmp_path, attention):
    def build():
        data = Dataset.from_list([{"prompt": [{"role": "user", "content": "say"}]}] * 8)
        args = GptOssGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", num_generations=8)
        return GptOssGRPOTrainer(model, lambda **_: [], args, data, processing_class=byte_tokenizer())

    model = tiny_model()
    build()
    model.config._attn_implementation_internal = attention
    with pytest.raises(ValueError, match="cannot train GPT-OSS"):
        build()


# ---- the reasons, as far as they can be run or read here ----


def sink_gradients(attention):
    model = tiny_model()
    model.config._attn_implementation_internal = attention
    ids = torch.arange(24).reshape(2, 12)
    logits = model(ids).logits
    logits.square().sum().backward()
    gradients = [layer.self_attn.sinks.grad for layer in model.model.layers]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks += 3.0
        moved = (model(ids).logits - logits).abs().max().item()
    return gradients, moved


def test_sdpa_computes_a_model_without_sinks():
    gradients, moved = sink_gradients("sdpa")
    assert gradients == [None, None] and moved == 0.0
    gradients, moved = sink_gradients("eager")
    assert all(g.abs().max() > 0 for g in gradients) and moved > 1e-3


def test_transformers_drops_sinks_that_a_flash_kernel_has_no_argument_for():
    process = _process_flash_attention_kwargs
    names = ("s_aux", "learnable_sink", "dropout_p", "window_size", "deterministic", "softcap", "max_seqlen_q")
    names += ("max_seqlen_k", "block_table", "page_table", "cache_seqlens", "causal", "softmax_scale", "num_splits")
    nothing = dict.fromkeys(names, False)
    sinks = torch.ones(4)
    assert not any(v is sinks for v in process(8, 8, True, s_aux=sinks, supports_mapping=nothing).values())
    kept = process(8, 8, True, s_aux=sinks, supports_mapping={**nothing, "s_aux": True})
    assert kept["s_aux"] is sinks


def test_eager_lets_packed_sequences_see_each_other():
    model = tiny_model().eval()
    first, second = torch.arange(10).unsqueeze(0), torch.arange(30, 42).unsqueeze(0)
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(10), torch.arange(12)]).unsqueeze(0)
    with torch.no_grad():
        alone = model(second, use_cache=False).logits
        together = model(packed, position_ids=positions, use_cache=False).logits
    assert (together[:, 10:] - alone).abs().max() > 1e-2
    assert (together[:, :10] - model(first, use_cache=False).logits).abs().max() < 1e-4  # the control


def _experts_layer() -> tuple[GptOssExperts, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=32, intermediate_size=32, num_local_experts=4, num_hidden_layers=1)
    config._experts_implementation = "eager"
    layer = GptOssExperts(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
    index = torch.rand(20, 4).topk(2).indices
    return layer.bfloat16(), (torch.randn(20, 32).bfloat16(), index, torch.rand(20, 2).bfloat16())


def test_sonicmoe_is_told_nothing_of_the_clamped_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own function, with a stand-in for the kernel from the Hub that does what it is asked for."""
    layer, (x, index, weight) = _experts_layer()

    class Activation:
        SWIGLU = "plain SwiGLU"

    def kernel(x, scores, tokens, experts, w1, b1, w2, b2, *, E, activation_type, concat_layout, **options):
        assert activation_type == Activation.SWIGLU and not concat_layout and E == 4
        assert set(options) == {"is_inference_mode_enabled", "stream_id"}  # no alpha, no limit, no offset of one
        out = torch.zeros_like(x)
        for score, token, e in zip(scores, tokens.long(), experts.long(), strict=True):
            both = w1[:, :, e] @ x[token] + b1[e]
            hidden = torch.nn.functional.silu(both[::2]) * both[1::2]
            out[token] += score * (w2[:, :, e] @ hidden + b2[e])
        return out, None

    stand_in = sonicmoe.SonicMoE(activation_type_enum=Activation, moe_general_routing_inputs=kernel)
    monkeypatch.setattr(sonicmoe, "_SONICMOE", stand_in)
    plain = lambda gate_up: torch.nn.functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]  # noqa: E731
    with torch.no_grad():
        found, right = sonicmoe.sonicmoe_experts_forward(layer, x, index, weight), layer(x, index, weight)
        monkeypatch.setattr(layer, "_apply_gate", plain)
        wrong = layer(x, index, weight)
    assert (found - wrong).norm() < 0.03 * wrong.norm()  # the control: all but the activation is the same
    assert (found - right).norm() > 0.3 * right.norm()


def test_deepgemm_gives_the_experts_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own function, with a stand-in for the kernel from the Hub, which writes into a given buffer."""
    layer, (x, index, weight) = _experts_layer()

    def kernel(rows, weights, out, layout, *, use_psum_layout):
        with torch.no_grad():
            for row, e in enumerate(layout.tolist()):
                out[row] = rows[row] @ weights[e] if e >= 0 else 0

    monkeypatch.setattr(deepgemm, "is_sm100", lambda: False)
    monkeypatch.setattr(deepgemm, "_DEEPGEMM", SimpleNamespace(grouped_bf16_matmul_nn=kernel, m_alignment=8))
    x.requires_grad_()
    found, right = deepgemm.deepgemm_bf16_experts_forward(layer, x, index, weight), layer(x, index, weight)
    assert (found - right).norm() < 0.03 * right.norm()  # the control: the values are right
    found.float().sum().backward()
    assert x.grad is None and layer.gate_up_proj.grad is None and layer.down_proj.grad is None
    right.float().sum().backward()
    assert x.grad is not None and layer.gate_up_proj.grad is not None and layer.down_proj.grad is not None


def test_the_kernel_for_the_whole_layer_is_still_there() -> None:
    """MegaBlocksMoeMLP comes from the Hub and cannot be run here: pins what was read."""
    assert '@use_kernel_forward_from_hub("MegaBlocksMoeMLP")\nclass GptOssMLP' in inspect.getsource(modeling_gpt_oss)
