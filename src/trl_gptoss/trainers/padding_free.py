"""Forward passes without padding, in micro-batches of so many tokens, and over the ranks that share a sequence.

A micro-batch of rows becomes one or several *turns*. A turn is one forward and one backward, of rows that fit the token
budget, of one member of the sequence-parallel group. Loss and gradient are those of the padded micro-batch: TRL's loss of
a turn is scaled by the share that its rows have in the loss of all rows. Metrics come from the log-probs of all own rows
afterwards, so that they are what they would be without turns.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer

from ..parallelism import SequenceGroup, sequence_group, share_batches
from .packed_forward import packed_log_probs
from .packing import PackedBatch, RowLength, micro_batches, pack

Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # log-probs (B, C), entropies (B, C), aux loss
ROW_LENGTHS = "row_lengths"
ROUTED_EXPERTS = "routed_experts"  # (B, S, L, k), if experts are replayed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    inputs: dict[str, torch.Tensor | None]
    lengths: list[RowLength]
    rows: list[int]  # of the member's micro-batch
    own: bool  # whether they are this rank's
    scale: torch.Tensor | float


class _LocalAccelerator:
    """An accelerator whose sums over ranks are those of this rank: TRL takes them for metrics that a turn throws away, and
    for tensors whose size depends on the rows."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor


