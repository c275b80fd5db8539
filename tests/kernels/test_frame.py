"""Keys in their frame against float64, and to the bit in every split."""

from __future__ import annotations

import pytest
import torch
from pariskv_kernels.encode import encode_keys
from pariskv_kernels.frame import NORM_LEVELS, NORM_STEPS, to_frame
from torch import Tensor

SHAPES = [(64, 64), (80, 128), (16, 16), (256, 256)]


def problem(dim: int, padded: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim + n)
    keys, centre = (torch.randn(2, 3, *size, dim, generator=generator) for size in ((n,), ()))
    matrix = torch.randn(2, 3, dim, padded, generator=generator)
    power = torch.rand(2, 3, generator=generator) * dim * padded
    return (3 * keys + 1).to(dtype), centre, matrix, power


@pytest.mark.parametrize(("dim", "padded"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coordinates_and_norms_are_what_the_frame_says(dim: int, padded: int, dtype: torch.dtype) -> None:
    keys, centre, matrix, power = problem(dim, padded, 65, dtype)
    got = to_frame(keys, centre, matrix, power)
    z = (keys.double() - centre.double().unsqueeze(2)) @ matrix.double()
    torch.testing.assert_close(got.z.double(), z, rtol=1e-4, atol=1e-3 * dim**0.5)
    exact = NORM_LEVELS / 2 + NORM_STEPS * torch.log2(z.norm(dim=-1) / power.double().sqrt().unsqueeze(2))
    level = exact.clamp(0, NORM_LEVELS - 1)
    assert got.norms.dtype == torch.uint8
    assert float((got.norms - level).abs().max()) <= 0.5 + 1e-3
    assert int(got.norms.max()) - int(got.norms.min()) > 5


@pytest.mark.parametrize(("dim", "padded"), SHAPES)
@pytest.mark.parametrize("step", [1, 7, 64])
def test_any_split_gives_the_same_bits(dim: int, padded: int, step: int) -> None:
    keys, *frame = problem(dim, padded, 130, torch.bfloat16)
    whole = to_frame(keys, *frame)
    parts = [to_frame(keys[:, :, start : start + step], *frame) for start in range(0, 130, step)]
    row = to_frame(keys[1:, 2:], *(tensor[1:, 2:] for tensor in frame))
    for field in ("z", "norms"):
        assert torch.equal(getattr(whole, field), torch.cat([getattr(part, field) for part in parts], dim=2))
        assert torch.equal(getattr(whole, field)[1:, 2:], getattr(row, field))


def test_the_backends_agree_to_the_bit() -> None:
    from pariskv_kernels.frame import cpu, naive

    keys, *frame = problem(80, 128, 33)
    for one, other in zip(cpu.to_frame(keys, *frame), naive.to_frame(keys, *frame), strict=True):
        assert torch.equal(one, other)


def test_keys_that_are_all_the_same_have_the_lowest_level() -> None:
    keys, centre, matrix, power = problem(64, 64, 5)
    got = to_frame(centre.unsqueeze(2).expand_as(keys), centre, matrix, torch.zeros_like(power))
    assert not bool(got.z.any())
    assert not bool(got.norms.any())


@pytest.mark.parametrize("n", [1, 33, 5000])
def test_framed_keys_are_encoded_as_the_rotated_ones_are(n: int) -> None:
    """Encoding what `rotate` gives, without a seed, is encoding the keys with it."""
    from pariskv_kernels.srht import rotate

    keys = torch.randn(1, 2, n, 80, generator=torch.Generator().manual_seed(n))
    for one, other in zip(encode_keys(rotate(keys, 5), 8, None), encode_keys(keys, 8, 5), strict=True):
        assert torch.equal(one, other)


def test_wrong_arguments_are_named() -> None:
    keys, centre, matrix, power = problem(64, 64, 5)
    with pytest.raises(ValueError, match="centre: wanted shape"):
        to_frame(keys, centre[:, :2], matrix, power)
    with pytest.raises(TypeError, match=r"matrix: wanted dtype torch\.float32"):
        to_frame(keys, centre, matrix.double(), power)
    with pytest.raises(ValueError, match="matrix: wanted a power of two of columns, got 48"):
        to_frame(keys, centre, matrix[..., :48].contiguous(), power)
    with pytest.raises(ValueError, match="power: wanted shape"):
        to_frame(keys, centre, matrix, power[0])
    with pytest.raises(ValueError, match="keys: wanted a power of two of coordinates where seed is None, got 80"):
        encode_keys(torch.zeros(1, 1, 2, 80), 8, None)
