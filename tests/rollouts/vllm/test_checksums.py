import pytest
import torch

from trl_gptoss.rollouts.vllm import checksums
from trl_gptoss.rollouts.vllm.checksums import checksum, total


def oracle(tensor: torch.Tensor) -> int:
    """splitmix64's finaliser without its last step's constants, in Python's integers."""
    mask = (1 << 64) - 1
    sizes = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
    result = 0
    for bits in (tensor + 0).view(sizes[tensor.dtype]).flatten().tolist():
        x = bits & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        result += x ^ (x >> 31)
    result &= mask
    return result - (1 << 64) if result >> 63 else result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 5), (3, 4, 5)])
def test_it_is_the_sum_of_a_hash_of_the_bits(dtype, shape, monkeypatch):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert int(checksum(tensor)) == oracle(tensor)
    monkeypatch.setattr(checksums, "_CHUNK", 3)
    assert int(checksum(tensor)) == oracle(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16])
def test_every_value_of_two_bytes_has_the_hash_of_its_bits(dtype):
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    looked_up = checksums._looked_up(values)
    assert torch.equal(looked_up, checksums._hashes(values))
    numbers = values == values  # hardware may make one NaN of several
    distinct = numbers.sum() - (1 if dtype.is_floating_point else 0)  # 0.0 and -0.0
    assert looked_up[numbers].unique().numel() == distinct
    assert torch.equal(checksums._looked_up(values[::3]), looked_up[::3])
    with torch.inference_mode():
        assert int(checksum(values)) == int(looked_up.sum())


def test_layout_fusion_padding_and_sharding_do_not_matter():
    q, k = torch.randn(6, 4), torch.randn(2, 4)
    fused = torch.cat([q, k])
    parts = int(checksum(q)), int(checksum(k))
    assert total(parts) == int(checksum(fused)) == int(checksum(fused.T.contiguous()))
    assert int(checksum(torch.nn.functional.pad(fused, (0, 3, 0, 9)))) == int(checksum(fused))
    assert total(int(checksum(shard)) for shard in fused.chunk(4, dim=1)) == int(checksum(fused))
    assert checksum(fused, rows=True).tolist() == [int(checksum(row)) for row in fused]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_matters_and_the_sign_of_zero_does_not(dtype):
    tensor = torch.randn(64, dtype=dtype)
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    for element, bit in ((0, 0), (63, 3), (10, 14)):
        changed = tensor.clone()
        changed.view(integers)[element] ^= 1 << bit
        assert int(checksum(changed)) != int(checksum(tensor))
    zeros = torch.zeros(5, dtype=dtype)
    assert int(checksum(-zeros)) == int(checksum(zeros)) == 0


def test_the_total_wraps_like_int64():
    parts = [2**62, 2**62, 2**62, 5]
    assert total(parts) == int(torch.tensor(parts).sum())