class PaddingFreeMixin(GRPOTrainer):
    """The methods of [`GRPOTrainer`] that see padded rows.

    Overridden, and why:
        `_generate_and_score_completions`: row lengths go along with the rows, on the host.
        `_get_per_token_logps_and_entropies`: packs the rows; ranks of a group share every batch.
        `compute_loss`: turns.
        `training_step`: reports the loss of all turns.
    """

    _padding_free: bool = False
    _sequence_group: SequenceGroup | None = None
    _host_world: dist.ProcessGroup | None = None
    _known_lengths: list[RowLength] | None = None
    _known_routes: torch.Tensor | None = None
    _in_turn: bool = False
    _scores: Scores | None = None  # of the last turn
    _all_scores: Scores | None = None  # set while TRL's loss is asked for its metrics
    _training_logps: torch.Tensor | None = None
    _reported_loss: torch.Tensor | None = None

    def _set_up_padding_free(self, enabled: bool) -> None:
        self._padding_free = enabled
        size = self.args.sequence_parallel_size
        if size > 1:
            self._sequence_group = sequence_group(size, self.accelerator.device.type)
        if self.args.max_tokens_per_micro_batch is not None and self.accelerator.num_processes > 1:
            self._host_world = dist.new_group(backend="gloo")

    # ---- log-probs ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._padding_free:
            lengths = torch.stack([output["prompt_mask"].sum(1), output["completion_mask"].sum(1)], 1)
            output[ROW_LENGTHS] = lengths.cpu()  # the only read, once per generation
        return output

    @contextmanager
    def _rows_of(self, inputs: dict[str, Any]) -> Iterator[None]:
        """The log-probs that are asked for meanwhile are those of `inputs`, whose lengths are known, and whose experts are
        replayed if there are any."""
        before = self._known_lengths, self._known_routes
        self._known_lengths = inputs[ROW_LENGTHS].tolist() if ROW_LENGTHS in inputs else None
        self._known_routes = inputs.get(ROUTED_EXPERTS)
        try:
            yield
        finally:
            self._known_lengths, self._known_routes = before

    def _routing_of(
        self, packed: PackedBatch, rows: list[int], routes: torch.Tensor | None
    ) -> AbstractContextManager[Any]:
        """Around the forward of some rows of the batch in use: [`RouterReplayMixin`] replays or records their experts."""
        return nullcontext()

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> Scores:
        if self._all_scores is not None:
            return self._all_scores
        if not self._padding_free:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **multimodal
            )  # fmt: skip
        if given := sorted(name for name, value in multimodal.items() if value is not None):
            raise ValueError(f"padding_free packs text only, and the batch has {given}. Set padding_free=False.")
        lengths = self._known_lengths
        if lengths is None:
            widths = (attention_mask.shape[1] - logits_to_keep, logits_to_keep)
            lengths = torch.stack([part.sum(1) for part in attention_mask.split(widths, 1)], 1).tolist()
        wanted = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        if self._in_turn:
            rows = list(range(len(lengths)))
            self._scores = self._score(model, input_ids, lengths, logits_to_keep, rows, self._known_routes, **wanted)
            return self._scores
        return self._score_all(model, input_ids, lengths, logits_to_keep, **wanted)

    def _score(
        self,
        model: nn.Module,
        ids: torch.Tensor,
        lengths: list[RowLength],
        width: int,
        rows: list[int],
        routes: torch.Tensor | None,
        **wanted: bool,
    ) -> Scores:
        group = self._sequence_group
        packed = pack(ids, lengths, width, multiple_of=1 if group is None else group.size)
        with self.accelerator.autocast(), self._routing_of(packed, rows, routes):
            return packed_log_probs(model, packed, group, **wanted)

    def _score_all(
        self, model: nn.Module, ids: torch.Tensor, lengths: list[RowLength], width: int, **wanted: bool
    ) -> Scores:
        """Own rows, in micro-batches, beside those of the other members of the group."""
        group = self._sequence_group
        if group is not None and torch.is_grad_enabled():
            raise RuntimeError(
                "Log-probs with gradients were asked for outside of compute_loss. With sequence_parallel_size > 1 the "
                "members of a group compute the loss of one batch together; call the trainer's compute_loss."
            )
        batches = [({"ids": ids}, (lengths, width))]
        if group is not None:
            batches = share_batches({"ids": ids}, (lengths, width), group)
        jobs = [
            (member, rows) for member, (_, (theirs, _)) in enumerate(batches) for rows in self._micro_batches(theirs)
        ]
        own, found, order = 0 if group is None else group.rank, [], []
        for number in range(self._most(len(jobs))):
            member, rows = jobs[min(number, len(jobs) - 1)]
            batch, (their_lengths, their_width) = batches[member]
            routes = None if self._known_routes is None else self._known_routes[rows]
            theirs = [their_lengths[r] for r in rows]
            scores = self._score(model, batch["ids"][rows], theirs, their_width, rows, routes, **wanted)
            if member == own and number < len(jobs):
                found.append(scores)
                order.extend(rows)
        if len(found) == 1:
            return found[0]
        return _in_order(found, order)

    def _micro_batches(self, lengths: list[RowLength]) -> list[list[int]]:
        budget = self.args.max_tokens_per_micro_batch
        if budget is not None:
            budget *= self.args.sequence_parallel_size
        return micro_batches([prompt + completion for prompt, completion in lengths], budget)

    def _most(self, count: int) -> int:
        """The largest `count` of all ranks: with sharded weights every forward and backward is a collective."""
        if self._host_world is None:
            return count
        largest = torch.tensor(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._host_world)
        return int(largest)

    # ---- loss ----

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        if not self._padding_free or return_outputs:  # the latter is TRL's error
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not torch.is_grad_enabled():
            with self._rows_of(inputs):
                return super().compute_loss(model, inputs)
        turns = self._turns(inputs)
        if len(turns) == 1 and self._sequence_group is None:
            with self._rows_of(inputs):
                return super().compute_loss(model, inputs)
        return self._loss_in_turns(model, inputs, turns)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        self._reported_loss = None
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss if self._reported_loss is None else self._reported_loss

    def _turns(self, inputs: dict[str, Any]) -> list[_Turn]:
        if ROW_LENGTHS not in inputs:  # a checkpoint of a run without packing
            masks = (inputs["prompt_mask"], inputs["completion_mask"])
            inputs = {**inputs, ROW_LENGTHS: torch.stack([mask.sum(1) for mask in masks], 1).cpu()}
        lengths = inputs[ROW_LENGTHS].tolist()
        tensors = {name: x for name, x in inputs.items() if name != ROW_LENGTHS}
        group = self._sequence_group
        batches = [(tensors, lengths)] if group is None else share_batches(tensors, lengths, group)
        turns = []
        for member, (batch, theirs) in enumerate(batches):
            for rows in self._micro_batches(theirs):
                turns.append(
                    _Turn(
                        inputs=_take_rows(batch, rows, len(theirs)),
                        lengths=[theirs[row] for row in rows],
                        rows=rows,
                        own=group is None or member == group.rank,
                        scale=self._share_of_loss(batch, rows, len(theirs)),
                    )
                )
        spare = replace(turns[-1], scale=0.0, own=False)
        return turns + [spare] * (self._most(len(turns)) - len(turns))

    def _share_of_loss(self, batch: dict[str, Any], rows: list[int], count: int) -> torch.Tensor | float:
        """Factor of the loss that TRL computes from `rows`, so that the factors' sum is its loss of the micro-batch."""
        if len(rows) == count or self.loss_type in ("dapo", "cispo", "vespo"):  # divided by a number for all
            return 1.0
        if self.loss_type == "bnpo":  # a mean of tokens
            mask = batch["completion_mask"] * batch.get("tool_mask", 1)
            return mask[rows].sum() / mask.sum().clamp(min=1)
        return len(rows) / count  # a mean of rows

    def _loss_in_turns(self, model: nn.Module, inputs: dict[str, Any], turns: list[_Turn]) -> torch.Tensor:
        found: list[Scores] = []
        order: list[int] = []
        for number, turn in enumerate(turns, 1):
            last = number == len(turns)
            with nullcontext() if last else self._without_gradient_sync(model):
                loss = self._loss_of(model, turn)
                if not last:
                    self._backward(loss)
            if turn.own:
                found.append(tuple(None if x is None else x.detach() for x in self._scores))
                order.extend(turn.rows)
        self._scores = None
        self._all_scores = _in_order(found, order)
        self._training_logps = self._all_scores[0]
        try:
            with torch.no_grad():
                self._reported_loss = super().compute_loss(model, inputs)
        finally:
            self._all_scores = None
        return loss  # its backward is the caller's, with gradient synchronisation

    def _loss_of(self, model: nn.Module, turn: _Turn) -> torch.Tensor:
        """TRL's loss of one turn, without its metrics and without its controller of the entropy noticing."""
        kept = self._metrics, self.entropy_coef, self._last_world_entropy, self._entropy_window_stats
        accelerator = self.accelerator
        self.accelerator = _LocalAccelerator(accelerator)
        self._metrics = {mode: defaultdict(list) for mode in self._metrics}
        self._in_turn, self._known_lengths = True, turn.lengths
        self._known_routes = turn.inputs.get(ROUTED_EXPERTS)
        try:
            return super().compute_loss(model, turn.inputs) * turn.scale
        finally:
            self.accelerator = accelerator
            self._in_turn, self._known_lengths, self._known_routes = False, None, None
            self._metrics, self.entropy_coef, self._last_world_entropy, self._entropy_window_stats = kept

    def _backward(self, loss: torch.Tensor) -> None:
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))

    @contextmanager
    def _without_gradient_sync(self, model: nn.Module) -> Iterator[None]:
        """As between micro-batches. FSDP2 goes on reducing: unreduced gradients would be as large as the whole model."""
        state = self.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
                yield
        finally:
            state._set_sync_gradients(before)


def _take_rows(batch: dict[str, Any], rows: list[int], count: int) -> dict[str, Any]:
    if len(rows) == count:
        return batch
    taken = {}
    for name, value in batch.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(
                f"The batch has {name} of type {type(value).__name__}, which cannot be divided into rows."
            )
        taken[name] = value[rows] if value is not None and value.ndim else value
    return taken


def _in_order(found: list[Scores], order: list[int]) -> Scores:
    """Scores of some rows each, to scores of all rows in the order of the micro-batch."""
    if len(found) == 1:
        return found[0]
    place = sorted(range(len(order)), key=order.__getitem__)
    logps, entropies, _ = zip(*found)
    return torch.cat(logps)[place], None if entropies[0] is None else torch.cat(entropies)[place], None
