"""Every retriever of the registry through `check_retriever`, and every coarse_select before every other rerank."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pariskv_plugins
import pytest
import torch
from fakes import importable, plugin
from pariskv_plugins.exact import Exact
from tiny_models import dense_generate, greedy, prompt, tiny_model
from torch import Tensor

from pariskv import ParisCache, parse_config
from pariskv.binding import bind
from pariskv.config import Config
from pariskv.errors import BindingError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.registry import BUILTIN_PLUGINS, Registry
from pariskv.stages import stages_of, traits_of
from pariskv.testing import check_retriever
from pariskv.types import Codes, Query, Selection
from tests.plugins.driving import padded
from tests.plugins.uva_of_a_cpu import UvaOfACpu

REGISTRY = Registry.load(entry_points=False)

# The published sizes of these two are for prompts that would take most of the time here.
SMALL: dict[str, dict[str, Any]] = {
    "magicpig": {"bits": 4, "tables": 12},
    "retroinfer": {"segment": 32, "cluster": 8},
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "exact": [{"combine": "per_query_head"}],
    "magicpig": [{"placement": "device"}],
    "pariskv": [{"subspace_dim": 4}],
    "quest": [{"combine": "max_logit"}],
    "shadowkv": [{"keys": "store"}],
}
"""Options that have a retriever do something else altogether; those that change a size are for its own tests."""

# Tokens at random: 0.21 of 96 tokens, 0.13 of 160. Those that choose by whole pages (quest), by keys without their
# position (shadowkv) or by the prompt's queries (snapkv) are little better on random keys.
FLOORS = {"exact": 1.0, "pariskv": 0.7, "pqcache": 0.33, "retroinfer": 0.25}

# Of 700 tokens of which a few matter, where tokens at random have 0.05; of each the variant that finds least.
NEEDLES = {
    "exact": 1.0,
    "pariskv": 0.9,
    "pqcache": 0.6,
    "quest": 0.12,
    "retroinfer": 0.25,
    "shadowkv": 0.15,
    "snapkv": 0.18,
}


@dataclass(frozen=True)
class Case:
    """One retriever with some of its options."""

    name: str
    variant: dict[str, Any]

    def __str__(self) -> str:
        return " ".join((self.name, *(str(value) for value in self.variant.values())))

    @property
    def options(self) -> dict[str, Any]:
        return SMALL.get(self.name, {}) | self.variant

    def make(self) -> object:
        return UvaOfACpu() if self.name == "uva" else REGISTRY.make(self.name, self.options)

    @property
    def stages(self) -> list[str]:
        return list(stages_of(self.make(), self.name))

    @property
    def format(self) -> str | None:
        retriever = self.make()
        return traits_of(retriever, stages_of(retriever, self.name), self.name).format


CASES = [Case(name, variant) for name in REGISTRY.names() for variant in ({}, *VARIANTS.get(name, []))]


def test_the_line_up_is_the_registrys() -> None:
    listed = {row.name: row.error for row in REGISTRY.listing() if row.kind == "retriever"}
    assert {case.name for case in CASES} == set(listed) >= {*SMALL, *VARIANTS, *FLOORS, *NEEDLES}
    assert set(listed.values()) == {None}
    assert REGISTRY.broken == {}


def test_every_plugin_module_that_registers_something_is_built_in() -> None:
    modules = {module.name: module for module in pkgutil.iter_modules(pariskv_plugins.__path__, "pariskv_plugins.")}
    offering = {name for name in modules if hasattr(pkgutil.resolve_name(name), "register_retrievers")}
    assert offering == set(BUILTIN_PLUGINS) - {"pariskv.attention"}


@pytest.mark.usefixtures("huge_pages")
@pytest.mark.parametrize("lengths", [(96,), (160, 16, 0)], ids=["batch 1", "ragged 3"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_keeps_the_contract(case: Case, dtype: torch.dtype, dim: int, group: int, lengths: tuple[int, ...]) -> None:
    floor = FLOORS.get(case.name)
    check_retriever(case.make(), dtype=dtype, head_dim=dim, group=group, lengths=lengths, top_k=20, recall_floor=floor)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in NEEDLES], ids=str)
def test_it_finds_more_needles_than_chance(case: Case) -> None:
    check_retriever(case.make(), distribution="needles", recall_floor=NEEDLES[case.name])


# Pairs: candidates of one, reranked by another, in a model

FIRST = [case for case in CASES if "coarse_select" in case.stages]
SECOND = [case for case in CASES if "rerank" in case.stages]
PAIRS = [(first, second) for first in FIRST for second in SECOND if first != second]

SINK, LOCAL, U = 4, 8, 32  # a multiple of every block, so that all pairs have the same zones
NEW = 24
PROMPTS = [prompt(tokens, seed=tokens) for tokens in (90, 60, 25)]  # the last has its first zone while it generates
ZONES = {"all": [96, 64, 32], "prompt": [64, 32, 0]}  # in the end, by what the pair indexes
TOP_K, CANDIDATES = 6, 16
GROUP = 3

# So many tables of one bit that every key is in the sample, as good as certainly.
COVERING: dict[str, dict[str, Any]] = {"magicpig": {"bits": 1, "tables": 300}}
# Logits come out of generate() in float32. MagicPIG's weight of a certain token is log(1 + 1e-4).
TOLERANCE = {"magicpig": 1e-4}


@dataclass
class Reference:
    """A tiny model, and the logits [B, NEW, V] that each prompt gets alone from dense attention."""

    model: Any
    dense: Tensor


@pytest.fixture(scope="module")
def reference() -> Reference:
    model = tiny_model("llama", num_hidden_layers=2)
    return Reference(model, torch.cat([dense_generate(model, ids, NEW)[1] for ids in PROMPTS]))


@dataclass
class Seen:
    """What the rerank of every layer and step was offered, and what it made of it."""

    zones: list[Tensor] = field(default_factory=list)
    offered: list[Selection] = field(default_factory=list)
    chosen: list[Selection] = field(default_factory=list)


def pair_config(first: Case, second: Case, covering: bool = False, **layer: Any) -> Config:
    """The first retriever in every layer of a small window, reranked by the second."""

    def instance(case: Case) -> dict[str, Any]:
        return {"type": case.name, **case.options, **(COVERING.get(case.name, {}) if covering else {})}

    return parse_config(
        {
            "retrievers": {"first": instance(first), "second": instance(second)},
            "layers": {"default": {"retriever": "first", "rerank": "second", **layer}},
            "window": {"sink": SINK, "local": LOCAL, "update_interval": U, "dense_below": 0},
        }
    )


def watched(cache: ParisCache) -> Seen:
    """What happens around the rerank of all layers; to be called before the cache is used."""
    seen = Seen()
    for index, pipeline in cache.request.pipelines.items():

        def rerank(query: Query, selection: Selection, codes: Codes, top_k: int, real: Any = pipeline.rerank) -> Any:
            chosen = real(query, selection, codes, top_k)
            seen.zones.append(codes.length.clone())
            seen.offered.append(selection)
            seen.chosen.append(chosen)
            return chosen

        cache.request.pipelines[index] = replace(pipeline, rerank=rerank)
    return seen


def logits_of(model: Any, cache: ParisCache) -> Tensor:
    """The logits [B, NEW, V] of the three prompts as one batch, generated greedily."""
    ids, mask = padded(PROMPTS)
    out = greedy(model, ids, NEW, mask, cache=cache)
    return torch.stack(out.logits, dim=1)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_a_pair_whose_budget_covers_the_history_attends_to_all_of_it(
    first: Case, second: Case, reference: Reference
) -> None:
    cache = ParisCache(reference.model, pair_config(first, second, covering=True, candidates=1.0, top_k=400), REGISTRY)
    got = logits_of(reference.model, cache)
    layer = cache.request.layers[1]
    assert layer.zones == ZONES[layer.pipeline.indexes], "the stages must have run, over an update"
    wanted = reference.dense
    if "window" in (first.name, second.name):  # which selects nothing, whatever the other one does
        nothing = ParisCache(reference.model, pair_config(first, second, top_k=0), REGISTRY)
        wanted = logits_of(reference.model, nothing)
        assert nothing.request.layers[1].zones == layer.zones
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE.get(first.name, 1e-6))


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_a_pair_with_a_small_budget_fetches_so_many_of_the_candidates_and_no_more(
    first: Case, second: Case, reference: Reference
) -> None:
    cache = ParisCache(reference.model, pair_config(first, second, candidates=CANDIDATES, top_k=TOP_K), REGISTRY)
    seen = watched(cache)
    got = logits_of(reference.model, cache)
    assert bool(got.isfinite().all())
    assert not torch.allclose(got, reference.dense, atol=1e-3), "a budget that loses something"
    assert len(seen.chosen) == 2 * (NEW - 1)
    most = cache.request.pipelines[0].slots(GROUP)
    assert most == TOP_K * (GROUP if "per_query_head" in second.variant.values() else 1)
    for zones, offered, chosen in zip(seen.zones, seen.offered, seen.chosen, strict=True):
        for row, head in ((row, head) for row in range(3) for head in range(2)):
            given, taken = (one.indices[row, head][one.indices[row, head] >= 0].tolist() for one in (offered, chosen))
            assert len(set(taken)) == len(taken) <= most
            assert set(taken) <= set(given) <= set(range(int(zones[row])))
            assert second.name == "window" or len(taken) >= min(TOP_K, len(given))


# Pairs that cannot be


@pytest.mark.parametrize("stage", ["coarse_select", "rerank"])
@pytest.mark.parametrize("name", REGISTRY.names())
def test_only_what_gives_a_stage_can_be_named_for_it(stage: str, name: str) -> None:
    config = parse_config({"layers": {"default": {"retriever": "pariskv", stage: name}}})
    case = Case(name, {})
    if stage in case.stages:
        assert bind(config, 1, REGISTRY)[0].names[stage] == name
        return
    has = ", ".join(case.stages) or "none"
    with pytest.raises(BindingError) as caught:
        bind(config, 1, REGISTRY)
    assert str(caught.value) == (
        f"layers.default.{stage}: retriever {name!r} does not implement {stage}; its stages: {has}"
    )


class Borrowing(Retriever):
    """Reranks by the keys that somebody else keeps."""

    reads = "keys"
    reads_steady = frozenset({"rerank"})

    @hookimpl
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        return Exact().rerank(query, selection, codes, top_k)


@contextmanager
def with_borrowing() -> Iterator[Registry]:
    def register_all(register: Register) -> None:
        register("borrowing", Borrowing)

    with importable(borrowing_plugin=plugin(register_all)) as names:
        yield Registry.load((*BUILTIN_PLUGINS, *names), entry_points=False)


@pytest.mark.parametrize("first", FIRST, ids=str)
def test_a_rerank_is_refused_where_nobody_makes_the_codes_that_it_reads(first: Case) -> None:
    config = pair_config(first, Case("borrowing", {}))
    with with_borrowing() as registry:
        if first.format == "keys":
            assert bind(config, 1, registry)[0].rerank_codes == "first"
            return
        with pytest.raises(BindingError) as caught:
            bind(config, 1, registry)
        assert str(caught.value) == (
            "layers.default: rerank of 'second' reads the format keys, which no retriever of the layer makes; "
            "write `encode: exact` (made by: exact)"
        )
        layer = bind(pair_config(first, Case("borrowing", {}), encode="exact"), 1, registry)[0]
        assert (layer.rerank_codes, layer.coarse_codes) == ("exact", "first" if first.format else None)


def test_the_advice_of_the_refusal_works(reference: Reference) -> None:
    quest = Case("quest", {})
    budget: dict[str, Any] = {"candidates": CANDIDATES, "top_k": TOP_K}
    with with_borrowing() as registry:
        config = pair_config(quest, Case("borrowing", {}), encode="exact", **budget)
        got = logits_of(reference.model, ParisCache(reference.model, config, registry))
    wanted = logits_of(reference.model, ParisCache(reference.model, pair_config(quest, Case("exact", {}), **budget)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
