"""The kernel that estimates what was not chosen, against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_kernels.rest import Known, cuda, naive
from pariskv_kernels.rest.naive import Rest


def check(
    batch: int,
    heads: int,
    group: int,
    dim: int,
    num: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    **how: int,
) -> None:
    """Rows with few and many candidates, one without any, one whose candidates are the zone; a head has all chosen."""
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(dim)

        def random(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        count = torch.tensor([num, 0, num // 2, num][:batch]).view(-1, 1, 1)
        length = torch.tensor([4 * num, 9, num, num][:batch], dtype=torch.int32)
        parts = [1 / 4, 1 / 8, 5 / 8, *[0.0] * 34]
        many = (count.view(-1, 1, 1, 1) * torch.tensor(parts)).expand(batch, heads, group, 37)
        highest, mass = 3 * random(batch, heads, group, 37), 1 + random(batch, heads, group, 37).abs()
        candidates = torch.stack((highest, mass, many), -1)
        chosen = candidates[:, :, :, :5].clone()
        chosen[:, :, 0] = candidates[:, :, 0].roll(1, dims=2)[..., :5, :]
        candidates[count.view(-1) == 0] = chosen[count.view(-1) == 0] = torch.tensor([-math.inf, 0.0, 0.0])
        candidates[:, 0, -1, 5:] = torch.tensor([-math.inf, 0.0, 0.0])  # all chosen
        query = random(batch, group, heads, dim).to(dtype).transpose(1, 2)
        known = Known(length, random(batch, heads, group), random(batch, heads, dim), random(batch, heads, dim, dim))
        for one in (known, known._replace(offset=None)):
            wanted = naive.estimate_rest(query, candidates, chosen, one, 0.2)
            there = Known(*(None if tensor is None else tensor.to(device) for tensor in one))  # type: ignore[arg-type]
            given = query.to(device), candidates.to(device), chosen.to(device), there
            got = Rest(*(tensor.cpu() for tensor in cuda.estimate_rest(*given, 0.2, **how)))
            torch.testing.assert_close(got.lse, wanted.lse, rtol=1e-3, atol=1e-3)  # a logarithm of float32 sums
            torch.testing.assert_close(got.out, wanted.out, rtol=1e-3, atol=1e-3)
            assert bool(wanted.lse.isfinite().any())


@pytest.mark.parametrize(("batch", "group", "dim", "dtype"), [(1, 1, 4, torch.bfloat16), (4, 2, 6, torch.float32)])
def test_the_rest_is_estimated_as_defined(
    batch: int, group: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(batch, 1, group, dim, 40, (dtype,), device, columns=4, parts=8)


@needs_gpu
@pytest.mark.parametrize(("group", "dim", "num"), [(3, 64, 900), (4, 128, 13_000), (8, 256, 5000), (16, 80, 1)])
def test_the_rest_is_estimated_as_defined_at_real_sizes(group: int, dim: int, num: int, device: torch.device) -> None:
    check(4, 8, group, dim, num, (torch.float32, torch.bfloat16, torch.float16), device)
