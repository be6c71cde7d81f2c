"""Accuracies with confidence intervals, measured through the trainer's own rollouts."""

from .before_after import format_rows, train_and_measure
from ..intervals import Interval, accuracy_interval
from .outcomes import Outcomes

__all__ = ["Interval", "Outcomes", "accuracy_interval", "format_rows", "train_and_measure"]
