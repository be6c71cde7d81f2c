"""The Triton kernels against the plain PyTorch path in float64.

On a CUDA machine the kernels run natively. Elsewhere they run in Triton's interpreter when the `triton` package is
installed, in fp32 on tiny shapes, which covers the index logic of every kernel and of the tensor-descriptor variants.
Triton 3.6's interpreter turns arrays of one element into numbers, which numpy 2.4 refuses: install `numpy<2.4` for it.
"""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
NUMPY_FITS = tuple(int(part) for part in version("numpy").split(".")[:2]) < (2, 4)


@pytest.mark.slow
@pytest.mark.skipif(GPU or INTERPRETED or not HAS_TRITON, reason="needs the triton package and no GPU")
@pytest.mark.skipif(not NUMPY_FITS, reason="Triton's interpreter needs numpy < 2.4")
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # Triton reads it when a kernel is defined
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-3000:]


runnable = pytest.mark.skipif(
    not (GPU or (INTERPRETED and HAS_TRITON)), reason="needs a CUDA GPU, or TRITON_INTERPRET=1 and the triton package"
)
DEVICE = "cuda" if GPU else "cpu"
ACTIVATION = (1.702, 0.9)


def case(tokens, top_k, experts, hidden, intermediate, rank=0, spread="random", dtype=torch.float32, seed=0):
    from trl_gptoss.experts.params import ExpertParams

    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)

    T, E, H, I = tokens, experts, hidden, intermediate  # noqa: E741
    index = torch.randint(0, E, (T, top_k), generator=generator)
    if spread == "one":
        index = torch.full_like(index, E - 1)
    elif spread == "foreign":
        index = torch.where(torch.rand(index.shape, generator=generator) < 0.4, E, index)
    elif spread == "nowhere":
        index = torch.full_like(index, E)
    tensors = [randn(E, H, 2 * I, scale=H**-0.5), randn(E, 2 * I), randn(E, I, H, scale=I**-0.5), randn(E, H)]
    if rank:
        shapes = [(E, H, rank), (E, rank, 2 * I), (E, I, rank), (E, rank, H)]
        tensors += [randn(*shape, scale=0.2) for shape in shapes]
    weight = torch.rand(T, top_k, generator=generator).to(DEVICE, dtype)
    return randn(T, H), index.to(DEVICE), weight, ExpertParams(*tensors), randn(T, H)


def compare(inputs, tolerance: float) -> None:
    from trl_gptoss.experts import cuda_path, torch_path
    from trl_gptoss.experts.params import Activation, ExpertParams, Gradients, Needs

    x, index, weight, params, grad = inputs
    activation = Activation(*ACTIVATION)
    adapted = params.lora_up_in is not None
    needs = Needs(*[True] * 6, *[adapted] * 4)
    wide = ExpertParams(*(t if t is None else t.double() for t in params))
    out, saved = cuda_path.forward(x, index, weight, params, activation, keep=True)
    hidden, sort = cuda_path.to_hidden(x, index, params, activation, keep=False)
    evaluated = cuda_path.from_hidden(hidden, sort, index, weight, params)
    torch.testing.assert_close(out, evaluated, rtol=1e-5, atol=1e-5)
    expected, kept = torch_path.forward(x.double(), index, weight.double(), wide, activation, keep=True)
    found = cuda_path.backward(grad, x, index, weight, params, activation, saved, needs)
    oracle = torch_path.backward(grad.double(), x.double(), index, weight.double(), wide, activation, kept, needs)
    pairs = {"out": (out, expected)} | {
        name: (ours, theirs)
        for name, ours, theirs in zip(Gradients._fields, found, oracle, strict=True)
        if theirs is not None
    }
    for name, (ours, theirs) in pairs.items():
        error = (ours.double() - theirs).norm() / theirs.norm().clamp_min(1e-12)
        assert error < tolerance, f"{name}: {error:.1e}"


SHAPES = {
    "one token": (1, 4, 5, 16, 16),
    "odd": (33, 3, 7, 40, 24),
    "adapted": (21, 2, 4, 40, 36, 16),
    "one expert": (40, 2, 4, 24, 20, 0, "one"),
    "foreign": (37, 2, 3, 64, 48, 16, "foreign"),
    "nowhere": (5, 2, 3, 16, 16, 0, "nowhere"),
    "two column tiles": (9, 2, 3, 136, 140),
    "two row tiles": (90, 2, 1, 16, 16),
}


@runnable
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_against_float64(shape: tuple) -> None:
    compare(case(*shape), 2e-5)


