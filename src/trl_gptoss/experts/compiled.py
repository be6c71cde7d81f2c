"""Which grouped products are those compiled for Hopper, and the calls to them; all others are Triton's.

Shape legend: M sorted rows, E experts, K contraction, N columns. The operators are in the library of
`attention.loading` (`trl-gptoss build-kernels`), the kernels in `kernels/sink_fa3/csrc/grouped_*`. They are used when `TRL_GPTOSS_EXPERTS=compiled` or `set_experts_products` asks for
them. What they do not take (other dtypes, adapters, sums in fp32, few rows per expert, odd widths) stays with Triton.
"""

import functools
import os

import torch

from ..attention import loading
from .tables import COMPILED_FROM
from .tuning import bucket

ENV = "TRL_GPTOSS_EXPERTS"
CHOICES = ("triton", "compiled")
OPS = ("grouped_rows", "grouped_wgrad")

# What tells one product of rows from another, compiled or not. Weight gradients have no entry.
KINDS: dict[str, dict[str, bool]] = {
    "up": {"gather": True, "scatter": False, "transpose_b": False},
    "up_eval": {"gather": True, "scatter": False, "transpose_b": False},
    "down": {"gather": False, "scatter": True, "transpose_b": False},
    "grad_hidden": {"gather": True, "scatter": False, "transpose_b": True},
    "grad_hidden_sorted": {"gather": False, "scatter": False, "transpose_b": True},
    "grad_input": {"gather": False, "scatter": True, "transpose_b": True},
}

_forced: str | None = None


def set_experts_products(choice: str | None) -> None:
    """Choose between compiled and Triton products for this process.

    Args:
        choice (`str` or `None`): `"triton"` takes no compiled product, `"compiled"` those for which `COMPILED_FROM`
            has a threshold (an error where they cannot run), `None` what `TRL_GPTOSS_EXPERTS` says (default `"triton"`).
    """
    global _forced
    if choice is not None:
        _check(choice, "the choice of products")
    _forced = choice


def _check(choice: str, what: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"{what} is {choice!r}; it must be one of {', '.join(CHOICES)}.")
    return choice


def _choice() -> str:
    return _forced or _check(os.environ.get(ENV) or "triton", ENV)


def unusable(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why no compiled product is used there, or None."""
    if _choice() == "triton":
        return f"compiled products were not asked for ({ENV}=compiled)"
    if dtype != torch.bfloat16:
        return f"the compiled products take bfloat16, not {dtype}"
    return _missing(device)


@functools.cache
def _missing(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the compiled products need an NVIDIA H100, H200 or GH200, this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"the compiled products are built for SM90, this GPU is SM{major}{minor}"
    found = loading.kernels()
    if found.missing is not None:
        return found.missing
    for name in OPS:
        if not hasattr(found.ops, name):
            return f"{found.source} lacks the operator {name}; rebuild it from this version's sources"
    return None


def takes(kernel: str, rows: int, *operands: torch.Tensor | None, weight: torch.Tensor | None = None) -> bool:
    """Whether the compiled `kernel` computes a product of `rows` sorted rows.

    Args:
        operands (`torch.Tensor` or `None`): What is read and written row by row: inputs, the matrices of the experts (or
            their gradient) as the only tensor of three dimensions, results.
        weight (`torch.Tensor`, *optional*): A factor for every row.

    Raises:
        `RuntimeError`: They were asked for and cannot run on this device.
    """
    if _choice() == "triton":
        return False
    tensors = [t for t in operands if t is not None]
    like = tensors[0]
    experts = next(t.shape[0] for t in tensors if t.dim() == 3)
    if bucket(rows, experts) < COMPILED_FROM[kernel]:  # first: small products must not wait for the host
        return False
    if like.dtype != torch.bfloat16:
        return False
    if (why := _missing(like.device)) is not None:
        raise RuntimeError(
            f"Compiled products of the experts were asked for ({ENV} or set_experts_products), but {why}."
        )
    if weight is not None and not (weight.dtype == torch.bfloat16 and weight.is_contiguous()):
        return False
    return all(t.dtype == torch.bfloat16 and _aligned(t) for t in tensors)


def _aligned(t: torch.Tensor) -> bool:
    """What the bulk copy engine and stores of 16 bytes want: rows that start and end at multiples of 16 bytes."""
    return (
        t.stride(-1) == 1
        and t.shape[-1] % 16 == 0
        and t.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in t.stride()[:-1])
        and (t.dim() < 3 or t.shape[-2] % 16 == 0)
    )


def product(
    kernel: str,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    *,
    order: torch.Tensor,
    top_k: int,
    out: torch.Tensor | None = None,
    gated: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    padded_a: bool = False,
    columns: tuple[int, int] | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> None:
    """Rows times the matrix of their expert; arguments as in `kernels_gemm.grouped_gemm`."""
    kind = KINDS[kernel]
    begin, end = columns or (0, b.shape[1 if kind["transpose_b"] else 2])
    options = kind["gather"], padded_a, kind["scatter"], kind["transpose_b"], begin, end, alpha, limit
    loading.kernels().ops.grouped_rows(a, b, offsets, order, out, gated, bias, weight, top_k, *options)


def wgrad(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    offsets: torch.Tensor,
    *,
    padded_a: bool = False,
    padded_b: bool = False,
) -> None:
    """`out[e] = a[rows of e].T @ b[rows of e]`; arguments as in `kernels_wgrad.grouped_wgrad`."""
    loading.kernels().ops.grouped_wgrad(a, b, offsets, out, padded_a, padded_b)


def active_products(device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    """What computes each grouped product of `gptoss_fused`.

    Args:
        device (`torch.device` or `str`, *optional*): Defaults to the current CUDA device, else the CPU.
        dtype (`torch.dtype`, defaults to `torch.bfloat16`): Of rows and experts.

    Returns:
        `dict[str, str]`: By product, `"torch"`, `"triton"`, or `"cuda from N rows an expert"` (fewer: Triton).
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != "cuda":
        return dict.fromkeys(COMPILED_FROM, "torch")
    if unusable(device, dtype) is not None:
        return dict.fromkeys(COMPILED_FROM, "triton")
    return {kernel: f"cuda from {rows} rows an expert" for kernel, rows in COMPILED_FROM.items()}
