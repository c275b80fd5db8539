"""The kernel that estimates what was not chosen, against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_kernels.rest import Known, cuda, naive


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
        known, mean = (
            Known(length, random(batch, heads, group), random(batch, heads, dim, dim)),
            random(batch, heads, dim),
        )
        for one in (known, known._replace(offset=None)):
            weighed = naive.weigh_candidates(query, candidates, one, 0.2)
            there = Known(*(None if tensor is None else tensor.to(device) for tensor in one))  # type: ignore[arg-type]
            got = cuda.weigh_candidates(query.to(device), candidates.to(device), there, 0.2, **how)
            for name, tensor, wanted in zip(weighed._fields, got, weighed, strict=True):
                same = torch.testing.assert_close  # logarithms of float32 sums
                same(tensor.cpu(), wanted, rtol=1e-3, atol=1e-3, msg=lambda why, name=name: f"{name}: {why}")
            rest = cuda.estimate_rest(got, chosen.to(device), mean.to(device), 64)
            for tensor, wanted in zip(rest, naive.estimate_rest(weighed, chosen, mean), strict=True):
                torch.testing.assert_close(tensor.cpu(), wanted, rtol=1e-3, atol=1e-3)
            assert bool(rest.lse.isfinite().any())


@pytest.mark.parametrize(("batch", "group", "dim", "dtype"), [(1, 1, 4, torch.bfloat16), (4, 2, 6, torch.float32)])
def test_the_rest_is_estimated_as_defined(
    batch: int, group: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(batch, 1, group, dim, 40, (dtype,), device, columns=4, parts=8)


@needs_gpu
@pytest.mark.parametrize(("group", "dim", "num"), [(3, 64, 900), (4, 128, 13_000), (8, 256, 5000), (16, 80, 1)])
def test_the_rest_is_estimated_as_defined_at_real_sizes(group: int, dim: int, num: int, device: torch.device) -> None:
    check(4, 8, group, dim, num, (torch.float32, torch.bfloat16, torch.float16), device)
