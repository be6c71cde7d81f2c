"""Accuracies with confidence intervals, measured through the trainer's own rollouts."""

from ..intervals import Interval, accuracy_interval
from .before_after import format_rows, train_and_measure
from .outcomes import Outcomes

__all__ = ["Interval", "Outcomes", "accuracy_interval", "format_rows", "train_and_measure"]
