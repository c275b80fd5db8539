"""Gathered rows against a loop."""

from __future__ import annotations

import pytest
import torch
from pariskv_kernels.gather import gather_rows


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K", [1, 63, 65])
def test_rows_are_copied_and_empty_slots_are_zeroed(dim: int, dtype: torch.dtype, K: int) -> None:
    generator = torch.Generator().manual_seed(K)
    rows = torch.randn(2, 3, 100, 2, dim, generator=generator).to(dtype)
    rows[:, :, 0] = float("nan")  # where -1 might point
    indices = torch.randint(-1, 100, (2, 3, K), generator=generator).int()
    indices[indices == 0] = -1
    buffer = torch.full((2, 3, K + 5, 2, dim), float("nan"), dtype=dtype)
    valid = gather_rows(rows, indices, buffer[:, :, 5:])
    assert torch.equal(valid, indices >= 0)
    assert bool(buffer[:, :, :5].isnan().all())
    for b, h, k in ((b, h, k) for b in range(2) for h in range(3) for k in range(K)):
        index = int(indices[b, h, k])
        wanted = rows[b, h, index] if index >= 0 else torch.zeros(2, dim, dtype=dtype)
        assert torch.equal(buffer[b, h, 5 + k], wanted)


def test_no_slots_and_no_rows_are_legal() -> None:
    rows = torch.randn(1, 2, 4, 2, 64)
    assert gather_rows(rows, torch.empty(1, 2, 0, dtype=torch.int32), torch.empty(1, 2, 0, 2, 64)).shape == (1, 2, 0)


def test_wrong_arguments_are_named() -> None:
    rows, indices, out = (
        torch.randn(1, 2, 4, 2, 64),
        torch.zeros(1, 2, 3, dtype=torch.int32),
        torch.zeros(1, 2, 3, 2, 64),
    )
    with pytest.raises(ValueError, match=r"^rows"):
        gather_rows(rows[:, :, :, :1], indices, out)
    with pytest.raises(TypeError, match=r"^indices"):
        gather_rows(rows, indices.long(), out)
    with pytest.raises(ValueError, match=r"^indices"):
        gather_rows(rows, indices[:, :1], out)
    with pytest.raises(TypeError, match=r"^out"):
        gather_rows(rows, indices, out.half())
    with pytest.raises(ValueError, match=r"^out"):
        gather_rows(rows, indices, out[:, :, :2])
