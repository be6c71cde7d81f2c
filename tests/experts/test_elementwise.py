"""`fused_elementwise`: refusals on CPU, values on a GPU with liger-kernel."""

import copy
import importlib.util

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss

from trl_gptoss.experts import elementwise, fused_elementwise


def tiny_model(dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.1,
    )
    return GptOssForCausalLM._from_config(config, dtype=dtype, attn_implementation="eager")


def test_refuses_cpu_and_other_models() -> None:
    with pytest.raises(ValueError, match="CUDA"):
        fused_elementwise(tiny_model())
    with pytest.raises(ValueError, match="no GPT-OSS norms"):
        fused_elementwise(torch.nn.Linear(2, 2))


def test_missing_or_old_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise elementwise.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(elementwise.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"trl-gptoss\[fast\]"):
        elementwise._require_liger()
    monkeypatch.setattr(elementwise.metadata, "version", lambda name: "0.5.10")
    with pytest.raises(ImportError, match="found 0.5.10"):
        elementwise._require_liger()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None,
    reason="needs a CUDA GPU and liger-kernel",
)
def test_gradients_are_no_worse_than_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_gpt_oss, "apply_rotary_pos_emb", modeling_gpt_oss.apply_rotary_pos_emb)  # restored
    plain = tiny_model(torch.bfloat16).cuda()
    exact, fused = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    ids = torch.randint(0, 64, (2, 70), device="cuda")

    def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.float() for name, p in model.named_parameters()}

    oracle, theirs = gradients(exact), gradients(plain)
    assert fused_elementwise(fused) == 5 and fused_elementwise(fused) == 0
    ours = gradients(fused)
    for name, value in oracle.items():
        error, reference = ((g[name] - value).norm() / value.norm() for g in (ours, theirs))
        assert error <= 1.5 * reference, f"{name}: {error:.1e}, model's own {reference:.1e}"
