"""Choice of the backend, the kernel library's sources, and the parts of CUDA backends that a CPU can check."""

import importlib.metadata
import inspect
import logging
import math
import subprocess
import sys
import types

import pytest
import torch

from trl_gptoss.attention import (
    active_backend,
    backends,
    build,
    fa2,
    fa4,
    hopper,
    loading,
    reference,
    selftest,
    sink_attention,
)

CUDA = torch.device("cuda", 0)


CACHES = (backends._choose, loading.kernels, fa4._not_installed, fa4._interface)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(backends.ENV, raising=False)
    monkeypatch.delenv(loading.ENV, raising=False)
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a GPU of the given capability; no kernel runs."""

    def pretend(major, minor=0):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    return pretend


def test_cpu_uses_the_reference():
    assert active_backend("cpu") == "reference"


def test_order(gpu, monkeypatch):
    gpu(9)
    monkeypatch.setattr(loading, "kernels", lambda: loading.Kernels(object(), "test", None))
    monkeypatch.setattr(fa4, "_not_installed", lambda: None)
    assert active_backend(CUDA) == "hopper"
    assert active_backend(CUDA, head_dim=128) == "fa4"
    assert active_backend(CUDA, head_dim=256) == "fa2"
    assert active_backend(CUDA, torch.float32) == "reference"


@pytest.mark.parametrize(
    "capability, name", [((8, 0), "fa2"), ((8, 9), "fa2"), ((10, 0), "fa4"), ((12, 0), "fa2"), ((7, 5), "reference")]
)
def test_other_gpus(gpu, monkeypatch, capability, name):
    gpu(*capability)
    monkeypatch.setattr(fa4, "_not_installed", lambda: None)
    assert active_backend(CUDA) == name


def test_choice_is_logged_once_with_the_reasons(gpu, monkeypatch, caplog):
    gpu(9)
    monkeypatch.setattr(loading, "kernels", lambda: loading.Kernels(None, "", "no kernel library (x)"))
    monkeypatch.setattr(fa4, "_not_installed", lambda: "flash-attn-4 is not installed")
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        for _ in range(3):
            assert active_backend(CUDA) == "fa2"
    assert len(caplog.records) == 1
    for part in ("fa2", "no kernel library", "flash-attn-4 is not installed"):
        assert part in caplog.records[0].getMessage()


def test_falling_to_the_reference_on_a_gpu_is_a_warning(gpu, caplog):
    gpu(9)
    with caplog.at_level(logging.WARNING, logger=backends.__name__):
        active_backend(CUDA, torch.float32)
    assert "torch.float32" in caplog.text


def test_forced(monkeypatch, gpu):
    monkeypatch.setenv(backends.ENV, "reference")
    gpu(9)
    assert active_backend(CUDA) == "reference"
    monkeypatch.setenv(backends.ENV, "fa3")
    with pytest.raises(ValueError, match="names no backend. Use one of hopper, fa4, fa2, reference"):
        active_backend("cpu")
    monkeypatch.setenv(backends.ENV, "fa2")
    with pytest.raises(RuntimeError, match="fa2 cannot run .* needs an NVIDIA GPU, this is cpu"):
        active_backend("cpu")
    monkeypatch.setenv(backends.ENV, "hopper")
    gpu(8)
    with pytest.raises(RuntimeError, match="built for SM90, this GPU is SM80"):
        active_backend(CUDA)


@pytest.mark.parametrize(
    "version, message",
    [
        ("4.0.0b25", "drops the gradient"),
        ("4.0.0b2", "drops the gradient"),
        (None, "not installed"),
        ("4.0.0b36", "does not import"),
    ],
)
def test_flash_attn_4_versions(gpu, monkeypatch, version, message):
    gpu(9)

    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert message in fa4.unusable(CUDA, torch.bfloat16, 64)


def test_flash_attn_4_private_parameters():
    """The two private functions still take what `fa4` passes."""
    try:
        importlib.metadata.version("flash-attn-4")
        from flash_attn.cute import interface
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        pytest.skip(f"flash-attn-4: {error}")
    shared = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"}
    shared |= {"window_size_left", "window_size_right", "learnable_sink"}
    forward = inspect.signature(interface._flash_attn_fwd).parameters
    assert list(forward)[:3] == ["q", "k", "v"] and shared | {"return_lse"} <= set(forward)
    backward = inspect.signature(interface._flash_attn_bwd).parameters
    assert list(backward)[:6] == ["q", "k", "v", "out", "dout", "lse"] and shared | {"deterministic"} <= set(backward)


class PlainFlash:
    """Stands for FlashAttention-2: no sinks, +inf as the LSE of rows without keys, backward from (out, lse) alone."""

    @staticmethod
    def forward(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout,
        causal,
        debug,
        *,
        scale,
        window_size_left=None,
        window_size_right=None,
    ):
        assert max_q >= 2 and (dropout, debug) == (0.0, False)
        window = 0 if window_size_left is None else window_size_left + 1
        assert window_size_right == (0 if window else None)
        out, lse = reference.forward(q, k, v, None, cu_q, cu_k, max_q, max_k, causal, window, scale)
        return out, lse.masked_fill(lse == -math.inf, math.inf), None, None, None

    @staticmethod
    def backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout,
        causal,
        rng,
        unused,
        *,
        scale,
        window_size_left=None,
        window_size_right=None,
    ):
        assert torch.are_deterministic_algorithms_enabled()
        assert not (lse == -math.inf).any()
        window = 0 if window_size_left is None else window_size_left + 1
        return reference.backward(
            dout, q, k, v, out, lse, None, cu_q, cu_k, max_q, max_k, causal, window, scale, True
        )[:3]


@pytest.mark.parametrize("sink", [None, 0.7, math.inf, -math.inf])
@pytest.mark.parametrize("window", [0, 5])
def test_identity_on_plain_flash_attention(monkeypatch, sink, window, compare):
    """fa2's arithmetic around a flash attention that knows no sinks, in float64, against the reference with sinks."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", PlainFlash.forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", PlainFlash.backward, raising=False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((39, 4), (35, 2), (35, 2)))
    sinks = None if sink is None else torch.tensor([sink, 0.1, -2.0, sink], dtype=torch.float64)
    cu_q, cu_k = torch.tensor([0, 9, 9, 39]), torch.tensor([0, 4, 4, 35])
    args = (q, k, v, sinks, cu_q, cu_k, 30, 31, True, window, 0.3)
    out, lse = fa2.forward(*args)
    want_out, want_lse = reference.forward(*args)
    assert torch.allclose(out, want_out, atol=1e-14) and torch.allclose(lse, want_lse, atol=1e-13)
    dout = torch.randn_like(out)
    settings = (sinks, cu_q, cu_k, 30, 31, True, window, 0.3, True)
    for a, b in zip(
        fa2.backward(dout, q, k, v, out, lse, *settings),
        reference.backward(dout, q, k, v, want_out, want_lse, *settings),
    ):
        assert torch.isfinite(a).all() and torch.allclose(a.double(), b, atol=1e-6 if a.ndim == 1 else 1e-13)
    assert not torch.are_deterministic_algorithms_enabled()


