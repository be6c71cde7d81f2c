"""The products compiled for Hopper: when they are taken (CPU), and what they compute (Hopper)."""

import functools
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trl_gptoss import experts
from trl_gptoss.experts import checks, compiled
from trl_gptoss.experts.tables import COMPILED_FROM
from trl_gptoss.experts.tuning import KERNELS

BF16 = torch.bfloat16
PROJECT = Path(__file__).resolve().parents[2] / "kernels" / "sink_fa3"
OPS = SimpleNamespace(grouped_rows=None, grouped_wgrad=None)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(compiled.ENV, raising=False)
    compiled._missing.cache_clear()
    yield
    experts.set_experts_products(None)
    compiled._missing.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a GPU and a library; no kernel runs."""

    def pretend(major=9, minor=0, ops=OPS, missing=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        found = SimpleNamespace(ops=ops, missing=missing, source="a library")
        monkeypatch.setattr(compiled.loading, "kernels", lambda: found)
        compiled._missing.cache_clear()
        return torch.device("cuda", 0)

    return pretend


def test_every_product_has_a_threshold():
    assert set(COMPILED_FROM) == set(KERNELS)
    assert set(compiled.KINDS) == {kernel for kernel in KERNELS if not kernel.startswith("wgrad")}


def test_where_they_run(gpu, monkeypatch):
    assert "not asked for" in compiled.unusable(gpu())
    experts.set_experts_products("compiled")
    assert "this is cpu" in compiled.unusable(torch.device("cpu"))
    device = gpu()
    assert compiled.unusable(device) is None
    assert "not torch.float16" in compiled.unusable(device, torch.float16)
    assert experts.active_products(device)["up"] == "cuda from 1024 rows an expert"
    assert set(experts.active_products("cpu").values()) == {"torch"}
    experts.set_experts_products("triton")
    assert set(experts.active_products(device).values()) == {"triton"}
    experts.set_experts_products(None)
    assert "not asked for" in compiled.unusable(device)
    assert "SM80" in _unforced(monkeypatch, gpu(8, 0)) and "SM100" in _unforced(monkeypatch, gpu(10, 0))
    assert _unforced(monkeypatch, gpu(missing="no kernel library")) == "no kernel library"
    old = SimpleNamespace(fwd=None, grouped_rows=None)
    assert "a library lacks the operator grouped_wgrad" in _unforced(monkeypatch, gpu(ops=old))


def _unforced(monkeypatch, device) -> str:
    monkeypatch.setenv(compiled.ENV, "compiled")
    return compiled.unusable(device)


def test_a_wrong_choice_is_refused(gpu, monkeypatch):
    with pytest.raises(ValueError, match="must be one of triton, compiled"):
        experts.set_experts_products("cuda")
    monkeypatch.setenv(compiled.ENV, "cuda")
    with pytest.raises(ValueError, match="TRL_GPTOSS_EXPERTS is 'cuda'"):
        compiled.unusable(gpu())


def test_which_products_are_taken(monkeypatch):
    monkeypatch.setattr(compiled, "_missing", functools.cache(lambda device: None))
    experts.set_experts_products("compiled")
    E, K, N, rows = 4, 64, 96, 4096

    def takes(rows=rows, a=None, b=None, out=None, weight=None, kernel="down"):
        a = torch.empty(8, K, dtype=BF16) if a is None else a
        b = torch.empty(E, K, N, dtype=BF16) if b is None else b
        return compiled.takes(kernel, rows, a, b, out, weight=weight)

    assert takes() and takes(rows=725 * E) and takes(weight=torch.empty(8, 4, dtype=BF16))
    assert not takes(rows=724 * E), "few rows stay with Triton"
    monkeypatch.setitem(COMPILED_FROM, "down", 256)
    assert takes(rows=200 * E) and not takes(rows=200 * E, kernel="grad_input")
    assert not takes(weight=torch.empty(8, 4)), "router weights in fp32"
    assert not takes(weight=torch.empty(4, 8, dtype=BF16).T)
    assert not takes(b=torch.empty(E, K, N)) and not takes(out=torch.empty(8, N)), "sums in fp32"
    assert not takes(b=torch.empty(E, K, N + 8, dtype=BF16)), "16 columns are 8 activated"
    assert not takes(b=torch.empty(E, N, K, dtype=BF16).transpose(1, 2))
    assert not takes(a=torch.empty(8 * K + 1, dtype=BF16)[1:].view(8, K)), "an address that is no multiple of 16"
    assert takes(out=torch.empty(8, 2 * N, dtype=BF16)[:, :N]), "a block of columns"
    assert not takes(out=torch.empty(8, N + 4, dtype=BF16)[:, :N])
    experts.set_experts_products("triton")
    assert not takes()


def test_what_was_asked_for_and_is_not_there_is_an_error():
    a, b = torch.empty(8, 64, dtype=BF16), torch.empty(4, 64, 96, dtype=BF16)
    assert not compiled.takes("down", 4096, a, b)
    experts.set_experts_products("compiled")
    with pytest.raises(RuntimeError, match="asked for .* this is cpu"):
        compiled.takes("down", 4096, a, b)


EMULATED = ("grouped.h", "grouped_kernel.cuh", "grouped_launch.cuh", "grouped_fwd.cu", "grouped_bwd.cu", "host.h")


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    """The shipped launcher and kernels, compiled for an emulation of two blocks on the CPU; called with a change to them."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    def build(find: str = "", replace: str = "") -> list[str]:
        folder = tmp_path_factory.mktemp("emulation")
        for path in [*(PROJECT / "tests" / "emulation").iterdir(), *(PROJECT / "csrc" / name for name in EMULATED)]:
            shutil.copy(path, folder)
        kernel = folder / "grouped_kernel.cuh"
        assert find in kernel.read_text()
        kernel.write_text(kernel.read_text().replace(find, replace))
        sources = ["grouped.cpp", "machine.cpp", "-x", "c++", "grouped_fwd.cu", "grouped_bwd.cu"]
        subprocess.run(["g++", "-std=c++17", "-O2", "-I.", "-o", "grouped", *sources], cwd=folder, check=True)
        return [str(folder / "grouped")]

    return build


