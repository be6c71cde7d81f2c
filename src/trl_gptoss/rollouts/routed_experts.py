"""The experts that the sampler chose, as it reports them, and the checks they pass before anything is trained on them.

A sample after a prompt of P tokens that has n tokens comes with one row for each position that went through the model, all
but the last token:

    positions   prompt 0 ... P-1 | sampled P ... P+n-2 | P+n-1
    rows        P                | n - 1               | none: it was never fed back

A row is (L, k) expert ids in uint8, L layers, k experts per token. Later turns bring rows for all positions, too; only
those of new positions are taken, so each row is the choice that was made when the position was first computed for this
rollout's own tokens.

How many rows there are is checked as they arrive, and what is in them for a whole batch at once: a look at each of its few
thousand small payloads costs more than everything else that the trainer does with them.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

NOT_RECORDED = 255  # in uint8, where -1 has no place; a position for which the trainer's router chooses itself


class DamagedRouting(ValueError):
    """What a sampler reported cannot be the experts it used."""


@dataclass(kw_only=True, frozen=True)
class RouterShape:
    """The routers of a model.

    layers, top_k, experts (`int`): of the model; at most 255 experts.
    """

    layers: int
    top_k: int
    experts: int

    def __post_init__(self) -> None:
        if self.experts > NOT_RECORDED:
            raise ValueError(f"Router replay holds expert ids in uint8: {self.experts} experts are too many.")


@dataclass(kw_only=True, frozen=True, slots=True)
class _Payload:
    """Rows of one sample, for positions from `known` on.

    key, turn (`int`): the rollout, and its turn.
    rows (`np.ndarray`): (n, L, k) integers.
    prompt, known (`int`): as in [`check_routing`].
    """

    key: int
    turn: int
    rows: np.ndarray
    prompt: int
    known: int


class RoutingOfBatch:
    """What the sampler reports for the rollouts of one batch.

    Args:
        shape ([`RouterShape`]): of the model that is trained.
    """

    def __init__(self, shape: RouterShape) -> None:
        self.shape = shape
        self._payloads: list[_Payload] = []
        self._known: dict[int, int] = defaultdict(int)

    def add(self, key: int, turn: int, routing: np.ndarray | None, prompt: int, sampled: int) -> None:
        """Take the rows of positions that have none yet.

        Args:
            key (`int`): of the rollout.
            turn (`int`): to which the rows belong. It may have several samples.
            routing (`np.ndarray`): (P + n - 1, L, k) integers.
            prompt (`int`): P, tokens of the prompt.
            sampled (`int`): n, tokens sampled after it.

        Raises:
            DamagedRouting: it cannot be the rows of this sample.
        """
        _check_layout(routing, self.shape, prompt + sampled - 1)
        known = self._known[key]
        self._payloads.append(_Payload(key=key, turn=turn, rows=routing[known:], prompt=prompt, known=known))
        self._known[key] = len(routing)

    def checked(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Rollout, turn and (n, L, k) uint8 of the positions that the turn has added, for every turn.

        Raises:
            DamagedRouting: what was found and what to look at.
        """
        if not self._payloads:
            return
        payloads = sorted(
            self._payloads, key=lambda payload: (payload.key, payload.turn)
        )  # stable: samples stay in order
        rows_TLk = np.concatenate([payload.rows for payload in payloads])
        if not _sound(rows_TLk, self.shape):
            for payload in payloads:
                _check_values(payload.rows, self.shape, payload.prompt, payload.known)
        rows_TLk = rows_TLk.astype(np.uint8, copy=False)
        lengths: dict[tuple[int, int], int] = defaultdict(int)
        for payload in payloads:
            lengths[payload.key, payload.turn] += len(payload.rows)
        first = 0
        for (key, turn), length in lengths.items():
            yield key, turn, rows_TLk[first : first + length]
            first += length


def check_routing(routing: np.ndarray | None, shape: RouterShape, prompt: int, sampled: int) -> np.ndarray:
    """Refuse what is damaged, and say how.

    Args:
        routing (`np.ndarray`): (P + n - 1, L, k) integers.
        shape ([`RouterShape`]): of the model that is trained.
        prompt (`int`): P, tokens of the prompt.
        sampled (`int`): n, tokens sampled after it.

    Returns:
        `np.ndarray`: the rows in uint8.

    Raises:
        DamagedRouting: what was found and what to look at.
    """
    _check_layout(routing, shape, prompt + sampled - 1)
    if not _sound(routing, shape):
        _check_values(routing, shape, prompt, 0)
    return routing.astype(np.uint8, copy=False)


