"""Checkpointing computes the second product once: recomputation ends at the last tensor saved by the experts."""

import contextlib
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import GptOssConfig, GptOssForCausalLM

import trl_gptoss  # noqa: F401  registers the implementation
from trl_gptoss.experts import set_experts_token_chunk, torch_path
from trl_gptoss.experts.function import fused_experts
from trl_gptoss.experts.params import Activation, ExpertParams

LAYERS = 2


class Counter:
    """Counts the calls of functions of `torch_path` and passes them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.calls = dict.fromkeys(names, 0)
        for name in names:
            monkeypatch.setattr(torch_path, name, self._counted(name, getattr(torch_path, name)))

    def _counted(self, name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call

    def take(self) -> tuple[int, ...]:
        found = tuple(self.calls.values())
        self.calls = dict.fromkeys(self.calls, 0)
        return found


def model(adapters: bool = False, chunk: int | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=48,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=LAYERS,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,
    )
    made = GptOssForCausalLM._from_config(config, experts_implementation="gptoss_fused")
    if chunk:
        set_experts_token_chunk(made, chunk)
    if adapters:
        peft = pytest.importorskip("peft")
        from trl_gptoss.experts import fuse_expert_lora

        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        made = peft.get_peft_model(made, peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=targets))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_B" in name:  # zero at first, so that the adapters would add nothing
                    parameter.normal_(0, 0.2)
        assert fuse_expert_lora(made) == 2 * LAYERS
    return made.train()


def checkpointed(made: torch.nn.Module) -> torch.nn.Module:
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.enable_input_require_grads()
    return made


def step(made: torch.nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(1))
    made.zero_grad()
    loss = made(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() and len(ours) > 5
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("early_stop", [True, False])
def test_second_product_is_not_recomputed(monkeypatch: pytest.MonkeyPatch, adapters: bool, early_stop: bool) -> None:
    counter = Counter(monkeypatch, "to_hidden", "from_hidden")
    plain = step(model(adapters))
    assert counter.take() == (LAYERS, LAYERS)
    with set_checkpoint_early_stop(early_stop):
        again = step(checkpointed(model(adapters)))
    # the control: without the early stop both halves run twice
    assert counter.take() == (2 * LAYERS, LAYERS if early_stop else 2 * LAYERS)
    assert_equal(again, plain)


@pytest.mark.parametrize(("chunk", "tiles"), [(8, 3), (18, 1)])  # of 18 tokens
@pytest.mark.parametrize("early_stop", [True, False])
def test_tiles_are_not_recomputed_at_all(
    monkeypatch: pytest.MonkeyPatch, chunk: int, tiles: int, early_stop: bool
) -> None:
    counter = Counter(monkeypatch, "forward", "first_product")
    plain = step(model(chunk=chunk))
    assert counter.take() == (tiles * LAYERS, 2 * tiles * LAYERS)  # one in forward, one in backward
    with set_checkpoint_early_stop(early_stop):
        again = step(checkpointed(model(chunk=chunk)))
    extra = 0 if early_stop else tiles * LAYERS
    assert counter.take() == (tiles * LAYERS + extra, 2 * tiles * LAYERS + extra)
    assert_equal(again, plain)


@pytest.mark.parametrize("frozen", [False, True])
def test_saved_tensors_may_live_elsewhere(frozen: bool) -> None:
    plain, offloaded = model(), model()
    for made in (plain, offloaded):
        made.model.layers.requires_grad_(not frozen)
        made.enable_input_require_grads()
    expected = step(plain)
    with torch.autograd.graph.save_on_cpu():
        found = step(offloaded)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def small() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(6, 4), (6, 2), (3, 4, 6), (3, 6), (3, 3, 4), (3, 4)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)


INDEX = torch.tensor([[0, 0], [2, 3], [0, 2], [2, 0], [0, 2], [1, 1]])


def run(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor, chunk: int = 0) -> torch.Tensor:
    return fused_experts(x, INDEX, weight, ExpertParams(*rest), Activation(1.702, 0.9), chunk)


@pytest.mark.parametrize("chunk", [0, 4, 6])
def test_gradcheck_through_a_checkpoint(chunk: int) -> None:
    def again(*tensors: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda *t: run(*t, chunk=chunk), *tensors, use_reentrant=False)

    assert torch.autograd.gradcheck(again, small())


@pytest.mark.parametrize("graph", [contextlib.nullcontext, torch.no_grad])
def test_activated_rows_are_freed_with_forward(monkeypatch: pytest.MonkeyPatch, graph: Callable) -> None:
    alive: list[weakref.ref] = []
    original = torch_path.to_hidden

    def watched(*args, **kwargs):
        hidden, saved = original(*args, **kwargs)
        alive.append(weakref.ref(hidden.untyped_storage()))
        alive.append(weakref.ref(hidden))
        return hidden, saved

    monkeypatch.setattr(torch_path, "to_hidden", watched)
    with graph():
        out = run(*small())
    assert out.shape == (6, 4) and len(alive) == 2 and all(ref() is None for ref in alive)


def test_stand_in_stores_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_gptoss.experts import function

    seen = []
    original = function._Output.apply
    monkeypatch.setattr(
        function._Output, "apply", lambda stand_in, half: seen.append(stand_in) or original(stand_in, half)
    )
    out = run(*small())
    (stand_in,) = seen
    assert stand_in.shape == out.shape and stand_in.untyped_storage().nbytes() == 8


def test_output_used_twice_and_partly() -> None:
    tensors = small()
    out = run(*tensors)
    found = torch.autograd.grad((out * 2 + out.sin()).sum() + out[1:3].sum(), tensors)
    out = run(*tensors)
    grad = 2 + out.detach().cos()
    grad[1:3] += 1
    for ours, theirs in zip(found, torch.autograd.grad(out, tensors, grad), strict=True):
        torch.testing.assert_close(ours, theirs)