@pytest.mark.timeout(300)
def test_kernels_in_the_emulation(emulation):
    """No deadlock, and the values of a plain loop, under random orders of threads, copies and products."""
    program = emulation()
    for name in ("ragged", "odd sizes", "nothing"):
        done = subprocess.run([*program, "1", "all", name], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("PASS") == 12, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("find", "replace", "message"),
    [
        ("kAhead = C::kStages - 2", "kAhead = C::kStages - 1", "deadlock"),
        ("kGather ? 5 : 1", "kGather ? 4 : 1", "more arrivals"),
        ("fence_proxy_async();", "", "WRONG"),
        ("wgmma_wait<1>();", "wgmma_wait<2>();", "WRONG"),
    ],
)
def test_the_emulation_can_fail(emulation, find, replace, message):
    done = subprocess.run([*emulation(find, replace), "3", "first", "many steps"], capture_output=True, text=True)
    assert done.returncode != 0 and message in done.stdout


def test_the_self_test_passes_and_can_fail(monkeypatch):
    errors = experts.selftest("cpu")
    assert set(errors) == set(checks._NAMES) and max(errors.values()) < 1e-5
    right = checks.fused_experts
    monkeypatch.setattr(checks, "fused_experts", lambda *arguments: right(*arguments) * 1.001)
    with pytest.raises(RuntimeError, match="self-test failed on cpu.* in out .*TRL_GPTOSS_EXPERTS=triton"):
        experts.selftest("cpu")


# ---------------------------------------------------------------------------------------------------------------- Hopper
def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def hopper(test):
    return pytest.mark.hopper(pytest.mark.skipif(not _hopper(), reason="needs an SM90 GPU")(test))


@pytest.fixture
def library():
    experts.set_experts_products("compiled")
    if why := compiled.unusable(torch.device("cuda", 0)):
        pytest.fail(why)


CASES = {  # rows of every expert, K, N
    "ragged": ([0, 1, 130, 64, 0, 517, 191, 193, 0], 256, 720),
    "one expert has all": ([0, 0, 1000, 0], 320, 960),
    "many small": ([(37 * e) % 301 for e in range(130)], 192, 496),
    "odd sizes": ([65, 127, 128, 129, 256, 3, 0, 400], 208, 304),
    "gpt-oss": ([1000, 1090, 0, 950], 2880, 2880),
    "rows of one": ([1] * 40, 128, 256),
}
GUARD = 7.0


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


def sorted_rows(counts: list[int], top_k: int):
    """Offsets, and an order of assignments whose last rows belong to no expert."""
    ends = torch.tensor([0, *counts]).cumsum(0)
    rows = math.ceil((int(ends[-1]) + 5) / top_k) * top_k
    return ends.tolist(), ends.int().cuda(), torch.randperm(rows, device="cuda").int(), rows


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < 4e-3, f"{error:.1e}"


