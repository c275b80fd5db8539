"""The gather kernels against their definitions."""

from __future__ import annotations

import pytest
import torch
from conftest_cuda import ON_GPU, needs_gpu
from pariskv_kernels.gather import cuda, naive
from torch import Tensor

FEW = {} if ON_GPU else {"threads": 8, "lanes": 4}
FEW_MATCHING = FEW if ON_GPU else FEW | {"match_threads": 4}
BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_rows(device: torch.device, tokens: int, dim: int, dtype: torch.dtype, token_major: bool = False) -> Tensor:
    """Rows [1, 2, N, 2, D]; token 0, where -1 might point, is NaN."""
    shape = (tokens, 1, 2, 2, dim) if token_major else (1, 2, tokens, 2, dim)
    rows = torch.randn(shape, generator=generator(tokens)).to(device, dtype)
    rows = rows.permute(1, 2, 0, 3, 4) if token_major else rows
    rows[:, :, 0] = float("nan")
    return rows


def slots(device: torch.device, batch: int, heads: int, count: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A view of a NaN-filled working set: three rows in front, the keys of a head before its values."""
    buffer = torch.full((batch, heads, 2, 3 + count, dim), float("nan"), dtype=dtype, device=device)
    return buffer.transpose(2, 3)[:, :, 3:]


def buffer_of(out: Tensor) -> Tensor:
    return out.as_strided((*out.shape[:2], 2, out.shape[2] + 3, out.shape[-1]), out.transpose(2, 3).stride(), 0)


def chosen(batch: int, heads: int, slots: int, tokens: int, seed: int, empty: int = 0) -> Tensor:
    """Positions from 1 on, ascending, the last `empty` of them -1."""
    picks = torch.rand(batch, heads, tokens - 1, generator=generator(seed)).argsort(-1)[..., :slots] + 1
    indices = picks.sort(-1).values.int()
    indices[..., slots - empty :] = -1
    return indices


def shuffled(indices: Tensor, seed: int) -> Tensor:
    order = torch.rand(indices.shape, generator=generator(seed)).argsort(-1)
    return indices.gather(-1, order)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("dim", "dtype", "count"),
    [(64, BFLOAT, 1), (80, HALF, 63), (96, FLOAT, 5), (128, BFLOAT, 65), (256, FLOAT, 3), (6, BFLOAT, 4), (7, HALF, 4)],
)
@pytest.mark.parametrize("token_major", [False, True])
def test_rows_reach_their_slots(
    device: torch.device, dim: int, dtype: torch.dtype, count: int, token_major: bool
) -> None:
    rows = some_rows(device, 100, dim, dtype, token_major)
    indices = shuffled(chosen(1, 2, count, 100, seed=1, empty=count // 3), seed=2).to(device)
    out, wanted = (slots(device, 1, 2, count, dim, dtype) for _ in range(2))
    valid = cuda.gather_rows(rows, indices, out, **FEW)
    assert torch.equal(valid, naive.gather_rows(rows, indices, wanted))
    assert same_bits(buffer_of(out), buffer_of(wanted))
    assert not bool(out.isnan().any())
    assert bool(buffer_of(out)[:, :, :, :3].isnan().all())


def test_rows_that_start_anywhere_are_copied_in_narrower_words(device: torch.device) -> None:
    memory = some_rows(device, 10, 66, BFLOAT)
    indices = torch.tensor([[[4, -1, 2], [1, 9, -1]]], dtype=torch.int32, device=device)
    for start, wanted_word in ((1, torch.int16), (2, torch.int32)):
        rows = memory[..., start : start + 64]
        out, wanted = (slots(device, 1, 2, 3, 64, BFLOAT) for _ in range(2))
        assert cuda._word(rows, out) == wanted_word
        cuda.gather_rows(rows, indices, out, **FEW)
        naive.gather_rows(rows, indices, wanted)
        assert same_bits(out, wanted)


def test_rows_with_gaps_between_their_numbers_are_refused(device: torch.device) -> None:
    rows, indices = some_rows(device, 10, 64, BFLOAT), torch.zeros(1, 2, 3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^rows: wanted keys and values that are contiguous"):
        cuda.gather_rows(rows[..., ::2], indices, slots(device, 1, 2, 3, 32, BFLOAT), **FEW)


def test_no_slots_and_no_rows_are_legal(device: torch.device) -> None:
    none, empty = torch.empty(1, 2, 0, dtype=torch.int32, device=device), some_rows(device, 4, 64, BFLOAT)[:, :, :0]
    out, counts = slots(device, 1, 2, 0, 64, BFLOAT), torch.zeros(2, dtype=torch.int64, device=device)
    assert cuda.gather_rows(empty, none, out, **FEW).shape == (1, 2, 0)
    valid, order = cuda.gather_changed(empty, none, none.clone(), out, counts, **FEW_MATCHING)
    assert valid.shape == order.shape == (1, 2, 0)
    only_empty = torch.full((1, 2, 3), -1, dtype=torch.int32, device=device)
    out = slots(device, 1, 2, 3, 64, BFLOAT)
    assert not bool(cuda.gather_rows(empty, only_empty, out, **FEW).any())
    assert bool((out == 0).all())


def steps(batch: int, heads: int, count: int, tokens: int) -> list[Tensor]:
    """Selections of consecutive steps: ascending, half renewed, shuffled with holes, empty, small, everything."""
    first = chosen(batch, heads, count, tokens, seed=1)
    half = torch.cat((first[..., ::2], chosen(batch, heads, count, tokens, seed=2)[..., 1::2]), dim=-1)
    half = half.where(~repeated(half), -1)
    return [
        first,
        half,
        shuffled(half, seed=3),
        torch.full_like(first, -1),
        chosen(batch, heads, count, tokens, seed=4, empty=count // 2),
        shuffled(chosen(batch, heads, count, tokens, seed=5, empty=count // 5), seed=6),
    ]


def repeated(indices: Tensor) -> Tensor:
    """Which entries have stood before in the same selection."""
    same = indices.unsqueeze(-1) == indices.unsqueeze(-2)
    return same.tril(-1).any(-1)


@pytest.mark.parametrize(("count", "dim", "dtype"), [(1, 64, FLOAT), (5, 80, HALF), (65, 8, BFLOAT)])
def test_held_rows_stay_where_they_are(device: torch.device, count: int, dim: int, dtype: torch.dtype) -> None:
    rows = some_rows(device, 2 * count + 2, dim, dtype, token_major=True)
    out, wanted = (slots(device, 1, 2, count, dim, dtype) for _ in range(2))
    held = torch.full((1, 2, count), -1, dtype=torch.int32, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    held_wanted, counts_wanted = held.clone(), counts.clone()
    for indices in steps(1, 2, count, 2 * count + 2):
        given = indices.to(device)
        valid, order = cuda.gather_changed(rows, given, held, out, counts, **FEW_MATCHING)
        valid_wanted, order_wanted = naive.gather_changed(rows, given, held_wanted, wanted, counts_wanted)
        assert torch.equal(valid, valid_wanted)
        assert torch.equal(order, order_wanted)
        assert torch.equal(held, held_wanted)
        assert counts.tolist() == counts_wanted.tolist()
        assert same_bits(buffer_of(out), buffer_of(wanted))


def test_too_many_slots_to_match_are_refused(device: torch.device) -> None:
    indices = torch.full((1, 2, 4097), -1, dtype=torch.int32, device=device)
    rows, out = some_rows(device, 4, 8, BFLOAT), slots(device, 1, 2, 4097, 8, BFLOAT)
    with pytest.raises(ValueError, match=r"^indices: wanted at most 4096 positions a head, got 4097; use gather_rows"):
        cuda.gather_changed(rows, indices, indices.clone(), out, torch.zeros(2, dtype=torch.int64, device=device))


@needs_gpu
@pytest.mark.parametrize("count", [100, 1000, 2048, 4096])
@pytest.mark.parametrize(("dim", "dtype"), [(64, FLOAT), (80, BFLOAT), (96, HALF), (128, BFLOAT), (256, BFLOAT)])
def test_whole_working_sets_are_the_definitions(device: torch.device, count: int, dim: int, dtype: torch.dtype) -> None:
    tokens = 10_000
    rows = torch.randn(tokens, 3, 8, 2, dim, device=device).to(dtype).permute(1, 2, 0, 3, 4)
    rows[:, :, 0] = float("nan")
    out, wanted = (slots(device, 3, 8, count, dim, dtype) for _ in range(2))
    held = torch.full((3, 8, count), -1, dtype=torch.int32, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    held_wanted = held.clone()
    for seed, indices in enumerate(steps(3, 8, count, tokens)):
        given = indices.to(device)
        valid, order = cuda.gather_changed(rows, given, held, out, counts)
        kept = (held_wanted.unsqueeze(-1) == given.unsqueeze(-2)).any(-1) & (held_wanted >= 0)
        assert torch.equal(held[kept], held_wanted[kept]), seed
        held_wanted = held.clone()
        assert torch.equal(held.sort(-1).values, given.sort(-1).values)
        assert torch.equal(held, given.gather(-1, order.clamp(min=0).long()).where(valid, -1))
        naive.gather_rows(rows, held, wanted)
        assert same_bits(buffer_of(out), buffer_of(wanted))
    fresh = slots(device, 3, 8, count, dim, dtype)
    cuda.gather_rows(rows, held, fresh)
    assert same_bits(buffer_of(fresh), buffer_of(wanted))


@needs_gpu
def test_a_captured_gather_follows_its_inputs(device: torch.device) -> None:
    rows = torch.randn(1, 8, 5000, 2, 128, device=device, dtype=BFLOAT)
    out = slots(device, 1, 8, 256, 128, BFLOAT)
    held = torch.full((1, 8, 256), -1, dtype=torch.int32, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    given = steps(1, 8, 256, 5000)
    indices = given[0].to(device)
    cuda.gather_changed(rows, indices, held, out, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        valid, _ = cuda.gather_changed(rows, indices, held, out, counts)
    for new in given:
        indices.copy_(new)
        graph.replay()
        wanted = slots(device, 1, 8, 256, 128, BFLOAT)
        assert torch.equal(naive.gather_rows(rows, held, wanted), valid)
        assert same_bits(buffer_of(out), buffer_of(wanted))
        assert torch.equal(held.sort(-1).values, indices.sort(-1).values)
