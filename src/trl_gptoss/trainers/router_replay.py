"""Router replay: the training forward takes the experts that another forward took, and keeps the router's gradient.

A token near a tie in the router goes to other experts in the engine than in the trainer, and then its log-prob is that of
another function. `"rollout"` (R3) replays what the sampler reports; `"old"` (R2) replays, in later optimizer steps on a
batch, what the forward did that gave its old log-probs. The weights of the experts are always the softmax of the trainer's
own router logits at the replayed experts.

A micro-batch of padded rows is one forward. Packed rows are one or several, each with the experts of its own tokens.

Shapes: B rows, S positions of a padded micro-batch, T tokens of a forward, L layers, k experts per token; 255 where nothing
was recorded.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..rollouts.routed_experts import NOT_RECORDED, RouterShape, check_routing
from ..routing import ReplayRecord, RoutingRecord, capture_routing, replay_routing
from .loading import is_gpt_oss
from .packing import PackedBatch
from .padding_free import ROUTED_EXPERTS, PaddingFreeMixin


def record_generation(model: PreTrainedModel) -> AbstractContextManager[RoutingRecord]:
    """The experts of every forward of a `generate`."""
    return capture_routing(model, every_forward=True)


class RouterReplayMixin(PaddingFreeMixin):
    """The methods of [`GRPOTrainer`] that router replay depends on.

    Overridden, and why:
        `_generate_and_score_completions`: the sampler's experts go along with the generation batch.
        `compute_loss`: replays them.
        `training_step`: ends the replay after backward, whose checkpoints run the forward again.
        `_routing_of` of [`PaddingFreeMixin`]: the experts of packed tokens.
    """

    _router: RouterShape | None = None
    _replay: ExitStack
    _replayed: list[ReplayRecord]
    _recorded_BSLk: torch.Tensor | None = None

    def _setup_router_replay(self, model: PreTrainedModel) -> None:
        """Called once TRL's constructor is through. `_router` is set if the sampler has to report its experts."""
        self._replay, self._replayed = ExitStack(), []
        if self.args.router_replay == "off":
            return
        if not is_gpt_oss(model.config):
            raise ValueError(
                f"router_replay={self.args.router_replay!r} is for GPT-OSS, got {model.config.model_type}. Set "
                "router_replay='off'."
            )
        config = model.config.get_text_config()
        shape = RouterShape(
            layers=config.num_hidden_layers, top_k=config.num_experts_per_tok, experts=config.num_local_experts
        )
        if self.args.router_replay == "rollout":
            self._router = shape

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._router is not None and self.model.training:
            output[ROUTED_EXPERTS] = self._batch_of_routes(inputs, output)
        return output

    def _batch_of_routes(self, rows: list[dict[str, Any]], output: dict[str, Any]) -> torch.Tensor:
        """(B, P + C, L, k) uint8 from trajectories, or from the `routed_experts` of a `rollout_func`."""
        masks = (output["prompt_mask"], output["completion_mask"])
        lengths = torch.stack([mask.sum(1) for mask in masks], dim=1).tolist()
        width = sum(mask.size(1) for mask in masks)
        shape = (len(lengths), width, self._router.layers, self._router.top_k)
        batch_BSLk = np.full(shape, NOT_RECORDED, dtype=np.uint8)
        for i, (row, (prompt, completion)) in enumerate(zip(rows, lengths)):
            if completion == 0:  # mask_truncated_completions has taken this rollout out
                continue
            first = output["prompt_mask"].size(1) - prompt
            routes = row["trajectories"].routing if "trajectories" in row else row.get("routed_experts")
            if "trajectories" not in row:
                routes = check_routing(routes, self._router, prompt, completion)
            # All but the last token; fewer where the engine gave up behind the answer of a tool, which then predicts nothing.
            batch_BSLk[i, first : first + len(routes)] = routes
        return torch.from_numpy(batch_BSLk).to(output["prompt_ids"].device)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        with ExitStack() as self._replay:
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        if not model.training or ROUTED_EXPERTS not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._replayed = []
        if not self._padding_free:
            self._replay_from_here(_per_layer(inputs[ROUTED_EXPERTS].flatten(0, 1)))
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        differences = sum(record.differences().to(self.accelerator.device) for record in self._replayed)
        different, replayed = self.accelerator.reduce(differences, reduction="sum").tolist()
        self._metrics["train"]["router_replay/own_choice_differs"].append(different / max(replayed, 1))
        return loss

    def _replay_from_here(self, routes_LTk: torch.Tensor) -> None:
        """Until the training step ends, or another forward gets its own."""
        # They were checked when they arrived, on the host, or come from a router.
        self._replayed.append(self._replay.enter_context(replay_routing(self.model, routes_LTk, checked=True)))

    def _routes_replayed(self, inputs: dict[str, Any]) -> AbstractContextManager[Any]:
        """The replay of a padded micro-batch, for forwards outside of its training step."""
        if ROUTED_EXPERTS not in inputs or self._padding_free:
            return nullcontext()
        return replay_routing(self.model, _per_layer(inputs[ROUTED_EXPERTS].flatten(0, 1)), checked=True)

    @contextmanager
    def _routing_of(self, packed: PackedBatch, rows: list[int], routes: torch.Tensor | None) -> Iterator[None]:
        with ExitStack() as ends_with_forward:
            if routes is not None:
                routes_LTk = _per_layer(routes.flatten(0, 1)[packed.index_T])
                if torch.is_grad_enabled():
                    self._replay_from_here(routes_LTk)
                else:
                    ends_with_forward.enter_context(replay_routing(self.model, routes_LTk, checked=True))
            if self._recorded_BSLk is None:
                yield
                return
            record = ends_with_forward.enter_context(capture_routing(self.model))
            yield
            rows_BSLk = self._recorded_BSLk[rows]
            rows_BSLk.view(-1, *rows_BSLk.shape[2:])[packed.index_T] = record.indices().permute(1, 0, 2)
            self._recorded_BSLk[rows] = rows_BSLk

    @contextmanager
    def _routes_recorded(self, inputs: dict[str, Any]) -> Iterator[None]:
        """With `"old"`: remember the experts of the forward inside, which gives the old log-probs of `inputs`."""
        if self.args.router_replay != "old":
            yield
            return
        rows = inputs["prompt_ids"].size(0)
        if not self._padding_free:
            with capture_routing(self.model) as record:
                yield
            routes_LTk = record.indices()
            inputs[ROUTED_EXPERTS] = routes_LTk.unflatten(1, (rows, -1)).permute(1, 2, 0, 3).contiguous()
            return
        config = self._base_model.config.get_text_config()
        width = inputs["prompt_ids"].size(1) + inputs["completion_ids"].size(1)
        shape = (rows, width, config.num_hidden_layers, config.num_experts_per_tok)
        self._recorded_BSLk = inputs["prompt_ids"].new_full(shape, NOT_RECORDED, dtype=torch.uint8)
        try:
            yield
            inputs[ROUTED_EXPERTS] = self._recorded_BSLk
        finally:
            self._recorded_BSLk = None


def _per_layer(routes_TLk: torch.Tensor) -> torch.Tensor:
    """(L, T, k) int16 with -1 where nothing was recorded, as `replay_routing` takes it."""
    routes_LTk = routes_TLk.permute(1, 0, 2).to(torch.int16)
    return routes_LTk.masked_fill(routes_LTk == NOT_RECORDED, -1)