def _sound(routing: np.ndarray, shape: RouterShape) -> bool:
    """Whether every row has `top_k` different experts of the model. Rows of zeros and of 255 have not."""
    if not routing.size:
        return True
    if routing.max() >= shape.experts or routing.min() < 0:
        return False
    choices_kN = np.ascontiguousarray(routing.reshape(-1, shape.top_k).T)
    return not any((choices_kN[i] == choices_kN[j]).any() for i in range(shape.top_k) for j in range(i))


def _check_values(routing: np.ndarray, shape: RouterShape, prompt: int, known: int) -> None:
    """Say what is wrong with rows of positions from `known` on, if something is."""
    if routing.size and (routing.min() < 0 or routing.max() >= shape.experts):
        token, layer, _ = np.argwhere((routing < 0) | (routing >= shape.experts))[0]
        values = routing[token, layer].tolist()
        position = token + known
        if (routing[token] == NOT_RECORDED).all():
            raise DamagedRouting(f"The {_part(position, prompt)} position {position} was not recorded. {_ADVICE}")
        raise DamagedRouting(
            f"Position {position}, layer {layer} was routed to the experts {values}, but the model has {shape.experts}: the "
            "engine runs another model, or the ids are those of expert-parallel replicas."
        )
    _check_rows(routing, shape, prompt, known)


_ADVICE = (
    "An engine that takes a prefix from its cache does not route it again: start vLLM with enable_prefix_caching=False, or "
    "set router_replay='off'."
)


def _part(token: int, prompt: int) -> str:
    return "prompt" if token < prompt else "sampled"


def _check_layout(routing: np.ndarray | None, shape: RouterShape, rows: int) -> None:
    if routing is None:
        raise DamagedRouting(
            "The sampler reports no routing. Router replay needs a vLLM engine with enable_return_routed_experts=True, or "
            "sampling through transformers."
        )
    if not isinstance(routing, np.ndarray) or not np.issubdtype(routing.dtype, np.integer):
        found = routing.dtype if isinstance(routing, np.ndarray) else type(routing).__name__
        raise DamagedRouting(f"Expert ids must be an array of integers, got {found}.")
    expected = (rows, shape.layers, shape.top_k)
    if routing.ndim != 3:
        raise DamagedRouting(f"Expected expert ids of shape {expected}, got {routing.shape}.")
    for axis, name in ((1, "layers"), (2, "experts per token")):
        if routing.shape[axis] != expected[axis]:
            raise DamagedRouting(
                f"The sampler reports {routing.shape[axis]} {name}, the model that is trained has {expected[axis]}: they "
                "are not the same model."
            )
    if routing.shape[0] != rows:
        kind = "few" if routing.shape[0] < rows else "many"
        raise DamagedRouting(
            f"The sampler reports {routing.shape[0]} positions, too {kind}: {rows} went through the model (all but the last "
            f"token). {_ADVICE if kind == 'few' else 'The rows belong to another request.'}"
        )


def _check_rows(routing: np.ndarray, shape: RouterShape, prompt: int, known: int) -> None:
    if shape.top_k < 2:  # a row of one expert can neither repeat it nor be told from an empty one
        return
    ordered = np.sort(routing, axis=2)
    repeated = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    if not repeated.any():  # an empty row repeats 0
        return
    empty = (routing == 0).all(axis=2)
    if empty.all():
        raise DamagedRouting("All expert ids are 0: the engine returned a buffer that it never filled.")
    if empty.any():
        token, layer = np.argwhere(empty)[0]
        raise DamagedRouting(
            f"All expert ids of the {_part(token + known, prompt)} position {token + known}, layer {layer} are 0: it was not recorded. "
            f"{_ADVICE}"
        )
    token, layer = np.argwhere(repeated)[0]
    raise DamagedRouting(
        f"Position {token + known}, layer {layer} has an expert twice: {routing[token, layer].tolist()}. A router chooses "
        f"{shape.top_k} different ones; the payload is damaged."
    )
