"""The computed levels, against the table of our own computation and the definition of an optimal quantiser."""

from __future__ import annotations

import pytest
import torch
from pariskv_kernels.quantizer import level_table, lloyd_max

TABLE = {
    4: ([0.0564, 0.1694, 0.2831, 0.3982, 0.5154, 0.6360, 0.7620, 0.8987], 1.229e-3),
    8: ([0.0425, 0.1280, 0.2152, 0.3053, 0.4003, 0.5030, 0.6194, 0.7648], 8.588e-4),
}


@pytest.mark.parametrize("subspace_dim", [4, 8])
def test_levels_and_error_are_those_of_the_table(subspace_dim: int) -> None:
    levels, mse = TABLE[subspace_dim]
    quantizer = lloyd_max(subspace_dim)
    assert quantizer.levels == pytest.approx(levels, abs=1e-4)  # four digits are given
    assert quantizer.mse == pytest.approx(mse, rel=1e-3)


@pytest.mark.parametrize("subspace_dim", [4, 8])
def test_thresholds_are_midpoints_and_levels_are_the_means_of_their_cells(subspace_dim: int) -> None:
    quantizer = lloyd_max(subspace_dim)
    levels = torch.tensor(quantizer.levels, dtype=torch.float64)
    thresholds = torch.tensor(quantizer.thresholds, dtype=torch.float64)
    torch.testing.assert_close(thresholds, (levels[1:] + levels[:-1]) / 2)
    blocks = torch.randn(200_000, subspace_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = torch.nn.functional.normalize(blocks, dim=-1).abs().flatten()
    cell = torch.bucketize(u, thresholds)
    means = torch.stack([u[cell == i].mean() for i in range(8)])
    torch.testing.assert_close(means, levels, rtol=0, atol=1e-3)  # a sample of 10^5 per cell
    assert float((u - levels[cell]).square().mean()) == pytest.approx(quantizer.mse, rel=0.01)


def test_the_table_of_codes_has_the_negative_levels_second() -> None:
    table = level_table(8, torch.device("cpu"))
    assert table.shape == (16,)
    assert torch.equal(table[8:], -table[:8])


@pytest.mark.parametrize("subspace_dim", [0, 2, 16])
def test_other_subspace_sizes_are_refused(subspace_dim: int) -> None:
    with pytest.raises(ValueError, match=r"^subspace_dim: wanted 4 or 8"):
        lloyd_max(subspace_dim)
