"""Checkpoints that wait on the host: the same gradients, buffers used again, nothing else touched."""

import gc

import pytest
import torch
from tiny_policy import tiny_model

from trl_gptoss.trainers.offload import CheckpointOffload

TOKENS = 40


def model_with(offload: bool, **settings):
    torch.manual_seed(0)
    model = tiny_model().train()
    model.activation_checkpointing_enable()
    return model, CheckpointOffload(model, **{"min_bytes": 1, **settings}) if offload else None


def gradients(model, tokens=TOKENS, seed=0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 100, (1, tokens), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def counted(offload, monkeypatch) -> list[torch.Size]:
    packed: list[torch.Size] = []
    buffer = offload._buffer

    def record(size, pinned):
        packed.append(size)
        return buffer(size, pinned)

    monkeypatch.setattr(offload, "_buffer", record)
    return packed


def test_gradients_are_bit_equal(monkeypatch):
    model, offload = model_with(True)
    packed = counted(offload, monkeypatch)
    found, expected = gradients(model), gradients(model_with(False)[0])
    width = model.config.hidden_size
    assert packed == [TOKENS * width * 4] * model.config.num_hidden_layers  # layer inputs, and nothing else
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_buffers_are_used_again_and_grow():
    model, offload = model_with(True)
    layers = model.config.num_hidden_layers
    for tokens, seed in ((TOKENS, 0), (TOKENS, 1), (TOKENS // 2, 2), (2 * TOKENS, 3)):
        gradients(model, tokens, seed)
        gc.collect()
        assert len(offload._free) == layers
    assert {buffer.numel() for buffer in offload._free} == {2 * TOKENS * model.config.hidden_size * 4}


def test_two_forwards_before_a_backward():
    """A buffer in use is not handed out, and what is fetched ahead is the right tensor."""
    model, offload = model_with(True)
    plain, _ = model_with(False)
    ids = [torch.full((1, TOKENS), i + 3) + torch.arange(TOKENS) for i in range(2)]
    for net in (model, plain):
        losses = [net(input_ids=x, labels=x, use_cache=False).loss for x in ids]
        for loss in losses:
            loss.backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0, msg=name)
    del losses, loss
    gc.collect()
    assert len(offload._free) == 2 * model.config.num_hidden_layers


def test_a_forward_that_is_thrown_away_gives_its_buffers_back():
    model, offload = model_with(True)
    ids = torch.arange(TOKENS)[None] + 3
    out = model(input_ids=ids, use_cache=False)
    assert len(offload._free) == 0
    del out
    gc.collect()
    assert len(offload._free) == model.config.num_hidden_layers
    with pytest.raises(IndexError):  # out of the vocabulary, inside of nothing: the hooks are balanced all the same
        model(input_ids=ids + 10**6, use_cache=False)
    assert not offload._active


def test_an_error_inside_of_a_layer_leaves_no_hook_behind():
    model, offload = model_with(True)

    def fail(*args):
        raise RuntimeError("broken")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        gradients(model)
    handle.remove()
    assert not offload._active
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_only_what_is_large_and_only_while_training(monkeypatch):
    model, offload = model_with(True, min_bytes=10**9)
    packed = counted(offload, monkeypatch)
    gradients(model)
    assert not packed
    offload.min_bytes = 1
    with torch.no_grad():
        model(input_ids=torch.arange(TOKENS)[None], use_cache=False)
    model.eval()
    gradients(model)
    assert not packed  # in eval mode transformers does not checkpoint
    model.train()
    model.activation_checkpointing_disable()
    gradients(model)
    assert not packed


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="activation_offloading=False"):
        CheckpointOffload(torch.nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_checkpoints_leave_and_gradients_stay():
    tokens, held, found = 8192, {}, {}
    for offload in (False, True):
        torch.manual_seed(0)
        model = tiny_model().to("cuda", torch.bfloat16).train()
        model.activation_checkpointing_enable()
        if offload:
            CheckpointOffload(model, min_bytes=1)
        ids = torch.randint(0, 100, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
        for _ in range(2):  # the second time buffers are used again, and cuBLAS has its workspace
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.float().square().sum()
            torch.cuda.synchronize()
            held[offload] = torch.cuda.memory_allocated() - before
            loss.backward()
        found[offload] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    checkpoints = tokens * model.config.hidden_size * 2 * model.config.num_hidden_layers
    assert held[False] >= checkpoints and held[True] <= held[False] - 0.9 * checkpoints, held
    assert found[True].keys() == found[False].keys()
    for name, gradient in found[False].items():
        torch.testing.assert_close(found[True][name], gradient, rtol=1e-2, atol=1e-2 * gradient.abs().max().item())
