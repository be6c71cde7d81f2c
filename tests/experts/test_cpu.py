"""`gptoss_fused` on CPU against the eager loop of transformers and against finite differences."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP

import trl_gptoss  # noqa: F401  registers the implementation
from trl_gptoss.experts import set_experts_token_chunk
from trl_gptoss.experts.function import fused_experts
from trl_gptoss.experts.params import Activation, ExpertParams


def build(
    implementation: str,
    dtype: torch.dtype = torch.float64,
    experts: int = 5,
    hidden: int = 24,
    intermediate: int = 20,
    top_k: int = 2,
    scale: float = 1.0,
) -> GptOssMLP:
    config = GptOssConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        num_hidden_layers=1,
    )
    config._experts_implementation = implementation
    mlp = GptOssMLP(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return mlp.to(dtype)


def gradients(mlp: GptOssMLP, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    out, _ = mlp(x)
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad} | {name: p.grad for name, p in mlp.named_parameters()}


def compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in theirs.items():
        error = (ours[name] - value).norm() / value.norm().clamp_min(1e-30)
        assert error < tolerance, f"{name}: {error:.1e}"


def test_registered() -> None:
    assert "gptoss_fused" in ALL_EXPERTS_FUNCTIONS
    model = GptOssForCausalLM._from_config(
        GptOssConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_local_experts=2,
                     num_experts_per_tok=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16),
        experts_implementation="gptoss_fused",
    )  # fmt: skip
    assert model.config._experts_implementation == "gptoss_fused"
    assert "experts_implementation" not in model.config.to_diff_dict()


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("chunk", [None, 8, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_eager(tokens: int, chunk: int | None, dtype: torch.dtype, tolerance: float) -> None:
    # scale 1 drives many gates past the clamp at 7, so both sides of it are compared
    eager, fused = build("eager", dtype), build("gptoss_fused", dtype)
    set_experts_token_chunk(fused, chunk)
    torch.manual_seed(1)
    x, grad = torch.randn(2, tokens, 24, dtype=dtype), torch.randn(2, tokens, 24, dtype=dtype)
    compare(gradients(fused, x, grad), gradients(eager, x, grad), tolerance)
    with torch.no_grad():
        torch.testing.assert_close(fused(x)[0], eager(x)[0], rtol=tolerance, atol=tolerance * 10)


def test_a_different_activation_would_be_noticed() -> None:
    eager, fused = build("eager"), build("gptoss_fused")
    fused.experts.alpha = 1.0
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    assert (fused(x)[0] - eager(x)[0]).norm() / eager(x)[0].norm() > 1e-2


def params(experts: int = 3, hidden: int = 4, intermediate: int = 3, rank: int = 0) -> ExpertParams:
    generator = torch.Generator().manual_seed(2)
    E, H, I = experts, hidden, intermediate  # noqa: E741
    shapes = [(E, H, 2 * I), (E, 2 * I), (E, I, H), (E, H)]
    if rank:
        shapes += [(E, H, rank), (E, rank, 2 * I), (E, I, rank), (E, rank, H)]
    return ExpertParams(*(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("chunk", [0, 2, 5])
def test_gradcheck(rank: int, chunk: int) -> None:
    # indices: a duplicate, an expert without tokens and a foreign expert
    index = torch.tensor([[0, 0], [2, 3], [0, 2], [2, 0], [0, 2]])
    x = torch.randn(5, 4, dtype=torch.float64).requires_grad_()
    weight = torch.rand(5, 2, dtype=torch.float64).requires_grad_()
    tensors = params(rank=rank)
    given = sum(t is not None for t in tensors)

    def run(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return fused_experts(x, index, weight, ExpertParams(*rest), Activation(1.702, 0.9), chunk)

    assert torch.autograd.gradcheck(run, (x, weight, *tensors[:given]))


def test_foreign_experts_add_nothing_and_get_no_router_gradient() -> None:
    tensors = params()
    x, weight = torch.randn(4, 4, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64).requires_grad_()
    index = torch.tensor([[0, 3], [3, 3], [1, 0], [2, 3]])
    out = fused_experts(x, index, weight, tensors, Activation(1.702, 7.0))
    kept = fused_experts(x, index.clamp(max=2), weight * (index < 3), tensors, Activation(1.702, 7.0))
    torch.testing.assert_close(out, kept)
    assert out[1].abs().sum() == 0
    out.sum().backward()
    assert (weight.grad[index == 3] == 0).all() and (weight.grad[index < 3] != 0).all()


def test_expert_parallel_flag_of_transformers() -> None:
    fused = build("gptoss_fused", experts=4)
    local = copy.deepcopy(fused.experts)
    local._is_expert_parallel, local.num_experts = True, 2
    with torch.no_grad():
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            setattr(local, name, torch.nn.Parameter(getattr(local, name)[:2].clone()))
    x, index = torch.randn(6, 24, dtype=torch.float64), torch.randint(0, 4, (6, 2))
    weight = torch.rand(6, 2, dtype=torch.float64)
    sentinel = torch.where(index < 2, index, 2)
    expected = fused.experts(x, index.clamp(max=1), weight * (index < 2))
    torch.testing.assert_close(local(x, sentinel, weight * (index < 2)), expected)


def test_permuting_tokens_permutes_the_output_and_tokens_are_independent() -> None:
    fused = build("gptoss_fused", torch.float32)
    x = torch.randn(1, 40, 24)
    permutation = torch.randperm(40)
    with torch.no_grad():
        out = fused(x)[0]
        torch.testing.assert_close(fused(x[:, permutation])[0], out[:, permutation], rtol=1e-5, atol=1e-5)
        alone = torch.cat([fused(x[:, i : i + 1])[0] for i in range(40)], dim=1)
    torch.testing.assert_close(alone, out, rtol=1e-5, atol=1e-4)


def test_frozen_experts_get_no_gradient_and_the_same_input_gradient() -> None:
    trained, frozen = build("gptoss_fused"), build("gptoss_fused")
    frozen.experts.requires_grad_(False)
    x, grad = torch.randn(1, 9, 24, dtype=torch.float64), torch.randn(1, 9, 24, dtype=torch.float64)
    a, b = gradients(trained, x, grad), gradients(frozen, x, grad)
    torch.testing.assert_close(a["x"], b["x"], rtol=0, atol=0)
    torch.testing.assert_close(a["router.weight"], b["router.weight"], rtol=0, atol=0)
    assert b["experts.gate_up_proj"] is None and a["experts.gate_up_proj"].abs().sum() > 0


def test_unused_experts_get_zero_gradients() -> None:
    fused = build("gptoss_fused")
    fused.router.bias.data[:2] = 1e3  # every token goes to experts 0 and 1
    grads = gradients(fused, torch.randn(1, 6, 24, dtype=torch.float64), torch.ones(1, 6, 24, dtype=torch.float64))
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        assert (grads[f"experts.{name}"][2:] == 0).all() and grads[f"experts.{name}"][:2].abs().sum() > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    fused = build("gptoss_fused")
    x, grad = torch.randn(1, 7, 24, dtype=torch.float64), torch.randn(1, 7, 24, dtype=torch.float64)
    plain = gradients(fused, x, grad)
    fused.zero_grad()
    again = x.clone().requires_grad_()
    checkpoint(lambda t: fused(t)[0], again, use_reentrant=reentrant).backward(grad)
    torch.testing.assert_close(again.grad, plain["x"])
    torch.testing.assert_close(fused.experts.down_proj.grad, plain["experts.down_proj"])


@pytest.mark.parametrize("chunk", [None, 4])
def test_compile_fullgraph(chunk: int | None) -> None:
    fused = build("gptoss_fused")
    set_experts_token_chunk(fused, chunk)
    x, grad = torch.randn(1, 7, 24, dtype=torch.float64), torch.randn(1, 7, 24, dtype=torch.float64)
    plain = gradients(fused, x, grad)
    fused.zero_grad()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager", dynamic=False)
    compare(gradients(compiled, x, grad) | {}, {k: plain[k] for k in ("out", "x")}, 1e-12)
    compare(
        {n: p.grad for n, p in fused.named_parameters()}, {n: plain[n] for n, _ in fused.named_parameters()}, 1e-12
    )


def test_operators_pass_opcheck() -> None:
    from trl_gptoss.experts import operators  # noqa: F401

    tensors = params(rank=2)
    x = torch.randn(5, 4, dtype=torch.float64).requires_grad_()
    weight = torch.rand(5, 2, dtype=torch.float64).requires_grad_()
    index = torch.randint(0, 3, (5, 2))
    for keep in (True, False):
        arguments = (x, index, weight, *tensors, 1.702, 7.0, 0, keep)
        checks = (
            ("test_schema", "test_faketensor")
            if not keep
            else ("test_schema", "test_faketensor", "test_aot_dispatch_static")
        )
        torch.library.opcheck(torch.ops.trl_gptoss.experts.default, arguments, test_utils=checks)


def test_autocast_computes_in_bf16_and_keeps_fp32_gradients() -> None:
    fused = build("gptoss_fused", torch.float32, scale=0.3)
    x, grad = torch.randn(1, 16, 24), torch.randn(1, 16, 24)
    exact = gradients(fused, x, grad)
    fused.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradients(fused, x, grad)
    assert rounded["out"].dtype == torch.float32 and rounded["experts.down_proj"].dtype == torch.float32
    error = (rounded["out"] - exact["out"]).norm() / exact["out"].norm()
    assert 1e-4 < error < 5e-2


def test_no_tokens() -> None:
    fused = build("gptoss_fused")
    x = torch.zeros(1, 0, 24, dtype=torch.float64).requires_grad_()
    fused.experts(x[0], torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2, dtype=torch.float64)).sum().backward()
    assert x.grad.shape == x.shape and (fused.experts.down_proj.grad == 0).all()


def test_errors() -> None:
    for wrong in (0, -1, 2.5, True, "8"):
        with pytest.raises(ValueError, match="positive"):
            set_experts_token_chunk(build("gptoss_fused"), wrong)
    with pytest.raises(ValueError, match="no GPT-OSS experts"):
        set_experts_token_chunk(torch.nn.Linear(2, 2), 4)
    with pytest.raises(TypeError, match="grouped_mm"):
        ALL_EXPERTS_FUNCTIONS["gptoss_fused"](torch.nn.Linear(2, 2), torch.zeros(1, 2))


def test_saved_memory_is_one_intermediate() -> None:
    fused = build("gptoss_fused", torch.float32)
    x = torch.randn(64, 24).requires_grad_()
    index, weight = torch.randint(0, 5, (64, 2)), torch.rand(64, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused.experts(x, index, weight)
    owned = {t.data_ptr() for t in (x, index, weight, *fused.experts.parameters())}
    extra = [t for t in kept if t.data_ptr() not in owned and t.is_floating_point()]
    assert [tuple(t.shape) for t in extra] == [(128, 40)]


def test_signature_of_the_seam() -> None:
    import inspect

    names = list(inspect.signature(GptOssExperts.forward).parameters)
    assert names == ["self", "hidden_states", "router_indices", "routing_weights"]
