"""Who answers for a stage and whose codes it reads; every refusal of names that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from types import ModuleType

import pytest
from fakes import (
    Coarse,
    Format,
    Full,
    Memory,
    Rerank,
    config_of,
    importable,
    pipelines,
    refusal,
    registry_of,
)

from pariskv.binding import LayerPipeline, bind
from pariskv.budget import CandidateRule
from pariskv.errors import BindingError, ConfigError, PluginLoadError
from pariskv.hookspecs import Retriever, hookimpl
from pariskv.registry import Registry


def test_the_default_retriever_gives_every_stage_it_implements_and_the_store_the_rest() -> None:
    layer = pipelines()[2]
    assert layer.index == 2
    assert dict(layer.names) == {
        "attend": "torch",
        "update": "resident",
        "fetch": "resident",
        "allocate_store": "resident",
        "coarse_select": "pariskv",
        "rerank": "pariskv",
    }
    assert [encoder.name for encoder in layer.encoders] == ["pariskv"]
    assert (layer.coarse_codes, layer.rerank_codes) == ("pariskv", "pariskv")
    assert (layer.top_k, layer.candidates) == (512, CandidateRule.parse("auto"))
    assert (layer.indexes, layer.block, layer.slots(4)) == ("all", 1, 512)
    assert layer.graph_safe
    with pytest.raises(FrozenInstanceError):
        layer.top_k = 3  # type: ignore[misc]


def test_a_range_overrides_one_stage_and_inherits_the_rest() -> None:
    layers = pipelines("{1-2: {coarse_select: coarse, top_k: 8, candidates: 40}}")
    assert layers[0].names["coarse_select"] == layers[3].names["coarse_select"] == "pariskv"
    assert layers[1].names["coarse_select"] == layers[2].names["coarse_select"] == "coarse"
    assert layers[2].names["rerank"] == "pariskv"
    assert (layers[2].coarse_codes, layers[2].rerank_codes) == ("pariskv", "pariskv")
    assert (layers[2].top_k, layers[2].candidates) == (8, CandidateRule.parse(40))
    assert [encoder.name for encoder in layers[2].encoders] == ["pariskv"]


@pytest.mark.parametrize(
    ("own", "default", "rerank"),
    [
        ("rerank: a, retriever: b", "rerank: c, retriever: d", "a"),
        ("retriever: b", "rerank: c, retriever: d", "b"),
        ("retriever: coarse", "rerank: c, retriever: d", "c"),
        ("retriever: coarse", "retriever: d", "d"),
        ("coarse_select: coarse", "retriever: d", "d"),
        ("rerank: none, retriever: b", "rerank: c, retriever: d", None),
        ("retriever: coarse", "rerank: none, retriever: d", None),
    ],
)
def test_the_first_that_answers_gives_the_stage(own: str, default: str, rerank: str | None) -> None:
    layers = f"{{0: {{{own}}}, default: {{coarse_select: coarse, encode: codes, {default}}}}}"
    layer = pipelines(layers, layer_count=1, retrievers=dict.fromkeys("abcd", Rerank))[0]
    assert layer.names.get("rerank") == rerank
    assert (layer.rerank is None) == (rerank is None)


def test_without_a_rerank_the_candidates_are_the_first_top_k() -> None:
    for layers in ("{default: {rerank: none}}", "{default: {retriever: coarse, encode: codes}}"):
        layer = pipelines(layers)[0]
        assert layer.rerank is None
        assert layer.candidates == CandidateRule.first_top_k()
        assert layer.rerank_codes is None


def test_instances_have_their_own_options_and_types() -> None:
    @dataclass(frozen=True)
    class Options:
        page_size: int = 16

    made: list[Options] = []

    def make(options: Options) -> object:
        made.append(options)
        return Coarse()

    config = "retrievers: {q64: {type: quest, page_size: 64}, q32: {type: quest, page_size: 32}, q8: {type: quest}}"
    layers = pipelines(
        "{1: {coarse_select: q64}, 2: {coarse_select: q64}, 3: {coarse_select: q32}}",
        config,
        retrievers={"quest": make},
        options={"quest": Options},
    )
    assert [layers[index].names["coarse_select"] for index in range(4)] == ["pariskv", "q64", "q64", "q32"]
    assert sorted(options.page_size for options in made) == [32, 64]


def test_only_the_layers_that_retrieve_are_bound() -> None:
    assert list(bind(config_of("{0: {retriever: dense}}"), 6, registry_of(), {5, 1, 3})) == [1, 3, 5]


def test_a_dense_layer_only_attends() -> None:
    layers = pipelines("{0-1: {retriever: dense}, default: {encode: codes, codes_from: codes}}")
    assert layers[0] == LayerPipeline(
        0, layers[0].attend, top_k=512, indexes="none", graph_safe=True, names={"attend": "torch"}
    )
    assert layers[2].indexes == "all"


def test_top_k_zero_selects_nothing_and_still_stores_the_zone() -> None:
    layer = pipelines("{default: {top_k: 0}}")[0]
    assert dict(layer.names) == {"attend": "torch", "update": "resident", "allocate_store": "resident"}
    assert (layer.encoders, layer.coarse_select, layer.rerank, layer.fetch) == ((), None, None, None)
    assert (layer.indexes, layer.slots(4)) == ("all", 0)


def test_the_store_and_the_attend_are_chosen_by_name() -> None:
    layer = pipelines("{}", "store: disk\nruntime: {attend: fast}", retrievers={"disk": Memory, "fast": AttendFast})[0]
    assert (layer.names["update"], layer.names["allocate_store"], layer.names["attend"]) == ("disk", "disk", "fast")


class AttendFast(Retriever):
    @hookimpl
    def attend(self, query, working, selected):  # type: ignore[no-untyped-def]
        return query.heads, query.heads


class Fetch(Retriever):
    @hookimpl
    def fetch(self, selection, store, slots):  # type: ignore[no-untyped-def]
        return selection


def test_the_store_is_of_whoever_updates_it() -> None:
    layer = pipelines("{default: {fetch: fetch}}", retrievers={"fetch": Fetch})[0]
    assert (layer.names["fetch"], layer.names["update"], layer.names["allocate_store"]) == (
        "fetch",
        "resident",
        "resident",
    )
    layer = pipelines("{default: {fetch: disk, update: disk}}", retrievers={"disk": Memory})[0]
    assert layer.names["allocate_store"] == "disk"


class Other(Format):
    format = "other"
    block = 6


def test_a_reader_of_no_format_gets_no_codes() -> None:
    class First(Coarse):
        reads = None

    layer = pipelines("{default: {retriever: first}}", retrievers={"first": First})[0]
    assert (layer.encoders, layer.coarse_codes) == ((), None)


def test_a_format_that_nobody_reads_is_not_encoded_unless_named() -> None:
    retrievers = {"half": type("Half", (Format, Rerank), {"format": "other", "block": 4})}
    layers = "{default: {retriever: half, coarse_select: pariskv}}"
    layer = pipelines(layers, retrievers=retrievers)[0]
    assert [encoder.name for encoder in layer.encoders] == ["pariskv"]
    layer = pipelines(layers.replace("half,", "half, encode: half,"), retrievers=retrievers)[0]
    assert [encoder.name for encoder in layer.encoders] == ["pariskv", "half"]


def test_the_block_is_the_least_common_multiple_of_what_is_encoded() -> None:
    retrievers = {"other": Other, "nine": type("Nine", (Format,), {"block": 9, "format": "nine"})}
    layer = pipelines("{default: {encode: [other, nine]}}", retrievers=retrievers)[0]
    assert layer.block == 18
    assert [encoder.block for encoder in layer.encoders] == [1, 6, 9]


def test_a_reader_prefers_its_own_codes_and_codes_from_overrules_it() -> None:
    layer = pipelines("{default: {encode: codes}}")[0]
    assert (layer.coarse_codes, layer.rerank_codes) == ("pariskv", "pariskv")
    layer = pipelines("{default: {codes_from: codes}}")[0]
    assert (layer.coarse_codes, layer.rerank_codes) == ("codes", "codes")
    assert [encoder.name for encoder in layer.encoders] == ["codes"]


def test_a_single_producer_of_the_layer_is_found() -> None:
    layer = pipelines("{default: {coarse_select: coarse, rerank: rerank, encode: codes, retriever: rerank}}")[0]
    assert (layer.coarse_codes, layer.rerank_codes) == ("codes", "codes")


def test_no_producer_is_refused_with_what_to_write() -> None:
    assert refusal(BindingError, "{2: {retriever: coarse, rerank: rerank}}") == (
        "layers.2: coarse_select of 'coarse' reads the format fmt, which no retriever of the layer makes; "
        "write `encode: codes` (made by: codes, pariskv)"
    )


def test_a_format_that_nothing_makes_is_refused() -> None:
    reader = type("Reader", (Coarse,), {"reads": "unheard"})
    assert refusal(BindingError, "{default: {coarse_select: r}}", retrievers={"r": reader}) == (
        "layers.default: coarse_select of 'r' reads the format unheard, which no retriever of the layer makes; "
        "no plugin here makes it"
    )


def test_several_producers_are_refused_with_what_to_write() -> None:
    assert refusal(BindingError, "{default: {coarse_select: coarse, encode: codes}}") == (
        "layers.default: coarse_select of 'coarse' reads the format fmt, which several retrievers of the layer make: "
        "'pariskv', 'codes'; write `codes_from: pariskv` or another"
    )
    layer = pipelines("{default: {coarse_select: coarse, encode: codes, codes_from: codes}}")[0]
    assert layer.coarse_codes == "codes"


def test_codes_from_must_make_what_is_read() -> None:
    assert refusal(BindingError, "{1: {codes_from: other}}", retrievers={"other": Other}) == (
        "layers.1.codes_from: 'other' makes other, which no stage here reads (coarse_select reads fmt, "
        "rerank reads fmt); name a producer of one of these"
    )


def test_an_inherited_codes_from_only_counts_where_it_fits() -> None:
    own = type("Own", (Full,), {"format": "own"})
    layers = pipelines("{default: {codes_from: codes}, 1: {retriever: own}}", retrievers={"own": own})
    assert (layers[0].coarse_codes, layers[1].coarse_codes) == ("codes", "own")


KNOWN = "coarse, codes, dense, pariskv, rerank, resident, torch"


@pytest.mark.parametrize(
    ("layers", "more", "message"),
    [
        (
            "{2: {retriever: parskv}}",
            "",
            f"layers.2.retriever: unknown retriever 'parskv' (did you mean 'pariskv'?); known: {KNOWN}",
        ),
        (
            "{default: {encode: [codes, zzz]}}",
            "",
            f"layers.default.encode: unknown retriever 'zzz'; known: {KNOWN}",
        ),
        ("{}", "store: uva", f"store: unknown retriever 'uva'; known: {KNOWN}"),
        ("{}", "runtime: {attend: numba}", f"runtime.attend: unknown retriever 'numba'; known: {KNOWN}"),
        (
            "{}",
            "retrievers: {mine: {type: corse}}",
            f"retrievers.mine: unknown retriever 'corse' (did you mean 'coarse'?); known: {KNOWN}",
        ),
        (
            "{0: {rerank: mien}}",
            "retrievers: {mine: {type: rerank}}",
            "layers.0.rerank: unknown retriever 'mien' (did you mean 'mine'?); known: coarse, codes, dense, mine, "
            "pariskv, rerank, resident, torch",
        ),
        ("{}", "retrievers: {coarse: {size: 3}}", "retrievers.coarse.size: unknown key; valid keys: none"),
        ("{3-4: {top_k: 3}}", "", "layers.3-4: the model has 4 layers, 0 to 3"),
        ("{9: {top_k: 3}}", "", "layers.9: the model has 4 layers, 0 to 3"),
    ],
)
def test_a_name_or_range_that_does_not_exist_is_refused(layers: str, more: str, message: str) -> None:
    assert refusal(ConfigError, layers, more) == message


def test_a_name_of_a_plugin_that_failed_to_import_raises_its_error() -> None:
    broken = ModuleType("broken")
    registry = registry_of()
    with importable(broken=broken) as names:
        registry.broken = Registry.load((*names, "no_such_plugin"), entry_points=False).broken
    with pytest.raises(PluginLoadError, match=r"^layers\.0\.rerank: unknown retriever 'no_such_plugin'") as caught:
        bind(config_of("{0: {rerank: no_such_plugin}}"), 2, registry)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    bind(config_of(), 2, registry)


@pytest.mark.parametrize(
    ("layers", "more", "message"),
    [
        (
            "{1: {rerank: coarse}}",
            "",
            "layers.1.rerank: retriever 'coarse' does not implement rerank; its stages: coarse_select",
        ),
        (
            "{default: {encode: coarse}}",
            "",
            "layers.default.encode: retriever 'coarse' does not implement encode; its stages: coarse_select",
        ),
        (
            "{default: {codes_from: dense}}",
            "",
            "layers.default.codes_from: retriever 'dense' does not implement encode; its stages: none",
        ),
        ("{}", "store: coarse", "store: retriever 'coarse' does not implement update; its stages: coarse_select"),
        (
            "{}",
            "runtime: {attend: coarse}",
            "runtime.attend: retriever 'coarse' does not implement attend; its stages: coarse_select",
        ),
        (
            "{default: {retriever: rerank}}",
            "",
            "layers.default: no retriever implements coarse_select (asked 'rerank'); name one that does: "
            "`coarse_select: NAME` or `retriever: NAME`",
        ),
        (
            "{0: {retriever: resident}, default: {retriever: dense}}",
            "",
            "layers.0: no retriever implements coarse_select (asked 'resident' and 'dense'); name one that does: "
            "`coarse_select: NAME` or `retriever: NAME`",
        ),
        (
            "{0-1: {retriever: dense, coarse_select: coarse}}",
            "",
            "layers.0-1.coarse_select: coarse would never run, because 'dense' keeps every token of the layer dense; "
            "remove the key or choose another `retriever:`",
        ),
    ],
)
def test_stages_that_do_not_fit_together_are_refused(layers: str, more: str, message: str) -> None:
    assert refusal(BindingError, layers, more) == message


def test_a_store_must_fetch_allocate_and_update() -> None:
    def lacking(stage: str) -> dict[str, Callable[..., object]]:
        return {"half": type("Half", (Memory,), {stage: None})}

    for stage in ("fetch", "allocate_store", "update"):
        message = refusal(BindingError, "{}", "store: half", retrievers=lacking(stage))
        assert message.startswith(f"store: retriever 'half' does not implement {stage}")


def test_a_retriever_that_indexes_nothing_cannot_give_a_single_stage() -> None:
    odd = {"odd": type("Odd", (Coarse,), {"indexes": "none"})}
    message = refusal(BindingError, "{default: {coarse_select: odd}}", retrievers=odd)
    assert message == "layers.default: 'odd' indexes nothing and cannot give single stages"


def test_a_forgotten_marker_is_pointed_out() -> None:
    class Unmarked(Coarse):
        def rerank(self, query, selection, codes, top_k):  # type: ignore[no-untyped-def]
            return selection

    assert refusal(BindingError, "{default: {rerank: u}}", retrievers={"u": Unmarked}) == (
        "layers.default.rerank: retriever 'u' does not implement rerank (its method rerank is not marked @hookimpl); "
        "its stages: coarse_select"
    )
