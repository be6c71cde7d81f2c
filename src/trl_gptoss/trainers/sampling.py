"""The order of prompts, so that a run that is resumed in a later epoch sees what the uninterrupted run saw."""

from collections.abc import Iterator

from trl.trainer.utils import RepeatSampler


class EpochRepeatSampler(RepeatSampler):
    """TRL's `RepeatSampler` with a shuffle that depends on the seed and the epoch alone.

    The original draws the order of every epoch from one generator; a resumed process starts that generator anew and
    replays the order of epoch 0. Here `epoch` (set by the trainer when an epoch begins) is part of the seed. Epoch 0 is
    the same as in TRL.
    """

    epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()
