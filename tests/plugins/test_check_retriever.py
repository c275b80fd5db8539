"""`check_retriever` finds what is wrong with codes and selections, and says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pariskv_plugins.exact import Exact
from pariskv_plugins.paris import ParisPaper
from pariskv_plugins.resident import Resident
from torch import Tensor

from pariskv.errors import PluginContractError
from pariskv.hookspecs import Retriever, hookimpl
from pariskv.testing import check_retriever
from pariskv.types import (
    TOKENS,
    Budget,
    CodeField,
    Codes,
    LayerInfo,
    Prefill,
    Query,
    Selection,
    Tensors,
)


def refused(retriever: object, message: str, **options: Any) -> None:
    with pytest.raises(PluginContractError, match=message):
        check_retriever(retriever, lengths=(90, 16, 0), **options)


class Pages(Retriever):
    """A page's mean stands for its 4 tokens: a format with blocks, a fit and a summed field."""

    format = "pages"
    block = 4
    needs = frozenset({"query_moment", "recent_queries", "pre_rope"})

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        means = CodeField((TOKENS, layer.head_dim), torch.float32, tokens_per_entry=4)
        return Codes.empty(layer, capacity, means=means, pages=CodeField((1,), torch.int64, reduce="sum"))

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        assert prefill.query_moment is not None
        assert prefill.recent_queries is not None
        centre = torch.zeros(layer.batch, layer.kv_heads, layer.head_dim, dtype=torch.float64)
        for row in range(layer.batch):
            for keys, _ in prefill.blocks(row):
                centre[row] += keys.double().sum(1)
            assert sum(keys.shape[1] for keys in prefill.pre_rope_blocks(row)) == prefill.lengths[row]
        return {"centre": centre.float()}

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        rows, heads, tokens, dim = keys.shape
        first, second, third, fourth = keys.float().reshape(rows, heads, tokens // 4, 4, dim).unbind(3)
        means = (first + second + third + fourth) / 4 - state["centre"].unsqueeze(2) * 1e-3
        return {"means": means, "pages": torch.full((rows, heads, 1), tokens // 4)}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        scores = (query.heads.float().mean(2, keepdim=True) @ codes["means"].mT).repeat_interleave(4, -1).squeeze(2)
        return top(scores, codes.length, budget)


def top(scores: Tensor, length: Tensor, budget: Budget) -> Selection:
    """The best `budget.count` positions by scores [B, H, N]."""
    tokens = torch.arange(scores.shape[-1]) < length.view(-1, 1, 1)
    order = torch.where(tokens, scores, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    used = torch.arange(budget.width) < budget.count.view(-1, 1, 1)
    return Selection(torch.where(used, order[..., : budget.width], -1).int())


def test_what_keeps_the_contract_passes() -> None:
    check_retriever(Pages())
    check_retriever(Pages(), dtype=torch.bfloat16, head_dim=96, lengths=(5, 700))
    check_retriever(ParisPaper(), recall_floor=0.5)
    check_retriever(Resident())


def test_a_stage_that_reads_anothers_codes_is_given_their_producer() -> None:
    class Reader(Retriever):
        reads = "keys"
        selects_per_query_head = False

        @hookimpl
        def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
            return Exact().rerank(query, selection, codes, top_k)

    check_retriever(Reader(), producer=Exact())
    refused(Reader(), "reads 'keys'; pass the retriever that makes it as `producer`")


def test_a_floor_that_is_not_reached_is_reported_with_the_recall() -> None:
    refused(Pages(), r"Pages.coarse_select: recall at 32 is 0\.\d+, wanted 0.99 or more", recall_floor=0.99)


def test_half_of_the_tokens_are_not_what_a_run_selects_without_a_rerank() -> None:
    """Half of the zone would hold half of the best, whatever was chosen."""

    class First(Pages):
        @hookimpl
        def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
            return top(torch.zeros_like(codes["means"][..., 0]).repeat_interleave(4, -1), codes.length, budget)

    refused(First(), r"recall at 32 is 0\.\d+, wanted 0.7 or more \(tokens at random: 0.348\)", recall_floor=0.7)
    with pytest.raises(ValueError, match="wanted a row with more tokens than top_k=32"):
        check_retriever(Pages(), lengths=(32, 16), recall_floor=0.2)


def test_what_is_no_retriever_is_refused() -> None:
    class Unmarked:
        def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
            raise AssertionError

    refused(Unmarked(), "Unmarked: coarse_select would never be called; mark it with @hookimpl")
    refused(object(), "object: implements no stage")
    with pytest.raises(TypeError, match=r"got the class; pass Pages\(\)"):
        check_retriever(Pages)


def test_a_tensor_is_no_selection() -> None:
    class Bare(Pages):
        @hookimpl
        def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Any:
            return super().coarse_select(query, codes, budget).indices

    refused(Bare(), r"Bare.coarse_select: returned a Tensor, wanted a Selection; return Selection\(indices\)")


def test_lengths_without_tokens_check_nothing_and_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row with tokens"):
        check_retriever(Pages(), lengths=(0, 0))


# Broken formats


class BrokenEncode(Pages):
    """Encodes as `change` says."""

    def __init__(self, change: Callable[[Tensor, dict[str, Tensor]], object]) -> None:
        self.change = change

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        block = dict(super().encode(keys, values, state))
        self.change(keys, block)
        return block


BROKEN_ENCODE = {
    "the mean of the block": (
        lambda keys, block: block.update(means=block["means"] - keys.float().mean((0, 1, 2))),
        "means is not the same to the bit when the keys are encoded in blocks of another size",
    ),
    "the other rows": (
        lambda keys, block: block.update(
            means=block["means"] - block["means"][:, :, :1].sum((0, 1), keepdim=True) * (len(keys) > 1)
        ),
        "means of a row depends on the other rows of the batch",
    ),
    "random": (
        lambda keys, block: block.update(means=block["means"] + torch.rand(())),
        "means is not the same to the bit when the keys are encoded a second time",
    ),
    "a wrong dtype": (lambda keys, block: block.update(means=block["means"].double()), "means as .*float64, wanted"),
    "a missing field": (lambda keys, block: block.pop("pages"), r"returned the fields \['means'\], but"),
    "its input": (lambda keys, block: keys.add_(1), "BrokenEncode.encode: changes its input; work on a copy"),
    "an exception": (lambda keys, block: block["none"], "BrokenEncode.encode: raised KeyError: 'none'"),
}


@pytest.mark.parametrize("name", BROKEN_ENCODE)
def test_a_broken_encode_is_found(name: str) -> None:
    change, message = BROKEN_ENCODE[name]
    refused(BrokenEncode(change), message)


def test_codes_without_their_capacity_are_found() -> None:
    class Small(Pages):
        @hookimpl
        def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
            return super().allocate_codes(layer, capacity // 2)

    refused(Small(), r"Small.allocate_codes: return Codes.empty\(layer, capacity")


def test_a_fit_that_depends_on_chance_or_has_no_rows_is_found() -> None:
    class Chance(Pages):
        @hookimpl
        def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
            return {"centre": torch.rand(layer.batch, layer.kv_heads, layer.head_dim)}

    class NoRows(Pages):
        @hookimpl
        def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
            return {"centre": torch.zeros(layer.kv_heads, layer.head_dim)}

    refused(Chance(), "Chance.fit: gives another state for the same prompt")
    refused(NoRows(), r"NoRows.fit: centre is \[2, 64\]; the first axis must be the 3 rows")


# Broken selections


class Stale(Pages):
    """Answers `is_stale` as it is told."""

    def __init__(self, answer: Callable[[Tensor, list[int]], Any]) -> None:
        self.answer = answer

    @hookimpl
    def is_stale(self, keys: Tensor, state: Tensors, fitted: list[int], since: list[int]) -> list[bool]:
        assert state["centre"].shape[0] == len(fitted) == len(since) == keys.shape[0]
        return self.answer(keys, since)  # type: ignore[no-any-return]


def test_a_wrong_is_stale_is_found() -> None:
    check_retriever(Stale(lambda keys, since: [tokens > 50 for tokens in since]))
    refused(Stale(lambda keys, since: True), "Stale.is_stale: returned True; return a list of 2 bools")
    refused(Stale(lambda keys, since: [True]), "is_stale: returned .True.; return a list of 2 bools")
    refused(Stale(lambda keys, since: [torch.tensor(True)] * len(since)), "return a list of 2 bools")
    refused(Stale(lambda keys, since: [len(since) > 1] * len(since)), "answers otherwise for a row alone")


class BrokenSelect(Pages):
    """Selects as `change` says."""

    def __init__(self, change: Callable[[Selection, Codes, Budget], Selection]) -> None:
        self.change = change

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        return self.change(super().coarse_select(query, codes, budget), codes, budget)


def indices(selection: Selection, change: Callable[[Tensor], Tensor]) -> Selection:
    return replace(selection, indices=change(selection.indices))


def repeated(given: Tensor) -> Tensor:
    given[..., 1] = given[..., 0]
    return given


def by_batch(codes: Codes, budget: Budget) -> Selection:
    """Takes the longest row's last tokens: wrong for a shorter row that is not alone."""
    newest = torch.arange(codes.capacity).expand(len(codes.length), 2, -1).float()
    away = (newest - codes.length.max() // 3).abs()
    return top(-away, codes.length, budget)


BROKEN_SELECT = {
    "int64": (
        lambda s, c, b: indices(s, Tensor.long),
        r"indices are \[3, 2, 49\] torch.int64, wanted \[3, 2, 49\] int32",
    ),
    "another width": (lambda s, c, b: indices(s, lambda i: i[..., 1:]), r"indices are \[3, 2, 48\]"),
    "beyond the length": (
        lambda s, c, b: indices(s, lambda i: torch.where(i < 0, 92, i).int()),
        "row 0 has 92 tokens, but index 92 was chosen",
    ),
    "a token twice": (lambda s, c, b: indices(s, repeated), "row 0 has a token twice"),
    "more than the count": (
        lambda s, c, b: top(torch.zeros(len(c.length), 2, c.capacity), c.length, Budget(b.width, b.count + 1)),
        "row 0 has 47 candidates; use budget.count, which says 46",
    ),
    "nothing": (lambda s, c, b: indices(s, lambda i: torch.full_like(i, -1)), "row 0 has 0 candidates"),
    "random": (
        lambda s, c, b: top(torch.rand(len(c.length), 2, c.capacity), c.length, b),
        "gives another selection for the same query",
    ),
    "a NaN bias": (
        lambda s, c, b: replace(s, bias=torch.full((len(c.length), 2, 3, b.width), float("nan"))),
        "bias has NaN; unused entries of the codes hold anything, mask them with where",
    ),
    "a bias of another shape": (lambda s, c, b: replace(s, bias=torch.zeros(3, 2, b.width)), "bias is .*, wanted"),
    "the longest row's length": (lambda s, c, b: by_batch(c, b), "row 1 of the batch chooses other tokens than alone"),
    "changed codes": (lambda s, c, b: (c["means"].zero_(), s)[1], "changes its input"),
}


@pytest.mark.parametrize("name", BROKEN_SELECT)
def test_a_broken_coarse_select_is_found(name: str) -> None:
    change, message = BROKEN_SELECT[name]
    refused(BrokenSelect(change), f"BrokenSelect.coarse_select: {message}", top_k=10)


def test_unused_codes_that_get_through_are_found() -> None:
    class Unmasked(Pages):
        @hookimpl
        def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
            scores = (query.heads.mean(2, keepdim=True) @ codes["means"].mT).repeat_interleave(4, -1).squeeze(2)
            return Selection(scores.topk(budget.width).indices.int())

    refused(Unmasked(), r"row 0 has 92 tokens, but index \d+ was chosen; read codes.length")


class BrokenRerank(Exact):
    def __init__(self, change: Callable[[Selection, int], Selection]) -> None:
        super().__init__()
        self.change = change

    @hookimpl
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        return self.change(super().rerank(query, selection, codes, top_k), top_k)


BROKEN_RERANK = {
    "a token that was not offered": (
        lambda s, k: indices(s, lambda i: torch.where(i > 1, i - 1, i).int()),
        "was not among the candidates",
    ),
    "fewer than there are": (
        lambda s, k: indices(s, lambda i: torch.cat((i[..., 1:], i[..., :1] * 0 - 1), -1)),
        r"row 0: 9 of \d+ candidates chosen, wanted 10",
    ),
    "only as many as the shortest row has": (lambda s, k: indices(s, lambda i: i[..., :6]), r"indices are \[3, 2, 6\]"),
}


@pytest.mark.parametrize("name", BROKEN_RERANK)
def test_a_broken_rerank_is_found(name: str) -> None:
    change, message = BROKEN_RERANK[name]
    refused(BrokenRerank(change), message, top_k=10)


def test_a_wrong_encode_query_is_found() -> None:
    class NoRows(ParisPaper):
        @hookimpl
        def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
            return {"rotated": torch.zeros(64)}

    refused(NoRows(), r"NoRows.encode_query: rotated is \[64\]; the first axis must be the rows")
