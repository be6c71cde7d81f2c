"""The engine as the doctor sees it: something that gives log-probs of ids, and perhaps says more about itself."""

import json
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from .scoring import Reading, score

EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


class ScoringEngine(Protocol):
    """What samples.

    name (`str`): for the table.
    """

    name: str

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs in nats of all ids but the first of each sequence, as the engine reports them when it samples."""
        ...

    def fingerprints(self) -> dict[str, str] | None:
        """See [`fingerprints`]; `None` if the engine does not say."""
        ...

    def render(self, messages: list[dict[str, str]]) -> list[int] | None:
        """The prompt it makes of messages; `None` if it takes ids only."""
        ...


class ModelEngine:
    """A model in this process: another attention, other experts, another dtype, other weights.

    Args:
        model (`PreTrainedModel`): the model.
        reading ([`Reading`], *optional*): how it reports log-probs.
        render (`Callable`, *optional*): messages to prompt ids.
        name (`str`, *optional*, defaults to `"engine"`): for the table.
    """

    def __init__(
        self, model: PreTrainedModel, reading: Reading | None = None, render=None, name: str = "engine"
    ) -> None:
        self.model = model
        self.reading = reading or Reading()
        self.name = name
        self._render = render

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See [`ScoringEngine.score`]."""
        return [row.tolist() for row in score(self.model, sequences, self.reading)]

    def fingerprints(self) -> dict[str, str] | None:
        """See [`ScoringEngine.fingerprints`]."""
        return fingerprints(self.model)

    def render(self, messages: list[dict[str, str]]) -> list[int] | None:
        """See [`ScoringEngine.render`]."""
        return None if self._render is None else self._render(messages)


class RecordedEngine:
    """Log-probs that any engine has written down: a JSON object for each line, `{"ids": [...], "logps": [...]}`, with one
    log-prob for every id but the first.

    Args:
        path (`str` or `Path`): the file.

    Raises:
        ValueError: a line that is something else.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = Path(path).name
        self._logps: dict[tuple[int, ...], list[float]] = {}
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
                ids, logps = row["ids"], [float(p) for p in row["logps"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: expected an object with ids and logps ({error}).") from error
            if len(logps) != len(ids) - 1:
                raise ValueError(
                    f"{path}, line {number}: {len(ids)} ids need {len(ids) - 1} log-probs, found {len(logps)}."
                )
            self._logps[tuple(ids)] = logps

    @property
    def rows(self) -> list[list[int]]:
        return [list(ids) for ids in self._logps]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See [`ScoringEngine.score`]. Knows the recorded ids only."""
        return [self._logps[tuple(ids)] for ids in sequences]

    def fingerprints(self) -> dict[str, str] | None:
        """See [`ScoringEngine.fingerprints`]."""
        return None

    def render(self, messages: list[dict[str, str]]) -> list[int] | None:
        """See [`ScoringEngine.render`]."""
        return None


class VllmServer:
    """A running vLLM server, as it computes: its scores are those of temperature 1, before any processing.

    Args:
        url (`str`): such as `http://localhost:8000`.
        timeout (`float`, *optional*, defaults to `600.0`): seconds for one request.
        server_timeout (`float`, *optional*, defaults to `20.0`): seconds for the server to answer at all: it runs already.
    """

    def __init__(self, url: str, timeout: float = 600.0, server_timeout: float = 20.0) -> None:
        from ..rollouts.vllm.client import VllmClient

        self.name = url
        self.client = VllmClient(url, server_timeout, timeout)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See [`ScoringEngine.score`]."""
        self.client.wait()
        return [self.client.score(ids) for ids in sequences]

    def fingerprints(self) -> dict[str, str] | None:
        """See [`ScoringEngine.fingerprints`]. Its tensors are fused and padded: none to compare."""
        return None

    def render(self, messages: list[dict[str, str]]) -> list[int] | None:
        """See [`ScoringEngine.render`]. Rollouts send ids."""
        return None


def fingerprints(model: nn.Module) -> dict[str, str]:
    """A short text for each tensor, and for each expert of the experts' tensors, that changes with any of its values.

    Values are compared as bf16, so that the same weights in two dtypes have one fingerprint.
    """
    found: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        if name.split(".")[-1] in EXPERTS:
            found |= {f"{name}[{e}]": _fingerprint(part) for e, part in enumerate(tensor)}
        else:
            found[name] = _fingerprint(tensor)
    return found


def _fingerprint(tensor: torch.Tensor) -> str:
    if not tensor.is_floating_point():
        return str(tensor.sum().item())
    values = tensor.detach().flatten().to(torch.bfloat16).double()
    weights = torch.arange(1, values.numel() + 1, device=values.device, dtype=torch.float64).remainder(997)
    return f"{values.sum().item():.6e} {(values * weights).sum().item():.6e}"
