"""What the trainer changes about Accelerate's FSDP2; tests/distributed/test_curves.py runs it."""

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn

from trl_gptoss._compat import leave_head_to_root
from trl_gptoss.parallelism import fsdp2_plugin, keep_float32_results


def test_outputs_and_reduction_stay_float32():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16  # once this fails the function is not needed
    keep_float32_results(plugin)
    policy = plugin.mixed_precision_policy
    assert policy.output_dtype is None
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy == fsdp2_plugin().mixed_precision_policy


def test_without_mixed_precision_there_is_no_policy_to_change():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    keep_float32_results(plugin)
    assert plugin.mixed_precision_policy is None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 2), nn.Linear(2, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Recorder:
    """An accelerator that looks for the modules as Accelerate does, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen, self.error = [], error

    def prepare(self, *objects, **kwargs):
        model = objects[0]
        self.seen.append((model.get_input_embeddings(), model.get_output_embeddings()))
        if self.error is not None:
            raise self.error
        return objects


def test_embeddings_are_found_again_after_the_preparation():
    model, optimizer = Model(), object()
    for accelerator in (Recorder(), Recorder(RuntimeError("no GPU"))):
        leave_head_to_root(accelerator)
        try:
            assert accelerator.prepare(model, optimizer) == (model, optimizer)
        except RuntimeError as error:
            assert error is accelerator.error
        assert accelerator.seen == [(None, None)]
        assert model.get_input_embeddings() is model.embedding and model.get_output_embeddings() is model.head