@hopper
@pytest.mark.parametrize("kernel", ["up", "up_eval", "up_product_only", *list(compiled.KINDS)[2:]])
@pytest.mark.parametrize("name", CASES)
def test_products_of_rows(library, kernel, name):
    torch.manual_seed(0)
    counts, K, N = CASES[name]
    top_k, E = 2, len(counts)
    ends, offsets, order, M = sorted_rows(counts, top_k)
    base = "up" if kernel.startswith("up") else kernel
    kind = dict(compiled.KINDS[base])
    padded = kernel == "grad_hidden_sorted"
    spans = [slice(b, e) for b, e in zip(ends, ends[1:])]
    places, place = [], 0
    for count in counts:
        places.append(place)
        place += -(-count // 64) * 64
    tokens = normal(M // top_k, K)
    rows = tokens[order.long() // top_k] if kind["gather"] else normal(M, K)
    a = tokens if kind["gather"] else rows
    if padded:
        a = torch.full((place, K), float("nan"), device="cuda", dtype=BF16)
        for start, span in zip(places, spans):
            a[start : start + span.stop - span.start] = rows[span]
            a[start + span.stop - span.start : start + -(-(span.stop - span.start) // 64) * 64] = 0
    b = normal(E, N, K, scale=K**-0.5) if kind["transpose_b"] else normal(E, K, N, scale=K**-0.5)
    full = b.transpose(1, 2) if kind["transpose_b"] else b
    expected = torch.cat([rows[s].double() @ full[e].double() for e, s in enumerate(spans)])
    options = {"order": order, "top_k": top_k, "padded_a": padded}
    if base in ("up", "down"):
        options["bias"] = bias = normal(E, N)
        expected += torch.cat([bias[e].double().expand(s.stop - s.start, N) for e, s in enumerate(spans)])
    if base == "down":
        options["weight"] = weight = torch.rand(M // top_k, top_k, device="cuda").to(BF16)
        expected *= weight.reshape(-1)[order[: ends[-1]].long(), None].double()
    used = order[: ends[-1]].long() if kind["scatter"] else torch.arange(ends[-1], device="cuda")
    columns = [(0, N)] if not kind["scatter"] else [(0, N // 16 * 8), (N // 16 * 8, N)]

    def run() -> list[torch.Tensor]:
        out = torch.full((M, N), GUARD, device="cuda", dtype=BF16)
        gated = torch.full((M, N // 2), GUARD, device="cuda", dtype=BF16)
        wanted = {"out": out} if kernel != "up_eval" else {}
        if kernel in ("up", "up_eval"):
            wanted |= {"gated": gated, "alpha": 1.702, "limit": 0.9}
        for begin, end in columns:
            part = wanted | ({"out": out[:, begin:end], "columns": (begin, end)} if kind["scatter"] else {})
            compiled.product(base, a, b, offsets, **options, **part)
        return [out, gated]

    out, gated = run()
    untouched = torch.ones(M, dtype=torch.bool, device="cuda")
    untouched[used] = False
    assert (out[untouched] == GUARD).all() and (gated[untouched] == GUARD).all()
    if kernel == "up_eval":
        assert (out == GUARD).all()
    else:
        close(out[used], expected)
    if kernel in ("up", "up_eval"):
        gate, linear = expected[:, ::2].clamp(max=0.9), expected[:, 1::2].clamp(-0.9, 0.9)
        close(gated[: ends[-1]], (linear + 1) * gate * torch.sigmoid(1.702 * gate))
    for first, again in zip((out, gated), run()):
        assert torch.equal(first, again)


@hopper
@pytest.mark.parametrize("padded", ["a", "b", ""])
@pytest.mark.parametrize("name", CASES)
def test_weight_gradients(library, padded, name):
    torch.manual_seed(0)
    counts, H, N = CASES[name]
    ends, offsets, _, _ = sorted_rows(counts, 1)
    E, place = len(counts), 0
    operands = {side: normal(ends[-1] + 70, width + 64)[:, :width] for side, width in (("a", H), ("b", N))}
    spans = [slice(b, e) for b, e in zip(ends, ends[1:])]
    expected = torch.stack([operands["a"][s].double().T @ operands["b"][s].double() for s in spans])
    if padded:
        rows = operands[padded]
        copy = torch.zeros(sum(-(-c // 64) * 64 for c in counts), rows.shape[1], device="cuda", dtype=BF16)
        for s in spans:
            copy[place : place + s.stop - s.start] = rows[s]
            place += -(-(s.stop - s.start) // 64) * 64
        operands[padded] = copy

    def run() -> torch.Tensor:
        out = torch.full((E + 1, H + 16, N), GUARD, device="cuda", dtype=BF16)
        options = {"padded_a": padded == "a", "padded_b": padded == "b"}
        compiled.wgrad(operands["a"], operands["b"], out[:E, :H], offsets, **options)
        return out

    out = run()
    close(out[:E, :H], expected)
    assert (out[E] == GUARD).all() and (out[:E, H:] == GUARD).all()
    assert (out[:E, :H][offsets.diff() == 0] == 0).all()
    assert torch.equal(out, run())


@hopper
@pytest.mark.parametrize("change", ["dtype", "bias", "columns", "order", "combination"])
def test_arguments_are_checked(library, change):
    a, b, bias = normal(8, 64), normal(2, 64, 96), normal(2, 96)
    offsets, order = torch.tensor([0, 8, 16]).int().cuda(), torch.arange(16).int().cuda()
    out, end, scatter = normal(16, 96), 96, False
    if change == "dtype":
        b = b.float()
    elif change == "bias":
        bias = bias[:1]
    elif change == "columns":
        end = 104
    elif change == "order":
        order = order.long()
    else:
        scatter = True
    with pytest.raises(RuntimeError, match="grouped: "):
        torch.ops.sink_fa3.grouped_rows(
            a, b, offsets, order, out, None, bias, None, 2, True, False, scatter, False, 0, end, 1.0, 1.0
        )  # fmt: skip


def layer(trained: bool = True, tokens: int = 2100, experts_count: int = 4):
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        num_hidden_layers=1, num_local_experts=experts_count, hidden_size=576, intermediate_size=480,
        num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = "gptoss_fused"
    torch.manual_seed(0)
    with torch.device("cuda"):
        mlp = GptOssMLP(config).to(BF16)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(0, 0.05)
    mlp.requires_grad_(trained)
    return mlp, normal(tokens, 576), normal(tokens, 576)


def gradients(run, mlp, x, grad) -> dict[str, torch.Tensor]:
    mlp.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad)
    found = {"out": out.detach(), "x": x.grad}
    return found | {name: p.grad.clone() for name, p in mlp.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch):
    made = []
    for name in ("product", "wgrad"):
        original = getattr(compiled, name)
        monkeypatch.setattr(compiled, name, lambda *a, original=original, **o: made.append(a[0]) or original(*a, **o))
    return made


@hopper
@pytest.mark.parametrize("trained", [True, False])
def test_a_layer_equals_triton(library, calls, trained):
    mlp, x, grad = layer(trained)
    ours, again = (gradients(mlp, mlp, x, grad) for _ in range(2))
    assert len(calls) == 2 * (6 if trained else 4)
    with torch.no_grad():
        assert torch.equal(mlp(x)[0], ours["out"])
    made = len(calls)
    experts.set_experts_products("triton")
    theirs = gradients(mlp, mlp, x, grad)
    assert len(calls) == made
    for name, value in theirs.items():
        assert torch.equal(ours[name], again[name]), name
        error = (ours[name].float() - value.float()).norm() / value.float().norm()
        assert error < 2e-3, f"{name}: {error:.1e}"


@hopper
def test_few_rows_stay_with_triton(library, calls):
    mlp, x, grad = layer(tokens=600)
    gradients(mlp, mlp, x, grad)
    assert not calls


@hopper
def test_checkpointing_and_compile_change_nothing(library, calls):
    from torch.utils.checkpoint import checkpoint

    mlp, x, grad = layer()
    plain = gradients(mlp, mlp, x, grad)
    runs = {
        "checkpoint": lambda x: checkpoint(mlp, x, use_reentrant=False),
        "compile": torch.compile(lambda x: mlp.experts(x, *route(mlp, x)), fullgraph=True),
    }
    for name, run in runs.items():
        calls.clear()
        found = gradients(run, mlp, x, grad)
        assert calls, name
        for key, value in plain.items():
            error = (found[key].float() - value.float()).norm() / value.float().norm()
            assert error < (1e-12 if name == "checkpoint" else 2e-2), f"{name} {key}: {error:.1e}"


def route(mlp, x):
    _, scores, index = mlp.router(x)
    return index, scores


@hopper
def test_the_self_test_on_the_gpu(library, calls):
    experts.selftest()
    assert calls
