"""MXFP4 against an own numpy implementation of the OCP rule (values) and against transformers (layout)."""

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from trl_gptoss.experts import mxfp4
from trl_gptoss.experts.mxfp4 import dequantize_mxfp4, quantize_mxfp4

GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_grid(magnitudes: np.ndarray, ties_to_even: bool = True) -> np.ndarray:
    """Codes of the nearest grid values by brute force in float64; ties to the even code, or away from zero."""
    distance = np.abs(magnitudes[..., None] - GRID)
    tied = distance == distance.min(axis=-1, keepdims=True)
    rank = np.where(np.arange(8) % 2 == 0, 1, 0) if ties_to_even else np.arange(8)
    return np.argmax(np.where(tied, rank + 1, 0), axis=-1)


def ocp(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rule of the specification: values, scale bytes, codes with the sign, all per block of 32."""
    x = weight.to(torch.float64).numpy().reshape(*weight.shape[:-1], -1, 32)
    amax = np.abs(x).max(axis=-1)
    exponent = np.full(amax.shape, -127)
    _, e = np.frexp(amax[amax > 0])  # amax = m * 2^e, 0.5 <= m < 1
    exponent[amax > 0] = np.clip((e - 1) - 2, -127, 127)
    codes = to_grid(np.abs(x) / 2.0 ** exponent[..., None])
    values = np.copysign(GRID[codes] * 2.0 ** exponent[..., None], x)
    return values.reshape(weight.shape), exponent + 127, codes | (np.signbit(x) << 3)


def scale_rounded_up(weight: torch.Tensor) -> np.ndarray:
    """The rule of OpenAI's conversion: scale 2^ceil(log2(amax / 6)), halves away from zero."""
    x = weight.to(torch.float64).numpy().reshape(*weight.shape[:-1], -1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(axis=-1, keepdims=True) / 6))
    return np.copysign(GRID[to_grid(np.abs(x) / scale, ties_to_even=False)] * scale, x).reshape(weight.shape)


