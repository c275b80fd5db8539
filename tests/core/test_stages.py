"""What a retriever implements and declares: every break of the contract is refused when it is bound."""

from __future__ import annotations

import pytest
import torch
from fakes import (
    HEADS,
    Full,
    Rerank,
    codes,
    pipelines,
    query,
    refusal,
)
from torch import Tensor

from pariskv.errors import PluginContractError
from pariskv.hookspecs import Retriever, hookimpl
from pariskv.types import Codes, LayerInfo, Query, Selection, Tensors


class WithDefault(Retriever):
    @hookimpl
    def rerank(self, query, selection, codes, top_k=3):  # type: ignore[no-untyped-def]
        return selection


class KeywordOnly(Retriever):
    @hookimpl
    def rerank(self, query, selection, codes, *, top_k):  # type: ignore[no-untyped-def]
        return selection


class Arguments(Retriever):
    @hookimpl
    def rerank(self, query, *rest):  # type: ignore[no-untyped-def]
        return query


class Keywords(Retriever):
    @hookimpl
    def rerank(self, query, selection, codes, top_k, **more):  # type: ignore[no-untyped-def]
        return selection


class Renamed(Retriever):
    @hookimpl
    def rerank(self, query, selection, codes, k):  # type: ignore[no-untyped-def]
        return selection


class Reordered(Retriever):
    @hookimpl
    def rerank(self, selection, query, codes, top_k):  # type: ignore[no-untyped-def]
        return selection


class Fewer(Retriever):
    @hookimpl
    def rerank(self, query, selection):  # type: ignore[no-untyped-def]
        return selection


class Twice(Rerank):
    @hookimpl(specname="rerank")
    def again(self, query, selection, codes, top_k):  # type: ignore[no-untyped-def]
        return selection


class NoStage(Retriever):
    @hookimpl
    def rernk(self, query, selection, codes, top_k):  # type: ignore[no-untyped-def]
        return selection


class Wrapping(Retriever):
    @hookimpl(wrapper=True)
    def rerank(self, query):  # type: ignore[no-untyped-def]
        return (yield)


class OnlyEncode(Rerank):
    format = "half"

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {}


class OnlyFit(Rerank):
    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        return {}


class StaleWithoutFit(OnlyEncode):
    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity)

    @hookimpl
    def is_stale(self, keys: Tensor, state: Tensors, fitted: list[int], since: list[int]) -> list[bool]:
        return [False] * len(since)


WANTED = "wanted exactly (query, selection, codes, top_k)"


@pytest.mark.parametrize(
    ("retriever", "message"),
    [
        (WithDefault, f"rerank(query, selection, codes, top_k=3) gives top_k a default; {WANTED}"),
        (KeywordOnly, f"rerank(query, selection, codes, top_k) takes top_k by keyword only; {WANTED}"),
        (Arguments, f"rerank(query, *rest) takes *rest; {WANTED}"),
        (Keywords, f"rerank(query, selection, codes, top_k, **more) takes **more; {WANTED}"),
        (Renamed, f"rerank(query, selection, codes, k) has other arguments than the contract; {WANTED}"),
        (Reordered, f"rerank(selection, query, codes, top_k) has other arguments than the contract; {WANTED}"),
        (Fewer, f"rerank(query, selection) has other arguments than the contract; {WANTED}"),
        (Twice, "again and rerank both implement rerank; keep one"),
        (
            NoStage,
            "rernk is marked @hookimpl, but 'rernk' is no stage (did you mean 'rerank'?); stages: allocate_codes, fit, "
            "is_stale, encode, encode_query, coarse_select, rerank, allocate_store, fetch, update, attend, append",
        ),
        (Wrapping, "rerank is a hook wrapper; offer it with `register.wrapper(...)`"),
        (OnlyEncode, "implements encode without allocate_codes; a format needs both"),
        (OnlyFit, "implements encode_query without encode; a format needs both"),
        (StaleWithoutFit, "implements is_stale without fit; there is no state that could be stale"),
        (type("A", (Full,), {"format": None}), "implements encode, but its `format` is None; name the format"),
        (type("A", (Full,), {"format": 3}), "format is 3, wanted None or a name"),
        (type("A", (Rerank,), {"reads": ""}), "reads is '', wanted None or a name"),
        (type("A", (Rerank,), {"block": 0}), "block is 0, wanted an integer >= 1"),
        (type("A", (Rerank,), {"block": True}), "block is True, wanted an integer >= 1"),
        (type("A", (Rerank,), {"indexes": "some"}), "indexes is 'some', wanted 'all', 'prompt' or 'none'"),
        (
            type("A", (Rerank,), {"needs": ["keys"]}),
            "needs is ['keys'], wanted a frozenset of query_moment, model_moment, recent_queries, pre_rope",
        ),
        (
            type("A", (Rerank,), {"needs": frozenset({"keys"})}),
            "needs is frozenset({'keys'}), wanted a frozenset of query_moment, model_moment, recent_queries, pre_rope",
        ),
        (type("A", (Rerank,), {"graph_safe": 1}), "graph_safe is 1, wanted a bool"),
        (type("A", (Rerank,), {"selects_per_query_head": None}), "selects_per_query_head is None, wanted a bool"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value[:40],
)
def test_a_retriever_that_breaks_the_contract_is_refused(retriever: type, message: str) -> None:
    config = "retrievers: {r: {type: t}}"
    text = refusal(PluginContractError, "{default: {rerank: r}}", config, retrievers={"t": retriever})
    assert text.startswith("retriever 'r' (type t from distribution pariskv ")
    assert text.partition("): ")[2] == message


def test_a_retriever_need_not_inherit_from_ours() -> None:
    class Stranger:
        @staticmethod
        @hookimpl
        def rerank(query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
            return selection

    class Decorated:
        @hookimpl
        @torch.no_grad()
        def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
            return selection

    for retriever in (Stranger, Decorated):
        layer = pipelines("{default: {rerank: s}}", retrievers={"s": retriever})[0]
        assert layer.rerank is not None
        selection = Selection(HEADS)
        assert layer.rerank(query(), selection, codes(), 2) is selection
