"""What `pariskv.testing` gives to plugin authors beside `check_retriever`: distributions, tiny models, fixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pariskv_plugins.exact import Exact

from pariskv.errors import PluginContractError
from pariskv.hookspecs import Retriever, hookimpl
from pariskv.testing import DISTRIBUTIONS, Distribution, SamplePrompt, TinyRuns, check_retriever, sample_prompt
from pariskv.types import Budget, Codes, LayerInfo, Query, Selection

LAYER = LayerInfo(0, 2, 2, 3, 64, torch.float32, torch.device("cpu"), 64**-0.5)
LENGTHS = (600, 40)


def prompt_of(kind: Distribution) -> SamplePrompt:
    return sample_prompt(LAYER, LENGTHS, kind)


def test_the_oracle_finds_everything_in_every_distribution(key_distribution: Distribution) -> None:
    check_retriever(Exact(), distribution=key_distribution, lengths=(300, 16, 0), recall_floor=1.0)


def test_a_prompt_is_the_same_at_every_call(key_distribution: Distribution) -> None:
    one, other = prompt_of(key_distribution), prompt_of(key_distribution)
    assert torch.equal(one.keys, other.keys)
    assert torch.equal(one.heads, other.heads)
    assert tuple(one.keys.shape) == tuple(one.values.shape) == (2, 2, 600, 64)
    assert bool(one.keys.isfinite().all())


def test_distributions_are_what_they_are_called() -> None:
    spread = prompt_of("outliers").keys.mean((0, 1, 2))
    assert bool((spread[::16] > 9).all())
    assert float(spread[1:16].abs().max()) < 1
    begin, end = (prompt_of("drifting").keys[0, 0, part].mean(0) for part in (slice(0, 60), slice(540, 600)))
    assert abs(float(torch.cosine_similarity(begin, end, dim=0))) < 0.5
    needles = prompt_of("needles")
    mass = (needles.heads[0] @ needles.keys[0].mT * LAYER.scaling).softmax(-1).sort(descending=True).values
    assert bool((mass[..., :24].sum(-1) > 0.9).all())
    clustered = torch.nn.functional.normalize(prompt_of("clustered").keys[0, 0], dim=-1)
    alike = (clustered @ clustered.mT > 0.5).float().mean()
    assert 0.05 < float(alike) < 0.15  # one of twelve centres


class First(Retriever):
    """The oldest tokens, whatever the query."""

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        slots = torch.arange(budget.width)
        used = torch.where(slots < budget.count.unsqueeze(1), slots, -1).int()
        return Selection(used.unsqueeze(1).expand(-1, query.heads.shape[1], -1))


def test_a_recall_floor_is_told_apart_by_the_distribution() -> None:
    with pytest.raises(PluginContractError, match=r"recall at 4 is 0\.\d+, wanted 1.0 or more"):
        check_retriever(First(), distribution="needles", top_k=4, recall_floor=1.0)


def test_a_tiny_model_retrieves_and_agrees_with_dense_attention_where_nothing_is_left_out(tiny_runs: TinyRuns) -> None:
    everything = tiny_runs.compare({"default": {"retriever": "exact", "top_k": 1000}})
    assert everything.tokens == everything.dense_tokens
    assert everything.zones == [152, 152]
    little = tiny_runs.compare({"default": {"retriever": "exact", "top_k": 4}})
    assert little.attended < everything.attended / 4
    assert little.tokens != little.dense_tokens


def test_models_of_every_family_can_be_had(tiny_models: Callable[..., Any]) -> None:
    assert tiny_models("qwen3").config.model_type == "qwen3"


def test_the_fixtures_are_a_pytest_plugin(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.has_plugin("pariskv.testing.fixtures")
    assert len(DISTRIBUTIONS) == 5
