"""What is sent over NCCL, and in which order."""

import torch

from trl_gptoss.rollouts.vllm import nccl


def test_batches_hold_copies_that_can_be_unpacked(monkeypatch):
    monkeypatch.setattr(nccl, "_BATCH_BYTES", 40)
    dtypes = [torch.bfloat16, torch.float32, torch.uint8, torch.bfloat16, torch.float32, torch.bfloat16]
    weights = [(f"w{i}", torch.full((3, 1 + i), i, dtype=dtype)) for i, dtype in enumerate(dtypes)]
    batches = [[(name, tensor.clone(), tensor) for name, tensor in batch] for batch in nccl._batches(iter(weights))]
    assert [[name for name, _, _ in batch] for batch in batches] == [["w1", "w0", "w3", "w2"], ["w4"], ["w5"]]
    for batch in batches:
        offset = 0
        for name, tensor, sent in batch:
            own = dict(weights)[name]
            assert torch.equal(tensor, own) and sent.data_ptr() != own.data_ptr()
            assert offset % tensor.element_size() == 0  # as vLLM packs them
            offset += tensor.nbytes