class PlainFlash4:
    """Stands for flash-attn-4 on SM90: sinks inside, but garbage in rows that see no key, an overflow in the log-sum-exp for large
    sinks and no number as the gradient of infinite ones."""

    @staticmethod
    def _flash_attn_fwd(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                        window_size_left, window_size_right, learnable_sink, return_lse):  # fmt: skip
        assert return_lse and (window_size_right is None) == (window_size_left is None)
        window = 0 if window_size_left is None else window_size_left + 1
        out, lse = reference.forward(
            q,
            k,
            v,
            learnable_sink,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            causal,
            window,
            softmax_scale,
        )
        blind = (out == 0).all(-1).all(-1)
        out[blind], lse[:, blind] = math.nan, 3.0
        if learnable_sink is not None:
            lse[learnable_sink > 88] = math.inf
        return out, lse, None, None, None

    @staticmethod
    def _flash_attn_bwd(q, k, v, out, dout, lse, *, softmax_scale, causal, window_size_left, window_size_right, cu_seqlens_q,
                        cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic, learnable_sink):  # fmt: skip
        window = 0 if window_size_left is None else window_size_left + 1
        dq, *grads = reference.backward(
            dout, q, k, v, out, lse, learnable_sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window,
            softmax_scale, deterministic,
        )  # fmt: skip
        dq[(out == 0).all(-1).all(-1)] = math.nan
        if learnable_sink is not None:
            grads[2][learnable_sink.isinf()] = math.nan
        return (dq, *grads) if learnable_sink is not None else (dq, *grads[:2])


