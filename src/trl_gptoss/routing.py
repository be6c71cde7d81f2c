"""Router choices: capture them, replay them, compute them in another dtype, and break ties the same way everywhere.

The sampler and the trainer see slightly different logits, so near-ties in the router flip experts between the two, and
so does a recomputation with another batch layout. Replaying the indices of the sampler removes that difference; the
scores are still computed from the trainer's own logits, so the router keeps its gradient.

One forward hook per `GptOssTopKRouter` does all of it; nothing is patched. Shape legend: L layers, T tokens of one
forward (batch times sequence, flattened), k = top_k, E experts.

    with capture_routing(model) as record:          # a forward of 3 tokens
        model(input_ids)
    record.indices()                                # (L, 3, k) uint8
    with replay_routing(model, record.indices()):   # keep it open through backward when checkpointing recomputes
        model(input_ids).loss.backward()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter


@dataclass(kw_only=True, slots=True)
class _Capture:
    every_forward: bool
    forwards: list[torch.Tensor] = field(default_factory=list)

    def add(self, indices: torch.Tensor) -> None:
        if not self.every_forward:
            self.forwards.clear()
        self.forwards.append(indices)


@dataclass(kw_only=True, slots=True)
class _Replay:
    """What one router replays.

    indices (`torch.Tensor` of shape `(T, k)`, int64), recorded (`torch.Tensor` of shape `(T, 1)`, bool).
    same (`torch.Tensor` of shape `(T,)`, bool): whether the router alone would have taken the same experts, once it has run.
    """

    indices: torch.Tensor
    recorded: torch.Tensor
    same: torch.Tensor | None = None


@dataclass(kw_only=True, slots=True)
class _RouterState:
    dtype: torch.dtype | None = None
    deterministic: bool = False
    replay: "_Replay | None" = None
    captures: list["_Capture"] = field(default_factory=list)  # the innermost context last


_STATES: WeakKeyDictionary[nn.Module, _RouterState] = WeakKeyDictionary()


def deterministic_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the `k` largest logits, largest first, equal logits by ascending index.

    `torch.topk` leaves the order of equal values open, and it differs between CPU, CUDA and batch shapes. bf16 logits
    have 8 bits of mantissa: ties are common.

    Args:
        logits (`torch.Tensor` of shape `(..., E)`, floating): Up to 65536 experts.
        k (`int`): How many.

    Returns:
        `torch.Tensor` of shape `(..., k)`, int64.
    """
    if logits.dtype == torch.float64:
        return logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # a float's bits, with negative values mirrored, order like the float; the index in the low bits breaks ties
    bits = (logits.float() + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    rank = torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    return (ordered * 65536 + rank).topk(k, dim=-1).indices


def _hook(
    router: GptOssTopKRouter, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    state = _STATES[router]
    logits, scores, indices = output
    recompute = state.dtype is not None and state.dtype != logits.dtype
    if recompute:
        with torch.autocast(logits.device.type, enabled=False):
            hidden, weight, bias = (t.to(state.dtype) for t in (inputs[0], router.weight, router.bias))
            logits = functional.linear(hidden, weight, bias)
    if state.deterministic:
        indices = deterministic_top_k(logits, router.top_k)
    elif recompute:
        indices = logits.topk(router.top_k, dim=-1).indices
    if state.replay is not None:
        indices = _replayed(state.replay, indices)
    if recompute or state.deterministic or state.replay is not None:
        scores = functional.softmax(logits.gather(1, indices), dim=1, dtype=logits.dtype)
    if state.captures:
        taken = indices.detach().to(torch.uint8 if router.num_experts <= 256 else torch.int32)
        for capture in state.captures:
            capture.add(taken)
    return logits, scores, indices


def _replayed(replay: _Replay, own: torch.Tensor) -> torch.Tensor:
    if replay.indices.shape != own.shape:
        raise ValueError(
            f"replay_routing got indices of shape {tuple(replay.indices.shape)} per layer, but this forward routes "
            f"{own.shape[0]} tokens to {own.shape[1]} experts each. Give one row per token of the forward, in its "
            "order (batch times sequence, padding included), with rows of -1 where nothing was recorded."
        )
    indices, recorded = replay.indices.to(own.device), replay.recorded.to(own.device)
    if replay.same is None:  # what checkpointing computes again is not counted again
        # both have their experts once each, so all of one among the other means equal sets
        replay.same = (indices[:, :, None] == own[:, None, :]).any(dim=2).all(dim=1)
    return torch.where(recorded, indices, own)


def _states(model: nn.Module) -> list[_RouterState]:
    routers = [module for module in model.modules() if isinstance(module, GptOssTopKRouter)]
    if not routers:
        raise ValueError(f"{type(model).__name__} has no GPT-OSS router.")
    for router in routers:
        if router not in _STATES:
            _STATES[router] = _RouterState()
            # before other hooks: sharding hooks release the parameters that a recomputation reads
            router.register_forward_hook(_hook, prepend=True)
    return [_STATES[router] for router in routers]


def set_router_options(
    model: nn.Module, *, router_dtype: torch.dtype | str | None = None, deterministic_top_k: bool = False
) -> None:
    """Choose how every router of `model` computes.

    Args:
        model (`torch.nn.Module`): A model with GPT-OSS routers.
        router_dtype (`torch.dtype` or `str`, *optional*): Dtype of logits and scores, e.g. `"float32"`; `None` keeps
            the model's.
        deterministic_top_k (`bool`, *optional*, defaults to `False`): Break ties by the lower expert index.
    """
    if isinstance(router_dtype, str):
        named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if router_dtype not in named:
            raise ValueError(f"router_dtype is {router_dtype!r}; expected one of {sorted(named)}, or None.")
        router_dtype = named[router_dtype]
    elif router_dtype is not None and not (isinstance(router_dtype, torch.dtype) and router_dtype.is_floating_point):
        raise ValueError(f"router_dtype is {router_dtype!r}; expected a floating torch.dtype, its name, or None.")
    for state in _states(model):
        state.dtype, state.deterministic = router_dtype, deterministic_top_k


class RoutingRecord:
    """What `capture_routing` yields."""

    def __init__(self, captures: list[_Capture]) -> None:
        self._captures = captures

    def indices(self) -> torch.Tensor:
        """Chosen experts of the last forward, `(L, T, k)`, uint8 (int32 beyond 256 experts), on the model's device."""
        return self._of_forward(-1)

    def forwards(self) -> list[torch.Tensor]:
        """The same for every forward, in order, if `capture_routing(model, every_forward=True)` kept them."""
        return [self._of_forward(number) for number in range(len(self._captures[0].forwards))]

    def _of_forward(self, number: int) -> torch.Tensor:
        if not all(capture.forwards for capture in self._captures):
            raise RuntimeError("No routing was captured: run the model inside `with capture_routing(model)`.")
        layers = [capture.forwards[number] for capture in self._captures]
        return torch.stack([layer.to(layers[0].device) for layer in layers])


@contextmanager
def capture_routing(model: nn.Module, *, every_forward: bool = False) -> Iterator[RoutingRecord]:
    """Record the chosen experts in this context.

    Args:
        model (`torch.nn.Module`): A model with GPT-OSS routers.
        every_forward (`bool`, *optional*, defaults to `False`): Keep all forwards (of a generation, for example) and
            not only the last one.
    """
    states = _states(model)
    captures = [_Capture(every_forward=every_forward) for _ in states]
    for state, capture in zip(states, captures):
        state.captures.append(capture)
    try:
        yield RoutingRecord(captures)
    finally:
        for state, capture in zip(states, captures):
            state.captures = [c for c in state.captures if c is not capture]


class ReplayRecord:
    """What `replay_routing` yields."""

    def __init__(self, layers: list[_Replay]) -> None:
        self._layers = layers  # a replay inside of this one has its own

    def differences(self) -> torch.Tensor:
        """`(2,)` int64: choices (of a token in a layer) in which the router alone would have taken other experts, and
        all replayed choices, of the first forward in this context. On the device of the indices."""
        device = self._layers[0].recorded.device
        run = [layer for layer in self._layers if layer.same is not None]
        if not run:
            return torch.zeros(2, dtype=torch.long, device=device)
        recorded_LT = torch.stack([layer.recorded[:, 0] for layer in run])
        differs_LT = recorded_LT & ~torch.stack([layer.same.to(device) for layer in run])
        return torch.stack([differs_LT.sum(), recorded_LT.sum()])


def _check_indices(model: nn.Module, indices: torch.Tensor) -> None:
    experts = next(m.num_experts for m in model.modules() if isinstance(m, GptOssTopKRouter))
    if indices.numel() and int(indices.max()) >= experts:
        raise ValueError(f"replay_routing got expert {int(indices.max())}; the model has {experts} experts.")
    recorded = indices[indices[..., 0] >= 0]
    if recorded.numel() and int(recorded.min()) < 0:
        raise ValueError(
            "replay_routing got rows that mix recorded experts and -1. A row holds the top_k experts of one token, or "
            "starts with -1 where the router shall choose."
        )


@contextmanager
def replay_routing(model: nn.Module, indices: torch.Tensor, *, checked: bool = False) -> Iterator[ReplayRecord]:
    """Use recorded experts instead of the router's choice.

    Scores are the softmax of the model's own logits at the recorded experts. Stay inside the context until backward is
    done when gradient checkpointing recomputes the forward.

    Args:
        model (`torch.nn.Module`): A model with GPT-OSS routers.
        indices (`torch.Tensor` of shape `(L, T, k)`, integer): Experts per layer and token, for example of
            `RoutingRecord.indices`. A row that starts with -1 leaves the choice to the router.
        checked (`bool`, *optional*, defaults to `False`): The values are known to be the model's experts, each once in its
            row: a look at them would wait for everything that the device still has to do.
    """
    states = _states(model)
    if indices.ndim != 3 or indices.shape[0] != len(states) or indices.is_floating_point():
        raise ValueError(
            f"replay_routing expects integer indices of shape ({len(states)}, tokens, top_k), one entry per layer, and "
            f"got {indices.dtype} of shape {tuple(indices.shape)}."
        )
    if not checked:
        _check_indices(model, indices)
    before = [state.replay for state in states]
    indices = indices.long()  # of all layers at once, as their comparison with -1
    layers = [_Replay(indices=layer, recorded=recorded) for layer, recorded in zip(indices, indices[..., :1] >= 0)]
    for state, layer in zip(states, layers, strict=True):
        state.replay = layer
    try:
        yield ReplayRecord(layers)
    finally:
        for state, replay in zip(states, before, strict=True):
            state.replay = replay
