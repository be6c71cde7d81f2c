"""Weights from the trainer's GPU to the server's GPUs over NCCL, with TRL's communicator.

TRL opens the group between the trainer and vLLM's workers, and vLLM's transfer engine receives. Loading is ours, in the
worker extension: vLLM's `update_weights` would reload GPT-OSS under names that leave experts and sinks stale.
Not run yet on GPUs: it needs two.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from .client import VllmClient
from .versions import EngineVersion

_BATCH_BYTES = 1 << 31  # announced and sent at a time: about one layer of the 20B


class NcclSender:
    """The trainer's end. On the main process alone.

    Args:
        base_url (`str`): of the server.
        group_port (`int`): for the rendezvous.
        device (`torch.device`): the trainer's GPU.
        server_timeout (`float`): seconds to wait for the server.
        version ([`EngineVersion`]): of the server's vLLM; the trainer's must be the same.
    """

    def __init__(
        self, base_url: str, group_port: int, device: torch.device, server_timeout: float, version: EngineVersion
    ) -> None:
        from trl.generation.vllm_client import VLLMClient as TrlClient

        if version.loading != "in_place":
            raise NotImplementedError(
                f"NCCL cannot bring weights to vLLM {version.version} on {version.device}. Use vllm_sync_transport="
                "'file' or 'http'."
            )
        self.version = version
        self.trl = TrlClient(base_url=base_url, group_port=group_port, connection_timeout=server_timeout)
        self.trl.init_communicator(device=device)

    def send(self, client: VllmClient, weights: Iterable[tuple[str, torch.Tensor]], policy_version: str) -> None:
        """Send all weights, a batch at a time: announced over HTTP, broadcast over NCCL."""
        for batch in _batches(weights):
            info = {
                "names": [name for name, _ in batch],
                "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in batch],
                "shapes": [list(t.shape) for _, t in batch],
            }
            if not self.version.has("trainer_engine"):
                info["packed"] = True
            # The workers block in the receive while they handle the request.
            with ThreadPoolExecutor(1) as pool:
                received = pool.submit(client.rpc, "policy_receive_nccl", info, policy_version)
                self._broadcast(iter(batch))
                received.result()

    def _broadcast(self, batch: Iterator[tuple[str, torch.Tensor]]) -> None:
        torch.cuda.current_stream().synchronize()  # vLLM packs on streams of its own, which wait for no other
        if self.version.has("trainer_engine"):
            from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

            packed_nccl_broadcast_producer(
                iterator=batch, group=self.trl.communicator, src=0, post_iter_func=lambda item: item[1]
            )
        else:
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerSendWeightsArgs,
                NCCLWeightTransferEngine,
            )

            NCCLWeightTransferEngine.trainer_send_weights(
                iterator=batch, trainer_args=NCCLTrainerSendWeightsArgs(group=self.trl.communicator, packed=True)
            )


def _batches(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Copies of all weights, those with the longest elements first in each batch: vLLM packs one behind the other, and unpacks
    only what begins at a multiple of its element's size."""
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0

    def aligned() -> list[tuple[str, torch.Tensor]]:
        return sorted(batch, key=lambda weight: -weight[1].element_size())

    for name, tensor in weights:
        batch.append((name, tensor.clone()))  # gathered memory may be given up when the next one is asked for
        size += tensor.nbytes
        if size >= _BATCH_BYTES:
            yield aligned()
            batch, size = [], 0
    if batch:
        yield aligned()