@pytest.mark.parametrize("sink", [None, 0.7, 1e4, math.inf, -math.inf])
@pytest.mark.parametrize("causal, window", [(True, 0), (True, 5), (False, 0)])
def test_flash_attn_4_corners(monkeypatch, sink, causal, window):
    monkeypatch.setattr(fa4, "_interface", lambda: PlainFlash4)
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((44, 4), (37, 2), (37, 2)))
    sinks = None if sink is None else torch.tensor([sink, 0.1, -2.0, 1.0], dtype=torch.float64)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 9, 39, 44], [0, 4, 6, 37, 37]))
    args = (q, k, v, sinks, cu_q, cu_k, 30, 31, causal, window, 0.3)
    out, lse = fa4.forward(*args)
    want_out, want_lse = reference.forward(*args)
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
    dout = torch.randn_like(out)
    settings = (sinks, cu_q, cu_k, 30, 31, causal, window, 0.3, False)
    ours, want = (f(dout, q, k, v, out, lse, *settings) for f in (fa4.backward, reference.backward))
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(ours, want))


def test_one_shot_kernels_only_for_the_same_tokens():
    q, k = torch.zeros(20, 16, 64), torch.zeros(20, 2, 64)
    cu = torch.tensor([0, 20], dtype=torch.int32)
    assert hopper._one_shot(q, k, cu, cu, True, 128)
    assert not hopper._one_shot(q, k, cu, cu.clone(), True, 128)
    assert hopper._one_shot(q, k, cu, cu, True, 1)
    assert not hopper._one_shot(q, k, cu, cu, True, 129)
    assert not hopper._one_shot(q, k, cu, cu, True, 0)
    assert not hopper._one_shot(q, k[:, :1], cu, cu, True, 128)
    assert not hopper._one_shot(q[:5], k, cu, cu, True, 128)


def test_hopper_copies_what_bulk_copies_cannot_read():
    base = torch.zeros(20 * 4 * 72 + 8, dtype=torch.bfloat16)
    good = base[: 20 * 4 * 64].view(20, 4, 64)
    assert hopper._loadable(good)[0] is good
    wide = base[: 20 * 4 * 72].view(20, 4, 72)[..., :64]
    assert hopper._loadable(wide)[0] is wide
    odd = base[1 : 1 + 20 * 4 * 64].view(20, 4, 64)
    narrow = base[: 20 * 4 * 65].view(20, 4, 65)[..., :64]
    for x in (odd, narrow, good.transpose(1, 2)):
        copy = hopper._loadable(x)[0]
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, x)


def test_hopper_gets_the_sinks_of_the_model(monkeypatch, gpu):
    """No cast around the operators in eager mode, in either direction."""
    seen = []

    def fwd(q, k, v, sinks, *settings):
        seen.append((sinks.dtype, sinks.is_contiguous()))
        return reference.forward(q, k, v, sinks.float(), *settings)

    def bwd(dout, q, k, v, out, lse, sinks, *settings):
        seen.append((sinks.dtype, sinks.is_contiguous()))
        *grads, dsinks = reference.backward(dout, q, k, v, out, lse, sinks.float(), *settings)
        return *grads, dsinks.to(sinks.dtype)

    monkeypatch.setattr(hopper, "unusable", lambda *where: None)
    ops = types.SimpleNamespace(fwd=fwd, bwd=bwd)
    monkeypatch.setattr(loading, "kernels", lambda: loading.Kernels(ops, "test", None))
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    sinks = torch.randn(4, 2, dtype=torch.bfloat16)[:, 0].requires_grad_()
    out = sink_attention(q, k, v, sinks, cu_seqlens_q=torch.tensor([0, 9], dtype=torch.int32))
    out.float().square().sum().backward()
    assert seen == [(torch.bfloat16, True)] * 2 and sinks.grad.dtype == torch.bfloat16
    wide = sinks.detach().float().requires_grad_()
    same = sink_attention(q, k, v, wide, cu_seqlens_q=torch.tensor([0, 9], dtype=torch.int32))
    same.float().square().sum().backward()
    assert torch.equal(same, out) and torch.equal(wide.grad.bfloat16(), sinks.grad) and wide.grad.abs().sum() > 0


