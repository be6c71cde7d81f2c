"""Inputs of checkpointed layers wait for backward in pinned host memory instead of on the GPU.

With activation checkpointing every decoder layer keeps its input, (1, T, H), until backward: 138 kB a token over the 24
layers of gpt-oss-20b. A stream of its own copies each to the host as soon as the layer has begun, and brings it back
while the layer above it is being differentiated, so that two are on the GPU at a time.

TRL's `OffloadActivations`, which SFT uses, takes whatever autograd saves outside of checkpoints (the hidden states of the
head, for one, which are needed again at once) and fetches a tensor when it is asked for, not before.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

_MIN_BYTES = 2**20  # what is smaller stays where it is


class _Entry:
    """One tensor on the host. Its buffer goes back to the pool with the autograd node that saved it."""

    def __init__(self, pool: list[torch.Tensor], buffer: torch.Tensor, like: torch.Tensor) -> None:
        self.pool, self.buffer = pool, buffer
        self.host = buffer[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)
        self.device = like.device
        self.below: weakref.ref[_Entry] | None = None  # saved just before: wanted next
        self.fetched: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None

    def __del__(self) -> None:
        self.pool.append(self.buffer)


class CheckpointOffload(saved_tensors_hooks):
    """Hooks on saved tensors, active while a checkpointed layer saves its input.

    All copies of a device run in the order of one stream, so a buffer can be written again as soon as its entry is gone.

    Args:
        model (`torch.nn.Module`): with layers derived from transformers' `GradientCheckpointingLayer`.
        min_bytes (`int`, *optional*, defaults to 1 MiB): smaller tensors stay on the device.

    Raises:
        ValueError: the model has no such layers.
    """

    def __init__(self, model: nn.Module, min_bytes: int = _MIN_BYTES) -> None:
        super().__init__(self._pack, self._unpack)
        self.min_bytes = min_bytes
        self._free: list[torch.Tensor] = []
        self._last: weakref.ref[_Entry] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._active: list[bool] = []
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(
                f"activation_offloading=True, but {type(model).__name__} has no layers that transformers checkpoints. Set "
                "activation_offloading=False."
            )
        for layer in layers:  # module hooks run outside of the checkpoint: once per layer, and not again in backward
            layer.register_forward_pre_hook(self._before_layer)
            layer.register_forward_hook(self._after_layer, always_call=True)

    def _before_layer(self, layer: nn.Module, args: Any) -> None:
        self._active.append(layer.gradient_checkpointing and layer.training and torch.is_grad_enabled())
        if self._active[-1]:
            self.__enter__()

    def _after_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._active.pop():
            self.__exit__()

    def _pack(self, x: torch.Tensor) -> "torch.Tensor | _Entry":
        size = x.numel() * x.element_size()
        if size < self.min_bytes:
            return x
        entry = _Entry(self._free, self._buffer(size, x.is_cuda), x)
        if x.is_cuda:
            stream = self._stream(x.device)
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                entry.host.copy_(x, non_blocking=True)
            x.record_stream(stream)
        else:
            entry.host.copy_(x)
        entry.below, self._last = self._last, weakref.ref(entry)
        return entry

    def _unpack(self, packed: "torch.Tensor | _Entry") -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self._fetch(packed)
        below = None if packed.below is None else packed.below()
        if below is not None:
            self._fetch(below)
        x, packed.fetched = packed.fetched, None
        if packed.arrived is not None:
            torch.cuda.current_stream(x.device).wait_event(packed.arrived)
        return x

    def _fetch(self, entry: _Entry) -> None:
        if entry.fetched is not None:
            return
        entry.fetched = torch.empty(entry.host.shape, dtype=entry.host.dtype, device=entry.device)
        if entry.device.type != "cuda":
            entry.fetched.copy_(entry.host)
            return
        stream = self._stream(entry.device)
        stream.wait_stream(torch.cuda.current_stream(entry.device))  # which may still use what was in this memory
        with torch.cuda.stream(stream):
            entry.fetched.copy_(entry.host, non_blocking=True)
            entry.arrived = stream.record_event()
        entry.fetched.record_stream(stream)

    def _buffer(self, size: int, pinned: bool) -> torch.Tensor:
        """The smallest free buffer that is large enough; a new one takes the place of one that is too small."""
        large = [i for i, buffer in enumerate(self._free) if buffer.numel() >= size]
        if large:
            return self._free.pop(min(large, key=lambda i: self._free[i].numel()))
        if self._free:
            self._free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
