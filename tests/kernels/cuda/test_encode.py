"""Keys to codes, and queries to their rotated mean, on a GPU."""

from __future__ import annotations

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_kernels.encode import cuda as kernel
from pariskv_kernels.encode import naive
from pariskv_kernels.srht import cuda as srht_kernel
from pariskv_kernels.srht import naive as srht_naive
from pariskv_kernels.srht import padded_dim

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the simulator's 0 / 0, as NumPy tells it


def random_keys(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + dim)
    keys = (torch.randn(batch, heads, tokens, dim, generator=generator) * 3 + 1).to(dtype)
    keys[:, :, tokens // 2] = 0
    return keys


def assert_same_codes(keys: torch.Tensor, m: int, device: torch.device, **how: int) -> None:
    got, wanted = kernel.encode_keys(keys.to(device), m, 42, **how), naive.encode_keys(keys, m, 42)
    for name, one, other in zip(wanted._fields, got, wanted, strict=True):
        assert torch.equal(one.cpu(), other), name


@pytest.mark.parametrize(
    ("dim", "m", "dtype"),
    [(64, 8, torch.float32), (80, 8, torch.bfloat16), (96, 4, torch.float16), (128, 8, torch.bfloat16)],
)
def test_the_codes_are_the_bits_of_the_definition(dim: int, m: int, dtype: torch.dtype, device: torch.device) -> None:
    for tokens in (1, 9):
        keys = random_keys(1, 2, tokens, dim, dtype)
        assert_same_codes(keys.transpose(1, 2).contiguous().transpose(1, 2), m, device, threads=32, tile=4)


@needs_gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("m", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_real_sizes_have_the_same_bits(dim: int, m: int, dtype: torch.dtype, device: torch.device) -> None:
    for tokens in (1, 63, 65, 5000):
        assert_same_codes(random_keys(2, 3, tokens, dim, dtype), m, device)


@pytest.mark.parametrize(("dim", "group", "dtype"), [(64, 3, torch.float32), (80, 1, torch.bfloat16)])
def test_the_mean_query_is_rotated(dim: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
    heads = torch.randn(1, 2, group, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    got = srht_kernel.rotate_group_mean(heads.to(device), padded_dim(dim), 42)
    torch.testing.assert_close(
        got.cpu(), srht_naive.rotate_group_mean(heads, padded_dim(dim), 42), rtol=1e-5, atol=1e-4
    )


@needs_gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_the_mean_query_is_rotated_at_every_size(dim: int, group: int, device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        heads = torch.randn(8, 8, group, dim).to(dtype)
        got = srht_kernel.rotate_group_mean(heads.to(device), padded_dim(dim), 42)
        wanted = srht_naive.rotate_group_mean(heads, padded_dim(dim), 42)
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-4)
