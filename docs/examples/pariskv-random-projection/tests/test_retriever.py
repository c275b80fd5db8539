"""The contract, the entry point, and a tiny model. The fixtures come with pariskv."""

from __future__ import annotations

import pytest
import torch
from pariskv.errors import ConfigError
from pariskv.registry import Registry
from pariskv.testing import Distribution, TinyRuns, check_retriever

from pariskv_random_projection import Options, RandomProjection
from pariskv_random_projection.retriever import project


def test_it_keeps_the_contract(key_distribution: Distribution) -> None:
    check_retriever(RandomProjection(), distribution=key_distribution)


def test_it_finds_the_tokens_that_matter() -> None:
    check_retriever(RandomProjection(), distribution="needles", recall_floor=0.7)


def test_more_directions_find_more() -> None:
    check_retriever(RandomProjection(Options(directions=256)), recall_floor=0.6)


def test_projections_keep_inner_products() -> None:
    one, other = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    got = project(one, 4096) @ project(other, 4096)
    torch.testing.assert_close(got, one @ other, rtol=0, atol=3.0)  # 3 |one| |other| / root of m


def test_no_directions_are_refused() -> None:
    with pytest.raises(ConfigError, match="directions=0, wanted 1 or more"):
        RandomProjection(Options(directions=0))


def test_pariskv_finds_it_by_name() -> None:
    assert isinstance(Registry.load().make("random-projection", {}), RandomProjection)


def test_with_a_budget_of_everything_it_is_dense_attention(tiny_runs: TinyRuns) -> None:
    run = tiny_runs.compare({"default": {"retriever": "random-projection", "top_k": 1000}})
    assert run.zones[0] > 0
    assert run.tokens == run.dense_tokens


def test_pariskv_can_rerank_what_it_proposes(tiny_runs: TinyRuns) -> None:
    layer = {"retriever": "pariskv", "coarse_select": "random-projection", "top_k": 8}
    run = tiny_runs.compare({"default": {**layer, "candidates": 32}})
    assert len(run.tokens[0]) == tiny_runs.new_tokens