def test_missing_and_broken_libraries_are_one_line(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(loading, "PACKAGED", tmp_path / "none" / loading.LIBRARY)
    broken = tmp_path / loading.LIBRARY
    for content, message in ((None, "does not exist"), (b"not a library", "does not load: OSError")):
        if content:
            broken.write_bytes(content)
        found = loading.find(str(tmp_path))
        assert found.ops is None and message in found.missing and "trl-gptoss build-kernels" in found.missing
        assert "\n" not in found.missing


def test_a_library_without_an_operator_is_refused(tmp_path, monkeypatch):
    (tmp_path / loading.LIBRARY).write_bytes(b"")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    with pytest.raises(loading.Unavailable, match="lacks the operator fwd; rebuild"):
        loading.from_file(tmp_path)


def test_load_order(tmp_path, monkeypatch, caplog):
    tried = []
    monkeypatch.setattr(loading, "from_file", lambda path: tried.append(str(path)) or fail())
    monkeypatch.setattr(loading, "from_hub", lambda: tried.append("hub") or types.SimpleNamespace(fwd=1))

    def fail():
        raise loading.Unavailable("absent")

    with caplog.at_level(logging.WARNING, logger=loading.__name__):
        found = loading.find("/some/where")
    assert tried == ["/some/where", str(loading.PACKAGED), "hub"] and found.missing is None
    assert "TRL_GPTOSS_KERNELS=/some/where: absent" in caplog.text


def test_kernels_package_is_asked_only_if_installed(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(loading.Unavailable, match="not installed"):
        loading.from_hub()


def test_an_old_kernels_package_is_not_asked(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(loading.Unavailable, match="the package is 0.9.0, needs >= 0.17"):
        loading.from_hub()


def test_hub_errors_are_one_line(monkeypatch):
    def get_kernel(repo, version):
        assert (repo, version) == (loading.HUB_REPO, loading.HUB_VERSION)
        raise OSError("no\nnetwork")

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.2")
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(get_kernel=get_kernel))
    with pytest.raises(loading.Unavailable, match="^OSError: no network$"):
        loading.from_hub()


def test_selftest_passes(place):
    errors = selftest(place[0])
    assert set(errors) == {"out", "dq", "dk", "dv", "dsinks"} and max(errors.values()) < 1.2e-2


def test_selftest_notices_a_dropped_sink_gradient(monkeypatch):
    backward = reference.backward
    monkeypatch.setattr(reference, "backward", lambda *a: (*backward(*a)[:3], torch.zeros(16)))
    with pytest.raises(RuntimeError, match="backend 'reference' on cpu has a relative error of 1.0e\\+00 in dsinks"):
        selftest("cpu")


def test_import_is_cheap_and_loads_no_kernel():
    """Beyond transformers' registry, importing costs little and neither compiles nor touches CUDA."""
    code = (
        "import time, sys; from transformers import AttentionInterface, AttentionMaskInterface; import transformers.masking_utils;"
        "before = set(sys.modules); t = time.process_time();"
        "import trl_gptoss.attention as a; a.register(); t = time.process_time() - t;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; import torch;"
        "assert not torch.cuda.is_initialized(); assert not new & {'kernels', 'flash_attn', 'triton', 'trl'}, new; print(t)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < 0.5


def test_build_commands(tmp_path):
    command = build.compile_command(
        tmp_path / "nvcc", tmp_path / "a.cu", tmp_path / "a.o", tmp_path, tmp_path / "torch"
    )
    assert "arch=compute_90a,code=sm_90a" in command and "-DTORCH_TARGET_VERSION=0x020b000000000000ULL" in command
    assert "arch=compute_90a,code=sm_90a" not in build.compile_command(
        tmp_path / "nvcc", tmp_path / "a.cpp", tmp_path / "a.o", tmp_path, tmp_path / "torch"
    )


def nvcc(folder, version):
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    path.chmod(0o755)
    return path


def test_nvcc_is_found_and_its_version_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    path = nvcc(tmp_path, "12.4")
    assert build.find_nvcc() == path
    nvcc(tmp_path / "old", "12.3")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    with pytest.raises(build.BuildError, match="release 12.3; the Hopper kernels need nvcc >= 12.4"):
        build.find_nvcc()


def test_torch_headers_are_found_without_importing_torch():
    assert (build.find_torch() / "include" / "torch" / "csrc" / "stable" / "library.h").is_file()


def test_sources_that_are_no_project(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    nvcc(tmp_path / "cuda", "13.0")
    with pytest.raises(build.BuildError, match="expected the sink_fa3 project"):
        build.build_kernels(tmp_path / "x.so", source=tmp_path)


def test_the_compilers_words_reach_the_user(tmp_path, monkeypatch):
    path = nvcc(tmp_path / "cuda", "13.0")
    path.write_text(path.read_text() + "echo 'error: expected a ;' >&2\n[ \"$1\" = --version ]\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for name in ("csrc/a.cu", "torch-ext/torch_binding.cpp"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    with pytest.raises(build.BuildError, match="error: expected a ;"):
        build.build_kernels(tmp_path / "x.so", source=tmp_path)
    assert not (tmp_path / "x.so").exists()
