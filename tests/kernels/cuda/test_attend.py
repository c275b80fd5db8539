"""The attention kernels against their definition."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from conftest_cuda import ON_GPU, needs_gpu
from pariskv_kernels import attend
from pariskv_kernels.attend import cuda, naive
from pariskv_kernels.attend.other import Other
from torch import Tensor

BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
# float32 differs by the order of its sums; the others, which compute in float32 too, by one rounding of the result.
TOLERANCE = {FLOAT: (1e-5, 1e-6), HALF: (1e-3, 1e-5), BFLOAT: (1e-2, 1e-5)}


class Step(NamedTuple):
    """The arguments of `attend_rows`, in its order."""

    heads: Tensor
    rows: Tensor
    steady: Tensor
    valid: Tensor | None
    bias: Tensor | None
    scaling: float
    softcap: float | None
    other: Other | None = None

    def to(self, device: torch.device) -> Step:
        found = () if self.other is None else tuple(one.to(device) for one in self.other())
        other = (lambda: found) if found else None
        return Step(*(one.to(device) if isinstance(one, Tensor) else one for one in self[:-1]), other)  # type: ignore[arg-type]


def a_step(
    batch: int,
    num_heads: int,
    group: int,
    dim: int,
    steady: int,
    slots: int | None,
    dtype: torch.dtype,
    bias: bool = False,
    softcap: float | None = None,
    side_by_side: bool = False,
) -> Step:
    """Random rows, a third of them not in use; these, and three that lie behind, are NaN."""
    generator = torch.Generator().manual_seed(steady + dim)
    shape = (batch, num_heads, steady + (slots or 0) + 3, 2, dim)
    rows = torch.randn(shape, generator=generator)
    is_steady = torch.rand(batch, steady, generator=generator) > 0.3
    valid = None if slots is None else torch.rand(batch, num_heads, slots, generator=generator) > 0.3
    used = torch.zeros(shape[:3], dtype=torch.bool)
    used[:, :, :steady] = is_steady.unsqueeze(1)
    if valid is not None:
        used[:, :, steady:-3] = valid
    rows[~used] = math.nan
    rows = rows.to(dtype)
    # As a working set has them: the keys of a head before its values.
    rows = rows if side_by_side else rows.transpose(2, 3).contiguous().transpose(2, 3)
    heads = torch.randn(batch, num_heads, group, dim, generator=generator).to(dtype)
    added = None
    if bias:
        added = torch.randn(batch, num_heads, group, slots or 0, generator=generator)
        added[torch.rand(added.shape, generator=generator) > 0.6] = -math.inf
    return Step(heads, rows, is_steady, valid, added, dim**-0.5, softcap)


def attend_rows(step: Step, device: torch.device) -> tuple[Tensor, Tensor]:
    """The kernels' result; in the simulator with as few threads as the lanes of a value, but a warp."""
    few = {} if ON_GPU else {"threads": max(32, step.heads.shape[-1] // 4)}
    return cuda.attend_rows(*step.to(device), **few)


def assert_as_defined(step: Step, device: torch.device) -> None:
    out, lse = attend_rows(step, device)
    wanted, wanted_lse = naive.attend_rows(*step)
    assert out.dtype == step.heads.dtype
    rtol, atol = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.cpu(), wanted, rtol=rtol, atol=atol)
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dim", "group", "steady", "slots", "dtype"),
    [
        (64, 1, 1, None, FLOAT),
        (64, 4, 65, None, BFLOAT),
        (80, 3, 5, 12, FLOAT),
        (96, 2, 0, 9, HALF),
        (128, 4, 9, 8, BFLOAT),
        (128, 5, 3, 0, FLOAT),
        (256, 1, 2, 3, BFLOAT),
    ],
)
def test_every_size_gives_what_the_definition_gives(
    dim: int, group: int, steady: int, slots: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    assert_as_defined(a_step(1, 1, group, dim, steady, slots, dtype), device)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bias_is_added_after_the_soft_cap(softcap: float | None, device: torch.device) -> None:
    step = a_step(2, 1, 5, 64, 4, 9, FLOAT, bias=True, softcap=softcap)  # 5 query heads: two blocks
    assert_as_defined(step, device)


def attended_elsewhere(step: Step) -> tuple[Tensor, Tensor]:
    """By another attention, of which the first query head found nothing."""
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(step.heads.shape, generator=generator)
    lse = torch.randn(step.heads.shape[:3], generator=generator)
    out[:, :, 0], lse[:, :, 0] = math.nan, -math.inf
    return out, lse


@pytest.mark.parametrize(("steady", "slots"), [(9, 70), (0, 0)])
def test_an_attention_to_other_rows_is_merged_in(steady: int, slots: int, device: torch.device) -> None:
    step = a_step(1, 2, 3, 64, steady, slots, BFLOAT)
    assert_as_defined(step._replace(other=lambda: attended_elsewhere(step)), device)


def test_rows_side_by_side_are_read_as_well(device: torch.device) -> None:
    assert_as_defined(a_step(1, 2, 1, 64, 3, 5, BFLOAT, side_by_side=True), device)


def test_nothing_in_use_gives_zero_and_minus_infinity(device: torch.device) -> None:
    step = a_step(1, 1, 2, 64, 10, 10, FLOAT)
    assert step.valid is not None
    step.steady[:], step.valid[:], step.rows[:] = False, False, math.nan
    out, lse = attend_rows(step, device)
    assert torch.equal(out.cpu(), torch.zeros_like(step.heads))
    assert bool((lse == -math.inf).all())


def test_no_rows_at_all_are_legal(device: torch.device) -> None:
    out, lse = attend_rows(a_step(1, 1, 2, 64, 0, None, FLOAT), device)
    assert not bool(out.any())
    assert bool((lse == -math.inf).all())


def test_a_head_that_chose_nothing_of_a_tile_keeps_what_it_has_elsewhere(device: torch.device) -> None:
    step = a_step(1, 1, 2, 64, 0, 40, FLOAT, bias=True)
    assert step.bias is not None
    assert step.valid is not None
    step.bias[:, :, 0, :35] = -math.inf
    step.bias[:, :, 1] = -math.inf
    step.valid[..., 35:], step.rows[:, :, 35:40] = True, 1.0
    step.bias[:, :, 0, 35:] = 0
    assert_as_defined(step, device)


def test_nan_in_a_row_that_is_used_is_not_hidden(device: torch.device) -> None:
    step = a_step(1, 1, 1, 64, 5, None, FLOAT)
    step.steady[:] = True
    out, _ = attend_rows(step, device)
    assert bool(out.isnan().all())


def test_weights_of_earlier_tiles_shrink_where_a_later_one_has_larger_scores(device: torch.device) -> None:
    step = a_step(1, 1, 1, 64, 100, None, FLOAT)
    step.rows[:, :, :, 0] *= torch.linspace(0, 2, step.rows.shape[2]).view(-1, 1)
    assert_as_defined(step, device)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    step = a_step(1, 1, 1, 64, 20, None, BFLOAT)
    assert_as_defined(step._replace(heads=step.heads * 300), device)


def test_rows_that_no_word_reads_are_refused(device: torch.device) -> None:
    step = a_step(1, 1, 1, 64, 5, None, BFLOAT).to(device)
    with pytest.raises(ValueError, match=r"^rows: wanted D together, .* multiple of 4 elements"):
        cuda.attend_rows(*step._replace(rows=step.rows.transpose(-1, -2).contiguous().transpose(-1, -2)))
    line = torch.zeros(step.rows.numel() + 2, dtype=BFLOAT, device=device)
    with pytest.raises(ValueError, match="offset 2"):
        cuda.attend_rows(*step._replace(rows=line[2:].view(step.rows.shape)))


@needs_gpu
@pytest.mark.parametrize(
    ("dim", "group", "dtype"),
    [
        (32, 4, FLOAT),
        (64, 1, BFLOAT),
        (64, 16, HALF),
        (80, 5, FLOAT),
        (96, 3, HALF),
        (128, 4, FLOAT),
        (128, 4, HALF),
        (128, 4, BFLOAT),
        (128, 16, BFLOAT),
        (256, 2, FLOAT),
        (256, 4, BFLOAT),
    ],
)
def test_real_sizes(dim: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
    for steady, slots in ((1, None), (63, 0), (320, 65), (320, 2048), (8000, 192)):
        assert_as_defined(a_step(2, 3, group, dim, steady, slots, dtype), device)
        if slots is not None:
            assert_as_defined(a_step(2, 3, group, dim, steady, slots, dtype, bias=True, softcap=30.0), device)


@needs_gpu
def test_a_batch_whose_offsets_pass_32_bits(device: torch.device) -> None:
    step = a_step(1, 1, 4, 128, 500, 200, BFLOAT).to(device)
    rows = torch.zeros(5, 8, 2, 220_000, 128, dtype=BFLOAT, device=device).transpose(2, 3)  # 4.5 GB
    rows[4, 7, :703] = step.rows[0, 0]
    assert step.valid is not None
    heads, steady = step.heads.expand(5, 8, -1, -1), step.steady.expand(5, -1)
    out, lse = cuda.attend_rows(heads, rows, steady, step.valid.expand(5, 8, -1), None, step.scaling)
    wanted, wanted_lse = cuda.attend_rows(*step)
    assert torch.equal(out[4, 7], wanted[0, 0])
    assert torch.equal(lse[4, 7], wanted_lse[0, 0])


@needs_gpu
def test_a_captured_graph_follows_its_inputs(device: torch.device) -> None:
    step = a_step(1, 8, 4, 128, 320, 380, BFLOAT, bias=True).to(device)
    attend.attend_rows(*step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend.attend_rows(*step)
    other = a_step(1, 8, 4, 128, 320, 380, BFLOAT, bias=True, softcap=None)
    step.heads.copy_(other.heads.flip(1))
    step.steady.copy_(step.steady & torch.rand_like(step.steady, dtype=FLOAT).gt(0.5))
    graph.replay()
    wanted, wanted_lse = attend.attend_rows(*step)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
