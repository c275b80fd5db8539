"""What `pariskv config validate` says beyond that a configuration is fine."""

from __future__ import annotations

import pytest
from fakes import config_of, registry_of

from pariskv.explain import explain, layer_retrievers


def explained(layers: str, more: str = "") -> list[str]:
    return explain(config_of(layers, more), registry_of())


def test_every_range_says_who_gives_which_stage_and_what_is_inherited() -> None:
    ours = "pariskv (encode, coarse_select, rerank)"
    store = "resident (allocate_store, fetch, update), torch (attend)"
    assert explained("{2-9: {retriever: coarse}, 0-1: {retriever: dense}, 10: {top_k: 5}}") == [
        f"layers.default: {ours}, {store}",
        f"layers.2-9: inherited pariskv (encode, rerank), coarse (coarse_select), {store}",
        "layers.0-1: dense (every token stays dense), torch (attend)",
        f"layers.10: inherited {ours}, {store}",
    ]


NO_RERANK = "nothing reranks, so coarse_select returns the top_k itself"
UNUSED = [
    ("{default: {rerank: none, candidates: 256}}", [f"layers.default.candidates has no effect: {NO_RERANK}"]),
    ("{default: {candidates: 256}, 1: {rerank: none}}", []),
    ("{default: {rerank: none, candidates: 256}, 1: {rerank: pariskv}}", []),
    ("{1: {rerank: none, candidates: auto}}", [f"layers.1.candidates has no effect: {NO_RERANK}"]),
    (
        "{1: {retriever: dense, top_k: 3}}",
        ["layers.1.top_k has no effect: the layer's retriever keeps every token dense"],
    ),
    ("{1: {top_k: 0, rerank: rerank}}", ["layers.1.rerank has no effect: top_k is 0, so no token is selected"]),
    (
        "{1: {retriever: rerank, rerank: pariskv}}",
        ["layers.1.retriever has no effect: other keys name a retriever for each stage"],
    ),
]


@pytest.mark.parametrize(("layers", "notes"), UNUSED)
def test_keys_without_an_effect_are_noted(layers: str, notes: list[str]) -> None:
    found = [line for line in explained(layers) if line.startswith("note: ")]
    assert found == [f"note: {note}" for note in notes]


def test_an_instance_that_no_layer_names_is_noted() -> None:
    (note,) = explained("{1: {rerank: mine}}", "retrievers: {mine: {type: rerank}, other: {type: rerank}}")[2:]
    assert note == "note: retrievers.other has no effect: no layer names it (`pariskv compare --retrievers` can)"


def test_a_configuration_is_called_by_the_retrievers_that_choose() -> None:
    assert layer_retrievers(config_of("{}")) == ["pariskv"]
    layers = "{0-1: {retriever: dense}, default: {retriever: coarse, rerank: rerank}, 4: {rerank: none}}"
    assert layer_retrievers(config_of(layers)) == ["coarse", "rerank", "dense"]
