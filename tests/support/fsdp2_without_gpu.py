"""Accelerate applies FSDP2 on accelerators only; with this its own preparation, saving and loading run on CPUs with gloo."""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def fsdp2_without_gpu() -> None:
    """For processes of `accelerate launch` with an FSDP2 configuration, before the first accelerator is made."""
    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init