@runnable
def test_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_gptoss.experts import cuda_path

    monkeypatch.setattr(cuda_path, "_SMALL_BUFFER", 0)
    monkeypatch.setattr(cuda_path, "_COLUMN_BLOCK", 16)
    monkeypatch.setattr(cuda_path, "_COPY_BLOCK", 24)
    compare(case(21, 2, 4, 40, 36, 16), 2e-5)


@runnable
def test_tiles_over_tokens_sum_the_parameter_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_gptoss.experts import cuda_path, function, torch_path
    from trl_gptoss.experts.params import Activation, ExpertParams

    x, index, weight, params, grad = case(21, 2, 4, 24, 20, 16)
    results = []
    for path, chunk, dtype in ((cuda_path, 8, torch.float32), (torch_path, 0, torch.float64)):
        monkeypatch.setattr(function, "_path", lambda x, path=path: path)
        tensors = [t.to(dtype).requires_grad_() for t in (x, weight, *params)]
        out = function.fused_experts(
            tensors[0], index, tensors[1], ExpertParams(*tensors[2:]), Activation(*ACTIVATION), chunk
        )
        results.append([out, *torch.autograd.grad(out, tensors, grad.to(dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < 2e-5


@runnable
@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointing_computes_the_second_product_once(monkeypatch: pytest.MonkeyPatch, early_stop: bool) -> None:
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    from trl_gptoss.experts import cuda_path, function
    from trl_gptoss.experts.params import Activation, ExpertParams

    calls = []
    original = cuda_path.from_hidden
    monkeypatch.setattr(function, "_path", lambda x: cuda_path)
    monkeypatch.setattr(cuda_path, "from_hidden", lambda *arguments: calls.append(1) or original(*arguments))
    x, index, weight, params, grad = case(21, 2, 4, 40, 36, 16)
    tensors = [t.requires_grad_() for t in (x, weight, *params)]

    def run(x, weight, *rest):
        return function.fused_experts(x, index, weight, ExpertParams(*rest), Activation(*ACTIVATION))

    out = run(*tensors)
    expected = [out, *torch.autograd.grad(out, tensors, grad)]
    with set_checkpoint_early_stop(early_stop):
        out = checkpoint(run, *tensors, use_reentrant=False)
    found = [out, *torch.autograd.grad(out, tensors, grad)]
    assert len(calls) == (2 if early_stop else 3)  # one without a checkpoint
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@runnable
@pytest.mark.parametrize("store", [False, True])
def test_tensor_descriptors(monkeypatch: pytest.MonkeyPatch, store: bool) -> None:
    from trl_gptoss.experts import cuda_path, tiles
    from trl_gptoss.experts.tuning import TileConfig

    if not GPU:  # the interpreter emulates descriptors on the CPU
        aligned = lambda m: m.stride(1) == 1 and m.stride(0) * m.element_size() % 16 == 0  # noqa: E731
        monkeypatch.setattr(tiles, "can_describe", aligned)
    config = TileConfig(64 if GPU else 16, 32, 16, 4, 2, 2, 1, tma=True, tma_store=store, presort=store)
    monkeypatch.setattr(cuda_path, "tile_config", lambda *arguments: config)
    compare(case(37, 2, 3, 64, 48, 0, "foreign"), 2e-5)
    compare(case(60, 2, 3, 64, 48), 2e-5)


@runnable
@pytest.mark.parametrize(("hidden", "widths", "spread"), [(144, {32}, "random"), (176, {32, 64}, "foreign")])
def test_narrow_tiles(monkeypatch: pytest.MonkeyPatch, hidden: int, widths: set[int], spread: str) -> None:
    """What tiles of 128 columns leave over: 16, 32 or 48 columns."""
    from trl_gptoss.experts import cuda_path, tiles
    from trl_gptoss.experts.tuning import TileConfig

    if not GPU:
        aligned = lambda m: m.stride(1) == 1 and m.stride(0) * m.element_size() % 16 == 0  # noqa: E731
        monkeypatch.setattr(tiles, "can_describe", aligned)
    used, original = set(), tiles.narrow_columns
    monkeypatch.setattr(tiles, "narrow_columns", lambda *sizes: used.add(original(*sizes)) or original(*sizes))
    config = TileConfig(64 if GPU else 16, 128, 16, 4, 2, 2, 1, tma=True, tma_store=True, narrow=True)
    monkeypatch.setattr(cuda_path, "tile_config", lambda *arguments: config)
    compare(case(37, 2, 3, hidden, 144, 0, spread), 2e-5)
    assert used == widths


class StandIn:
    """The operators of the compiled products by their contract, row by row, and the names of what was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _spans(self, offsets, padded):
        """First row in the sorted order, first row in an operand and count of every expert."""
        from trl_gptoss.experts.tiles import PAD

        bounds, place = offsets.tolist(), 0
        for begin, end in zip(bounds, bounds[1:]):
            yield begin, place if padded else begin, end - begin
            place += -(-(end - begin) // PAD) * PAD

    def grouped_rows(
        self, a, b, offsets, order, out, gated, bias, weight, top_k, gather, padded_a, scatter, transpose_b, begin, end,
        alpha, limit,
    ):  # fmt: skip
        self.asked.append(
            "transposed" * transpose_b + " gather" * gather + " padded" * padded_a + " scatter" * scatter
        )
        for e, (row, place, count) in enumerate(self._spans(offsets, padded_a)):
            own = order[row : row + count].long()
            rows = a[own // top_k] if gather else a[place : place + count]
            result = rows.double() @ (b[e].T if transpose_b else b[e])[:, begin:end].double()
            if bias is not None:
                result += bias[e, begin:end]
            if weight is not None:
                result *= weight.reshape(-1)[own, None]
            if out is not None:
                out[own if scatter else slice(row, row + count)] = result.to(out.dtype)
            if gated is not None:
                gate, linear = result[:, ::2].clamp(max=limit), result[:, 1::2].clamp(-limit, limit)
                gated[row : row + count] = ((linear + 1) * gate * torch.sigmoid(alpha * gate)).to(gated.dtype)

    def grouped_wgrad(self, a, b, offsets, out, padded_a, padded_b):
        self.asked.append("wgrad" + " a" * padded_a + " b" * padded_b)
        spans = zip(self._spans(offsets, padded_a), self._spans(offsets, padded_b), strict=True)
        for e, ((_, start_a, count), (_, start_b, _)) in enumerate(spans):
            rows, others = a[start_a : start_a + count].double(), b[start_b : start_b + count].double()
            out[e] = (rows.T @ others).to(out.dtype)


@runnable
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_compiled_products_are_called_as_they_want(monkeypatch: pytest.MonkeyPatch, adapted: bool, wide: bool) -> None:
    """With a stand-in for the library, on ragged rows: values, and which product goes where."""
    from types import SimpleNamespace

    from trl_gptoss.experts import compiled, cuda_path, torch_path
    from trl_gptoss.experts.params import Activation, ExpertParams, Needs

    stand_in = StandIn()
    monkeypatch.setattr(compiled, "takes", lambda *arguments, **options: True)
    monkeypatch.setattr(compiled.loading, "kernels", lambda: SimpleNamespace(ops=stand_in, missing=None))
    blocks = 1
    if wide:
        monkeypatch.setattr(cuda_path, "_SMALL_BUFFER", 0)
        monkeypatch.setattr(cuda_path, "_COMPILED_COLUMN_BLOCK", 24)
        monkeypatch.setattr(cuda_path, "_COPY_BLOCK", 24)
        blocks = 2
    inputs = case(37, 2, 3, 40, 48, 16 if adapted else 0, "foreign")
    compare(inputs, 2e-5)
    weights = ["wgrad b", *["wgrad a"] * blocks]
    if adapted:  # whatever has a low-rank addition stays with Triton
        assert stand_in.asked == weights
        return
    forward = [" gather", *[" scatter"] * blocks]
    assert stand_in.asked == [*forward, *forward, "transposed padded", weights[0], "transposed scatter", *weights[1:]]
    # frozen experts: the gradient of the hidden rows gathers the rows of the output's gradient
    x, index, weight, params, grad = inputs
    needs, activation = Needs(True, True, *[False] * 4), Activation(*ACTIVATION)
    wide_params = ExpertParams(*(t if t is None else t.double() for t in params))
    _, saved = cuda_path.forward(x, index, weight, params, activation, keep=True)
    stand_in.asked.clear()
    found = cuda_path.backward(grad, x, index, weight, params, activation, saved, needs)
    assert stand_in.asked == ["transposed gather", "transposed scatter"]
    _, kept = torch_path.forward(x.double(), index, weight.double(), wide_params, activation, keep=True)
    oracle = torch_path.backward(
        grad.double(), x.double(), index, weight.double(), wide_params, activation, kept, needs
    )
    for ours, theirs in ((found.x, oracle.x), (found.weight, oracle.weight)):
        assert (ours.double() - theirs).norm() / theirs.norm() < 2e-5


@pytest.mark.skipif(not HAS_TRITON, reason="needs the triton package")
def test_ragged_descriptor_is_that_of_triton() -> None:
    from triton.tools.ragged_tma import create_ragged_descriptor

    from trl_gptoss.experts import tiles

    wide = torch.empty(7, 64, dtype=torch.bfloat16)
    for matrix in (wide, wide[:, :48], wide[2:]):
        assert tiles.ragged_descriptor(matrix, 16, 8) == create_ragged_descriptor(matrix, [16, 8])


@runnable
def test_sorted_copies_in_slices_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_gptoss.experts import cuda_path
    from trl_gptoss.experts.tuning import TileConfig

    config = TileConfig(16, 32, 16, 4, 2, 2, 1, presort=True)
    monkeypatch.setattr(cuda_path, "tile_config", lambda *arguments: config)
    monkeypatch.setattr(cuda_path, "_SLICE", 20 * 64 * 4)  # 20 rows
    inputs = case(37, 2, 3, 64, 48, 16, "foreign")
    compare(inputs, 2e-5)
    from trl_gptoss.experts.params import Activation, Needs

    x, index, weight, params, grad = inputs
    activation, needs = Activation(*ACTIVATION), Needs(True, *[False] * 9)
    found = []
    for slice_bytes in (20 * 64 * 4, 2**30):
        monkeypatch.setattr(cuda_path, "_SLICE", slice_bytes)
        _, saved = cuda_path.forward(x, index, weight, params, activation, keep=True)
        found.append(cuda_path.backward(grad, x, index, weight, params, activation, saved, needs).x)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@runnable
@pytest.mark.parametrize(
    ("spread", "tokens", "top_k", "experts"),
    [
        ("random", 1, 4, 5),
        ("foreign", 2, 4, 5),
        ("random", 9, 3, 5),  # fewer experts than assignments
        ("foreign", 16, 4, 64),
        ("one", 21, 3, 40),  # four row tiles, one of them partly filled
        ("nowhere", 10, 2, 3),
    ],
)
def test_decoding_without_a_sort(
    monkeypatch: pytest.MonkeyPatch, spread: str, tokens: int, top_k: int, experts: int
) -> None:
    from trl_gptoss.experts import cuda_path, torch_path
    from trl_gptoss.experts.params import Activation, ExpertParams

    activation = Activation(*ACTIVATION)
    for hidden, intermediate in ((64, 64), (40, 24)):
        x, index, weight, params, _ = case(tokens, top_k, experts, hidden, intermediate, spread=spread)
        in_order = cuda_path.forward(x, index, weight, params, activation, keep=True)[0]
        with monkeypatch.context() as patch:
            patch.setattr(cuda_path, "sort_by_expert", None)
            ours = cuda_path.forward(x, index, weight, params, activation, keep=False)[0]
        wide = ExpertParams(*(t if t is None else t.double() for t in params))
        theirs = torch_path.forward(x.double(), index, weight.double(), wide, activation, keep=False)[0]
        assert (ours.double() - theirs).norm() <= 2e-6 * theirs.norm()
        torch.testing.assert_close(ours, in_order, rtol=1e-5, atol=1e-5)


@runnable
@pytest.mark.parametrize("block", [16, 1024])
def test_sort_is_stable_and_drops_foreign_experts(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    from trl_gptoss.experts import kernels_route, torch_path

    monkeypatch.setattr(kernels_route, "_MAX_BLOCK", block)
    index = torch.randint(0, 8, (150, 3), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    order, offsets = kernels_route.sort_by_expert(index, 7)
    expected_order, expected_offsets = torch_path.sort_by_expert(index, 7)
    assert torch.equal(offsets.long(), expected_offsets)
    count = int(expected_offsets[-1])
    assert torch.equal(order[:count].long(), expected_order[:count]) and count < 450


@runnable
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activation_backward_of_packed_pairs(dtype: torch.dtype) -> None:
    from trl_gptoss.experts import torch_path
    from trl_gptoss.experts.kernels_gate import gate_backward
    from trl_gptoss.experts.kernels_route import sort_by_expert
    from trl_gptoss.experts.params import Activation

    index = torch.randint(0, 3, (50, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    order, offsets = sort_by_expert(index, 3)
    torch.manual_seed(0)
    gate_up, grad = torch.randn(100, 144).mul(4).to(DEVICE, dtype), torch.randn(100, 72).to(DEVICE, dtype)
    weight = torch.rand(100).to(DEVICE, dtype)
    weights = weight[order.long()].double()[:, None]
    expected = torch_path._activate_backward(gate_up.double(), grad.double(), weights, Activation(1.702, 7.0))
    dots, _ = gate_backward(gate_up, grad, order, offsets, weight, 1.702, 7.0, need_bias=False, need_hidden=True)
    tolerance = 6e-3 if dtype == torch.bfloat16 else 8e-4
    for ours, theirs in zip((gate_up, grad, dots.sum(1)[order.long()]), expected, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
class TestOnGpu:
    """Full width, through the registered implementation."""

    @staticmethod
    def layer(implementation: str, experts: int, dtype: torch.dtype):
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        import trl_gptoss  # noqa: F401

        config = GptOssConfig(num_local_experts=experts, num_hidden_layers=1)
        config._experts_implementation = implementation
        with torch.device("cuda"):
            layer = GptOssExperts(config)
        generator = torch.Generator("cuda").manual_seed(0)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(0, 0.02, generator=generator)
        return layer.to(dtype)

    def run(self, layer, x, index, weight, grad) -> dict[str, torch.Tensor]:
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        layer.zero_grad()
        out = layer(x, index, weight)
        out.backward(grad)
        return {"out": out.detach(), "x": x.grad, "weight": weight.grad} | {
            name: p.grad for name, p in layer.named_parameters()
        }

    @pytest.mark.parametrize(("experts", "tokens"), [(32, 8), (32, 1024), (128, 777)])
    def test_no_worse_than_grouped_mm(self, experts: int, tokens: int) -> None:
        torch.manual_seed(0)
        x = torch.randn(tokens, 2880, device="cuda", dtype=torch.bfloat16)
        index = torch.rand(tokens, experts, device="cuda").topk(4).indices
        weight, grad = torch.rand(tokens, 4, device="cuda", dtype=x.dtype), torch.randn_like(x)
        exact = self.run(self.layer("eager", experts, torch.float32), x.float(), index, weight.float(), grad.float())
        ours = self.run(self.layer("gptoss_fused", experts, x.dtype), x, index, weight, grad)
        theirs = self.run(self.layer("grouped_mm", experts, x.dtype), x, index, weight, grad)
        for name, value in exact.items():
            error, reference = (((r[name].float() - value).norm() / value.norm()).item() for r in (ours, theirs))
            assert error <= 1.05 * reference, f"{name}: {error:.1e}, grouped_mm {reference:.1e}"
            assert "bias" not in name or error <= 6e-3

    @pytest.mark.parametrize(("experts", "tokens"), [(32, 1), (32, 8), (128, 16), (4, 64), (128, 64)])
    def test_decoding(self, experts: int, tokens: int) -> None:
        torch.manual_seed(0)
        x = torch.randn(tokens, 2880, device="cuda", dtype=torch.bfloat16)
        index = torch.rand(tokens, experts, device="cuda").topk(4).indices
        weight = torch.rand(tokens, 4, device="cuda", dtype=x.dtype)
        ours, theirs = (self.layer(name, experts, x.dtype) for name in ("gptoss_fused", "grouped_mm"))
        with torch.no_grad():
            exact = self.layer("eager", experts, torch.float32)(x.float(), index, weight.float())
            found = [layer(x, index, weight) for layer in (ours, theirs)]
            errors = [((out.float() - exact).norm() / exact.norm()).item() for out in found]
            assert errors[0] <= 1.05 * errors[1]
            with torch.enable_grad():  # the path with a sort, as in training
                assert torch.equal(found[0], ours(x, index, weight))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = ours(x, index, weight)
            index.copy_(index.flip(0))  # other experts than at the capture
            graph.replay()
            assert torch.equal(captured, ours(x, index, weight))

    def test_second_backward_is_refused_and_tiles_allow_it(self) -> None:
        from trl_gptoss.experts import set_experts_token_chunk

        layer = self.layer("gptoss_fused", 4, torch.bfloat16)
        x = torch.randn(64, 2880, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        index, weight = torch.randint(0, 4, (64, 4), device="cuda"), torch.rand(64, 4, device="cuda", dtype=x.dtype)
        out = layer(x, index, weight)
        out.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
        set_experts_token_chunk(layer, 32)
        out = layer(x, index, weight)
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(out.sum(), x)[0])

    def test_compile(self) -> None:
        layer = self.layer("gptoss_fused", 4, torch.bfloat16)
        x = torch.randn(64, 2880, device="cuda", dtype=torch.bfloat16)
        index, weight = torch.randint(0, 4, (64, 4), device="cuda"), torch.rand(64, 4, device="cuda", dtype=x.dtype)
        plain = self.run(layer, x, index, weight, x)
        compiled = self.run(torch.compile(layer, fullgraph=True), x, index, weight, x)
        for name in ("out", "x", "weight"):
            assert torch.equal(plain[name], compiled[name])
