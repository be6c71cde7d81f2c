"""Peak GPU memory of one train step, part by part, out of the model's shape and the settings alone.

Pure arithmetic: nothing is allocated, no GPU and no transformers needed. The peak of a step with activation checkpointing is

    weights + gradients + optimizer states
    + checkpoints: the input of every layer
    + the one layer that is being differentiated: what its modules saved, less those already differentiated, plus the
      temporary memory of the module at work
    + nothing else, because the fused head works in tiles.

Which module is the worst depends on the settings, so all of them are computed and the largest counts (`peak.py`). The bytes
a module saves (`layer.py`) were counted on the running model (`benchmarks/memory/simulate.py`); `tests/test_memory.py`
compares both. `shape.py` is what a model's memory depends on, `setup.py` what a run's does.
"""

from .peak import MemoryPrediction, lora_parameters, predict_memory
from .setup import TrainSetup
from .shape import GIB, ModelShape

__all__ = ["GIB", "MemoryPrediction", "ModelShape", "TrainSetup", "lora_parameters", "predict_memory"]
