"""A step's own token reaches its slot."""

from __future__ import annotations

import pytest
import torch
from conftest_cuda import ON_GPU, needs_gpu
from pariskv_kernels import append
from pariskv_kernels.append import cuda, naive

FEW = {} if ON_GPU else {"threads": 8}


def state(batch: int, heads: int, dim: int, dtype: torch.dtype, lengths: list[int], device: torch.device) -> list:
    """Rows of sink 3, ring 5 and 2 slots more, keys of a head before its values; keys and values as views."""
    generator = torch.Generator().manual_seed(dim)
    rows = torch.full((batch, heads, 2, 10, dim), float("nan"), dtype=dtype).transpose(2, 3).to(device)
    keys, values = torch.randn(2, batch, 1, heads, dim, generator=generator).to(device, dtype).transpose(2, 3)
    steady = torch.rand(batch, 8, generator=generator).gt(0.5).to(device)
    length = torch.tensor(lengths, device=device)
    active = (torch.arange(batch) % 3 != 1).to(device)
    return [keys, values, rows, steady, length, active]


def check(batch: int, heads: int, dim: int, dtype: torch.dtype, lengths: list[int], device: torch.device) -> None:
    got, wanted = (state(batch, heads, dim, dtype, lengths, device) for _ in range(2))
    cuda.append_token(*got, 3, **FEW)
    naive.append_token(*wanted, 3)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    assert got[4].tolist() == [n + int(b % 3 != 1) for b, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [(2, 6, torch.float32), (1, 16, torch.bfloat16), (3, 5, torch.float16)]
)
def test_the_token_goes_to_the_slot_of_its_position(
    heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(4, heads, dim, dtype, [0, 2, 3, 27], device)


@needs_gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_real_sizes(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    for heads in (1, 3, 8, 32):
        check(6, heads, dim, dtype, [0, 1, 3, 7, 8, 4_000_000], device)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    keys, values, rows, steady, length, active = state(2, 1, 4, torch.float32, [0, 1], device)
    for sink in (-1, 8):
        with pytest.raises(ValueError, match=r"^sink: wanted 0 to 7 of the 8 slots"):
            append.append_token(keys, values, rows, steady, length, active, sink)
    with pytest.raises(TypeError, match=r"^length"):
        append.append_token(keys, values, rows, steady, length.int(), active, 3)
    with pytest.raises(ValueError, match=r"^values"):
        append.append_token(keys, values[:, :, :0], rows, steady, length, active, 3)
