"""The compiled CPU kernels give what the PyTorch definitions give, to the bit where results are integers."""

from __future__ import annotations

import pytest
import torch
from pariskv_kernels import cpu
from pariskv_kernels.collide import collide
from pariskv_kernels.encode import encode_keys
from pariskv_kernels.rerank import estimate_scores
from pariskv_kernels.select import select_by_scores, select_by_votes
from pariskv_kernels.srht import rotate
from pariskv_kernels.tiers import tier_table


@pytest.mark.parametrize("subspace_dim", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e4])
def test_both_implementations_agree_on_whole_retrievals(
    subspace_dim: int, head_dim: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    keys = torch.randn(2, 3, 777, head_dim, generator=generator) * scale
    codes = encode_keys(keys, subspace_dim)
    rotated = rotate(torch.randn(2, 3, head_dim, generator=generator)).contiguous()
    lengths, count = torch.tensor([777, 301], dtype=torch.int32), torch.tensor([200, 40], dtype=torch.int32)
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(cpu, "has_numba", lambda compiled=compiled: compiled)
        table = tier_table(rotated, codes.counts, torch.tensor([300, 77]))
        votes = collide(codes.signs, table, lengths)
        chosen = select_by_votes(votes, count, lengths, 222)
        scores = estimate_scores(rotated, codes.codes, codes.weights, chosen)
        best = select_by_scores(scores, chosen, 50)
        found.append((table, votes.histogram, chosen, scores, best))
    for name, one, two in zip(("table", "histogram", "chosen"), found[0], found[1], strict=False):
        assert torch.equal(one, two), name
    largest = float(found[0][3][found[0][2] >= 0].abs().max())
    torch.testing.assert_close(found[0][3], found[1][3], rtol=0, atol=1e-5 * largest)
    same = (found[0][4] == found[1][4]).float().mean()
    assert same > 0.97  # scores are sums in another order, so neighbours may swap


@pytest.mark.parametrize("subspace_dim", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30, float("nan")])
def test_codes_are_the_same_bits(
    subspace_dim: int, head_dim: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = torch.randn(2, 3, 1001, head_dim, generator=torch.Generator().manual_seed(head_dim)) * scale
    keys[:, :, 5] = 0
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(cpu, "has_numba", lambda compiled=compiled: compiled)
        found.append(encode_keys(keys, subspace_dim))
    for name, one, two in zip(found[0]._fields, *found, strict=True):
        assert torch.equal(one, two), name


def test_the_switch_keeps_cpu_tensors_on_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv(cpu.SWITCH, "0")
    cpu.has_numba.cache_clear()
    assert not cpu.is_compiled_for(torch.zeros(1))
    cpu.has_numba.cache_clear()
