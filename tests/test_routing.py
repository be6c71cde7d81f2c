"""Router capture, replay, dtype and tie-breaking."""

import inspect

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

from trl_gptoss.routing import capture_routing, deterministic_top_k, replay_routing, set_router_options


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> GptOssForCausalLM:
    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_local_experts=8,
        num_experts_per_tok=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
    )
    return GptOssForCausalLM._from_config(config, dtype=dtype, experts_implementation="eager")


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))


def test_router_signature_is_the_one_we_hook() -> None:
    assert list(inspect.signature(GptOssTopKRouter.forward).parameters) == ["self", "hidden_states"]
    source = inspect.getsource(GptOssTopKRouter.forward)
    assert "return router_logits, router_scores, router_indices" in source


def test_deterministic_top_k_against_stable_sort() -> None:
    logits = torch.randint(-3, 3, (500, 16)).to(torch.bfloat16) * 0.5
    logits[:, 3] = -0.0
    expected = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(deterministic_top_k(logits, 4), expected)
    assert torch.equal(deterministic_top_k(logits.double(), 4), expected)
    assert deterministic_top_k(torch.zeros(1, 8), 3).tolist() == [[0, 1, 2]]


def test_capture_matches_topk_of_logits(ids: torch.Tensor) -> None:
    model = tiny_model()
    with capture_routing(model) as record:
        out = model(ids, output_router_logits=True)
    indices = record.indices()
    assert indices.shape == (2, 14, 3) and indices.dtype == torch.uint8
    for layer, logits in zip(indices, out.router_logits, strict=True):
        assert torch.equal(layer.long(), logits.topk(3).indices)


def test_replay_uses_the_recorded_experts_and_own_scores(ids: torch.Tensor) -> None:
    model = tiny_model()
    plain = model(ids).logits
    with capture_routing(model) as record:
        model(ids)
    with replay_routing(model, record.indices()):
        assert torch.equal(model(ids).logits, plain)
    other = (record.indices().long() + 1) % 8
    with replay_routing(model, other), capture_routing(model) as again:
        changed = model(ids).logits
    assert torch.equal(again.indices().long(), other)
    assert (changed - plain).abs().max() > 1e-3  # control: other experts must matter
    assert torch.equal(model(ids).logits, plain)  # nothing is left behind


def test_rows_of_minus_one_keep_the_own_choice(ids: torch.Tensor) -> None:
    model = tiny_model()
    with capture_routing(model) as record:
        model(ids)
    own = record.indices().long()
    partial = (own + 1) % 8
    partial[:, ::2] = -1
    with replay_routing(model, partial), capture_routing(model) as again:
        model(ids)
    assert torch.equal(again.indices()[0, ::2].long(), own[0, ::2])
    assert torch.equal(again.indices()[0, 1::2].long(), partial[0, 1::2])


def test_replay_survives_checkpointing_and_trains_the_router(ids: torch.Tensor) -> None:
    grads = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        forced = torch.randint(0, 8, (2, 14, 1), generator=torch.Generator().manual_seed(3)) + torch.arange(3)
        with replay_routing(model, forced % 8):
            model(ids, labels=ids).loss.backward()
        grads.append(model.model.layers[0].mlp.router.weight.grad)
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(grads[0], grads[1])


def test_router_dtype_and_ties() -> None:
    model = tiny_model(torch.bfloat16)
    router = model.model.layers[0].mlp.router
    hidden = torch.randn(20, 32, dtype=torch.bfloat16)
    set_router_options(model, router_dtype="float32")
    logits, scores, indices = router(hidden)
    expected = torch.nn.functional.linear(hidden.float(), router.weight.float(), router.bias.float())
    assert scores.dtype == torch.float32 and torch.equal(logits, expected)
    assert torch.equal(indices, expected.topk(3).indices)
    set_router_options(model, deterministic_top_k=True)
    with torch.no_grad():
        router.weight.zero_()
        router.bias.zero_()
    assert router(hidden)[2].tolist() == [[0, 1, 2]] * 20
    set_router_options(model)
    assert router(hidden)[1].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.zeros(1, 14, 3, dtype=torch.long), "one entry per layer"),
        (torch.zeros(2, 14, 3), "integer"),
        (torch.full((2, 14, 3), 8), "has 8 experts"),
        (torch.zeros(2, 13, 3, dtype=torch.long), "one row per token"),
        (torch.tensor([0, -1, 1]).expand(2, 14, 3), "mix recorded experts and -1"),
    ],
)
def test_bad_indices(ids: torch.Tensor, indices: torch.Tensor, message: str) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=message), replay_routing(model, indices):
        model(ids)


def test_errors() -> None:
    with pytest.raises(ValueError, match="no GPT-OSS router"):
        set_router_options(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="router_dtype"):
        set_router_options(tiny_model(), router_dtype="double")
    with pytest.raises(ValueError, match="floating"):
        set_router_options(tiny_model(), router_dtype=torch.int8)
    with capture_routing(tiny_model()) as record, pytest.raises(RuntimeError, match="No routing"):
        record.indices()
