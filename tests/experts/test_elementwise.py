"""`fused_elementwise`: refusals on CPU, values on a GPU with liger-kernel."""

import copy
import importlib.util
from collections.abc import Callable

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from trl_gptoss.experts import elementwise, fused_elementwise
from trl_gptoss.routing import capture_routing, replay_routing


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


on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None,
    reason="needs a CUDA GPU and liger-kernel",
)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("rows", [1, 70, 4099])
def test_norm_is_as_exact_as_the_models_own(rows: int) -> None:
    torch.manual_seed(0)
    plain = GptOssRMSNorm(2880).cuda().bfloat16()
    with torch.no_grad():
        plain.weight.normal_(1, 0.3)
    exact, fused = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    fused.__class__ = elementwise.FusedRMSNorm
    x = torch.randn(rows, 2880, device="cuda").mul_(3).bfloat16()
    grad = torch.randn_like(x)

    def results(norm: GptOssRMSNorm) -> list[torch.Tensor]:
        inputs = x.to(norm.weight.dtype).requires_grad_()
        out = in_dtype(norm, inputs)
        return [out, *torch.autograd.grad(out, (inputs, norm.weight), grad.to(out.dtype))]

    def in_dtype(norm: GptOssRMSNorm, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.dtype != torch.float64:
            return norm(inputs)
        # GptOssRMSNorm computes in fp32 whatever it is given
        scale = torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * (inputs * scale)

    for name, oracle, theirs, ours in zip(
        ("out", "x", "weight"), results(exact), results(plain), results(fused), strict=True
    ):
        error, reference = relative(ours, oracle), relative(theirs, oracle)
        assert error <= 1.1 * reference, f"{name}: {error:.1e}, model's own {reference:.1e}"


@pytest.mark.gpu
@on_gpu
def test_rotary_is_as_exact_as_the_models_own() -> None:
    torch.manual_seed(0)
    original = modeling_gpt_oss.apply_rotary_pos_emb
    fused = elementwise._fused_rotary(original)
    angle = torch.rand(1, 333, 32, device="cuda") * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    q = torch.randn(1, 64, 333, 64, device="cuda").bfloat16()
    k = torch.randn(1, 8, 333, 64, device="cuda").bfloat16()
    grads = torch.randn_like(q), torch.randn_like(k)

    def results(rotary: Callable, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in (q, k)]
        # a copy, as liger-kernel writes its result over its input
        outs = rotary(*(t.clone() for t in inputs), cos.to(dtype), sin.to(dtype))
        found = [out.detach().clone() for out in outs]
        return [*found, *torch.autograd.grad(outs, inputs, [g.to(dtype, copy=True) for g in grads])]

    results_of = results(original, torch.float64), results(original, torch.bfloat16), results(fused, torch.bfloat16)
    for name, oracle, theirs, ours in zip(("q", "k", "dq", "dk"), *results_of, strict=True):
        error, reference = relative(ours, oracle), relative(theirs, oracle)
        assert error <= 1.1 * reference, f"{name}: {error:.1e}, model's own {reference:.1e}"


@pytest.mark.gpu
@on_gpu
def test_gradients_are_no_worse_than_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same experts for all: one token that changes its expert moves gradients by more than all rounding."""
    monkeypatch.setattr(modeling_gpt_oss, "apply_rotary_pos_emb", modeling_gpt_oss.apply_rotary_pos_emb)  # restored
    plain = tiny_model(torch.bfloat16).cuda()
    exact, fused = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    batches = torch.randint(0, 64, (4, 2, 70), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    routes = []
    for ids in batches:
        with capture_routing(exact) as record, torch.no_grad():
            exact(input_ids=ids)
        routes.append(record.indices())

    def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        found = []
        for ids, indices in zip(batches, routes, strict=True):
            model.zero_grad()
            with replay_routing(model, indices):
                model(input_ids=ids, labels=ids).loss.backward()
            found.append({name: p.grad.float().clone() for name, p in model.named_parameters()})
        return {name: torch.stack([grads[name] for grads in found]) for name in found[0]}

    def whole(grads: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([grads[name].flatten() for name in oracle])

    oracle, theirs = gradients(exact), gradients(plain)
    assert fused_elementwise(fused) == 5 and fused_elementwise(fused) == 0
    ours = gradients(fused)
    exactly = whole(oracle).double()
    error, overall = relative(whole(ours), exactly), relative(whole(theirs), exactly)
    assert error <= 1.1 * overall, f"all gradients: {error:.1e}, model's own {overall:.1e}"
    for name, value in oracle.items():
        error, reference = relative(ours[name], value.double()), relative(theirs[name], value.double())
        # a tensor of a few numbers, such as the sinks, can be exact by chance
        assert error <= 1.5 * max(reference, overall), f"{name}: {error:.1e}, model's own {reference:.1e}"
