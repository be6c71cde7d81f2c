"""What is switched on or off in a run: the article's causes and remedies, each as one change to "everything right"."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """
    letter (`str`): as in the list of docs/reproduction.md.
    what (`str`): for tables and legends.
    fault (`str`, *optional*): attention of the trainer's forward, see `faults.py`; the sampler keeps the right one.
    correction (`str`, *optional*, defaults to `"token"`): key of `CORRECTIONS`.
    two_forwards (`bool`, *optional*, defaults to `False`): old log-probs from a forward of their own, and the ratio as
        it comes out.
    freeze (`tuple[str, ...]`, *optional*): parts that are not trained.
    router_replay (`str`, *optional*, defaults to `"off"`): of the trainer's configuration.
    dense (`bool`, *optional*, defaults to `False`): the dense model of the same size.
    """

    letter: str
    what: str
    fault: str | None = None
    correction: str = "token"
    two_forwards: bool = False
    freeze: tuple[str, ...] = ()
    router_replay: str = "off"
    dense: bool = False


# "measured" computes the weights for the metrics and does not use them.
CORRECTIONS: dict[str, dict[str, Any]] = {
    "measured": {"level": "auto"},
    "token": {"level": "token", "mode": "truncate", "high": 2.0},
    "sequence": {"level": "sequence", "mode": "truncate", "high": 3.0},
    "geometric": {
        "level": "geometric", "mode": "mask", "low": 0.99, "high": 1.01, "veto": 1e-4, "token_cap": 2.0,
    },
}  # fmt: skip

CAUSES: dict[str, Cause] = {
    "right": Cause(letter="g", what="everything right"),
    "no_sinks": Cause(letter="a", what="no sinks", fault="no_sinks", correction="measured"),
    "no_sinks_token": Cause(letter="a+d", what="no sinks, token weights", fault="no_sinks"),
    "no_sinks_sequence": Cause(
        letter="a+d", what="no sinks, sequence weights", fault="no_sinks", correction="sequence"
    ),
    "no_sinks_geometric": Cause(
        letter="a+d", what="no sinks, geometric rejection", fault="no_sinks", correction="geometric"
    ),
    "no_sinks_frozen": Cause(
        letter="a+e", what="no sinks, attention frozen", fault="no_sinks", correction="measured", freeze=("attention",)
    ),
    "no_sink_gradient": Cause(letter="b", what="no gradient of the sinks", fault="no_sink_gradient"),
    "two_forwards": Cause(letter="c", what="two forwards, ratio not forced", two_forwards=True),
    "correction_off": Cause(letter="d", what="no correction", correction="measured"),
    "correction_sequence": Cause(letter="d", what="sequence weights", correction="sequence"),
    "correction_geometric": Cause(letter="d", what="geometric rejection", correction="geometric"),
    "attention_frozen": Cause(letter="e", what="attention frozen", freeze=("attention",)),
    "router_replay": Cause(letter="f", what="router replay", router_replay="rollout"),
    "nothing_fixed": Cause(
        letter="a+c+d", what="nothing fixed", fault="no_sinks", correction="measured", two_forwards=True
    ),
    "dense": Cause(letter="h", what="dense control", dense=True),
}


def cause(name: str) -> Cause:
    """One of `CAUSES`.

    Raises:
        `ValueError`: there is none of that name.
    """
    if name not in CAUSES:
        raise ValueError(f"cause is {name!r}, expected one of {', '.join(CAUSES)}")
    return CAUSES[name]