def unpack(blocks: torch.Tensor) -> np.ndarray:
    packed = blocks.numpy()
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], 32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that tells 0 from -0."""
    return bool(torch.equal(a, b) and torch.equal(a.signbit(), b.signbit()))


def on_grid(shape: tuple[int, ...], dtype: torch.dtype, exponents: tuple[int, int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([*GRID, *-GRID], dtype=torch.float32)[torch.randint(16, shape, generator=generator)]
    powers = torch.randint(*exponents, (*shape[:-1], shape[-1] // 32, 1), generator=generator).float()
    return (values.unflatten(-1, (-1, 32)) * 2.0**powers).flatten(-2).to(dtype)


SAMPLERS = {
    "normal": lambda shape: torch.randn(shape),
    "initialisation": lambda shape: 0.02 * torch.randn(shape),
    "student_t3": lambda shape: torch.distributions.StudentT(3.0).sample(shape),
    "cauchy": lambda shape: torch.distributions.Cauchy(0.0, 1.0).sample(shape),
    "uniform": lambda shape: 2 * torch.rand(shape) - 1,
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_floor_is_the_specification(name, dtype):
    weight = SAMPLERS[name]((3, 37, 160)).to(dtype)
    weight = torch.where(weight.isfinite(), weight, 0)  # a Cauchy sample may leave the range of float16
    blocks, scales = quantize_mxfp4(weight, scale_rule="floor")
    values, scale_bytes, codes = ocp(weight)
    assert (scales.numpy() == scale_bytes).all()
    assert (unpack(blocks) == codes).all()
    assert (dequantize_mxfp4(blocks, scales, dtype=torch.float32).double().numpy() == values).all()


def test_every_tie_and_its_neighbours():
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    up, down = torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)
    weight = torch.zeros(2, 32)
    weight[:, :21] = torch.cat((down, middle, up))
    weight[:, 21] = 6.0
    weight[1] *= -1
    decoded = dequantize_mxfp4(*quantize_mxfp4(weight, scale_rule="floor"), dtype=torch.float32)
    low, high = torch.tensor(GRID[:-1]).float(), torch.tensor(GRID[1:]).float()
    expected = torch.cat((low, torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]), high))
    assert torch.equal(decoded[0, :21], expected)
    assert torch.equal(decoded[1], -decoded[0])


@pytest.mark.parametrize("scale_rule", ["best", "floor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(4, 64, 64), (5, 33, 96), (32, 7, 2880), (128, 3, 32), (1, 1, 32), (17, 160)], ids=str
)
def test_values_on_the_grid_come_back_bit_for_bit(shape, dtype, scale_rule):
    weight = on_grid(shape, dtype, (-127, 126))
    assert same_bits(dequantize_mxfp4(*quantize_mxfp4(weight, scale_rule=scale_rule), dtype=dtype), weight)


def test_values_off_the_grid_do_not():
    weight = on_grid((4, 8, 64), torch.float32, (-3, 4)) * 1.01
    assert not torch.equal(dequantize_mxfp4(*quantize_mxfp4(weight), dtype=torch.float32), weight)


@pytest.mark.parametrize("name", SAMPLERS)
def test_best_is_no_worse_than_either_rule_in_any_block(name):
    weight = SAMPLERS[name]((2, 512, 256))

    def block_errors(decoded: np.ndarray) -> np.ndarray:
        return ((decoded - weight.double().numpy()) ** 2).reshape(-1, 32).sum(axis=-1)

    best = block_errors(dequantize_mxfp4(*quantize_mxfp4(weight), dtype=torch.float32).double().numpy())
    floor, up = block_errors(ocp(weight)[0]), block_errors(scale_rounded_up(weight))
    # The float32 differences whose squares are compared are rounded: 1e-6 of a block's error at most.
    assert (best <= np.minimum(floor, up) * (1 + 1e-6)).all()
    assert best.sum() < 0.97 * floor.sum()
    assert best.sum() < up.sum()


@pytest.mark.parametrize("shape", [(4, 64, 96), (3, 35, 64), (32, 1, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_transformers_reads_the_layout(shape, dtype):
    blocks, scales = quantize_mxfp4(torch.randn(shape).to(dtype))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # in the orientation (E, in, out)
    assert same_bits(dequantize_mxfp4(blocks, scales, dtype=dtype), theirs.transpose(1, 2))
    swapped = (blocks >> 4) | (blocks << 4)
    assert not torch.equal(dequantize_mxfp4(swapped, scales, dtype=dtype), theirs.transpose(1, 2))


def test_every_byte_decodes_like_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).expand(255, -1, -1, -1).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).reshape(255, 1, 1).expand(-1, 16, -1).contiguous()
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert same_bits(dequantize_mxfp4(blocks, scales, dtype=torch.float32), theirs)
    assert dequantize_mxfp4(blocks[:1], torch.full_like(scales[:1], 255)).isnan().all()


@pytest.mark.parametrize("scale_rule", ["best", "floor"])
def test_zeros_signs_and_denormals(scale_rule):
    weight = torch.zeros(6, 32)
    weight[1] = -0.0
    weight[2] = -torch.rand(32) - 0.1
    weight[3] = torch.arange(32) * 2.0**-149  # denormal, below half of the smallest step
    weight[4, 0] = -(2.0**-128)  # denormal, the smallest value of the format
    weight[5] = torch.finfo(torch.float32).max
    blocks, scales = quantize_mxfp4(weight, scale_rule=scale_rule)
    decoded = dequantize_mxfp4(blocks, scales, dtype=torch.float32)
    assert same_bits(decoded[:2], weight[:2]) and (scales[[0, 1]] == 0).all()
    assert (decoded[2] < 0).all() and (scales[3] == 0).all()
    assert torch.equal(decoded[3], torch.zeros(32))
    assert same_bits(decoded[4], weight[4])
    assert decoded.isfinite().all() and (scales < 255).all()
    # 2^128 would be the nearer value, but is infinite in float32: both rules saturate.
    assert (decoded[5] == 6 * 2.0**125).all()


@pytest.mark.parametrize("scale_rule", ["best", "floor"])
def test_chunks_and_strides_do_not_matter(monkeypatch, scale_rule):
    weight = torch.randn(3, 64, 19, dtype=torch.bfloat16).transpose(1, 2)
    whole = quantize_mxfp4(weight.contiguous(), scale_rule=scale_rule)
    monkeypatch.setattr(mxfp4, "_CHUNK", 5 * 64)
    blocks, scales = quantize_mxfp4(weight, scale_rule=scale_rule)
    assert torch.equal(blocks, whole[0]) and torch.equal(scales, whole[1])
    chunked = dequantize_mxfp4(blocks, scales)
    monkeypatch.undo()
    assert torch.equal(chunked, dequantize_mxfp4(blocks, scales))


def test_the_weight_is_left_as_it_is():
    weight = torch.randn(2, 3, 32, requires_grad=True)
    before = weight.detach().clone()
    quantize_mxfp4(weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(bad):
    weight = torch.randn(2, 3, 64)
    weight[1, 2, 40] = bad
    with pytest.raises(ValueError, match="found 1 NaN or infinite"):
        quantize_mxfp4(weight)


def test_bad_input():
    with pytest.raises(ValueError, match=r"divisible by 32, found shape \(2, 3, 48\)"):
        quantize_mxfp4(torch.randn(2, 3, 48))
    with pytest.raises(ValueError, match="found shape"):
        quantize_mxfp4(torch.randn(32))
    with pytest.raises(TypeError, match="float64"):
        quantize_mxfp4(torch.randn(2, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="meta device"):
        quantize_mxfp4(torch.empty(2, 32, device="meta"))
    with pytest.raises(ValueError, match="scale_rule"):
        quantize_mxfp4(torch.randn(2, 32), scale_rule="ceil")
    blocks, scales = quantize_mxfp4(torch.randn(2, 64))
    with pytest.raises(ValueError, match="expected blocks"):
        dequantize_mxfp4(blocks, scales[:, :1])
    with pytest.raises(TypeError, match="uint8"):
        dequantize_mxfp4(blocks.int(), scales)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("scale_rule", ["best", "floor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gpu_gives_the_same_bytes(dtype, scale_rule):
    weight = torch.randn(4, 333, 320).to(dtype)
    weight[0, 0, :32] *= 1e-38  # denormals
    cpu = quantize_mxfp4(weight, scale_rule=scale_rule)
    gpu = quantize_mxfp4(weight.cuda(), scale_rule=scale_rule)
    assert torch.equal(cpu[0], gpu[0].cpu()) and torch.equal(cpu[1], gpu[1].cpu())
    assert same_bits(dequantize_mxfp4(*gpu, dtype=dtype).cpu(), dequantize_mxfp4(*cpu, dtype=dtype))
