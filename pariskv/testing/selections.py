"""Checks of what a step selects: encode_query, coarse_select, rerank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pariskv.testing.case import Case, same_bits
from pariskv.testing.formats import ALL_BLOCKS, codes_of, poison, state_of
from pariskv.types import Budget, Codes, Query, Selection, Tensors

SELECTING = {"coarse_select", "rerank"}


def check_selection(case: Case, state: Tensors) -> None:
    codes = codes_of(case, state, case.rows, ALL_BLOCKS)
    poison(codes)
    query = _query(case, state, case.rows)
    selection = None
    if "coarse_select" in case.stages:
        selection = _checked(case, "coarse_select", (query, codes, _budget(case, case.rows)), case.lengths)
        for row in case.rows:
            arguments = (_query(case, state, [row]), _row_codes(case, state, row), _budget(case, [row], case.rows))
            _check_row(case, "coarse_select", selection, row, case.call("coarse_select", *arguments))
    if "rerank" not in case.stages:
        return
    for candidates in filter(None, (_scattered(case), selection)):
        final = _checked(case, "rerank", (query, candidates, codes, case.top_k), case.lengths)
        _check_subset(case, candidates, final)
        for row in case.rows:
            alone = (_query(case, state, [row]), _row_of(candidates, row), _row_codes(case, state, row), case.top_k)
            _check_row(case, "rerank", final, row, case.call("rerank", *alone))


def _query(case: Case, state: Tensors, rows: Sequence[int]) -> Query:
    heads = case.heads[list(rows)]
    encoded = None
    if "encode_query" in case.source:
        encoded = case.call("encode_query", heads, state_of(state, rows))
        for name, tensor in encoded.items():
            if tensor.dim() == 0 or tensor.shape[0] != len(rows):
                raise case.wrong("encode_query", f"{name} is {list(tensor.shape)}; the first axis must be the rows")
        again = case.call_again("encode_query", heads, state_of(state, rows))
        if any(not same_bits(tensor, again[name]) for name, tensor in encoded.items()):
            raise case.wrong("encode_query", "gives something else for the same queries; seed its own torch.Generator")
    return Query(heads, encoded, case.layer.scaling, case.layer.softcap, steady_of(case, heads))


def steady_of(case: Case, heads: Tensor) -> Tensor | None:
    """A log-sum-exp for each head where one is wanted; large or small, so that some heads look elsewhere."""
    return heads.float().sum(-1) if case.traits.reads_steady else None


def _budget(case: Case, rows: Sequence[int], of: Sequence[int] | None = None) -> Budget:
    """Half of each row's tokens but at least top_k; the width is that of the longest of the rows `of`."""
    counts = {row: min(case.lengths[row], max(case.lengths[row] // 2, case.top_k)) for row in of or rows}
    width = max(*counts.values(), case.top_k) + 3
    count = torch.tensor([counts[row] for row in rows], dtype=torch.int32, device=case.layer.device)
    return Budget(width, count)


def _row_codes(case: Case, state: Tensors, row: int) -> Codes:
    codes = codes_of(case, state, [row], ALL_BLOCKS)
    poison(codes)
    return codes


def _scattered(case: Case) -> Selection:
    """Candidates in descending order with empty slots between them, for a rerank alone."""
    layer = case.layer
    indices = torch.full((layer.batch, layer.kv_heads, max(case.lengths) + 5), -1, dtype=torch.int32)
    for row in case.rows:
        tokens = torch.arange(case.lengths[row] - 1, -1, -3, dtype=torch.int32)
        indices[row, :, 1 : 2 * len(tokens) : 2] = tokens[: indices.shape[-1] // 2]
    return Selection(indices.to(layer.device))


def _checked(case: Case, stage: str, arguments: tuple[Any, ...], lengths: list[int]) -> Selection:
    """A stage's selection, once it is well formed and the same when asked again."""
    selection: Selection = case.call(stage, *arguments)
    if not isinstance(selection, Selection):
        raise case.wrong(stage, f"returned a {type(selection).__name__}, wanted a Selection; return Selection(indices)")
    again: Selection = case.call_again(stage, *arguments)
    _check_form(case, stage, selection, arguments[-1])
    if not same_bits(selection.indices, again.indices):
        raise case.wrong(stage, "gives another selection for the same query; seed a torch.Generator of its own")
    for row, head in ((row, head) for row in case.rows for head in range(case.layer.kv_heads)):
        chosen = [index for index in selection.indices[row, head].tolist() if index != -1]
        bad = [index for index in chosen if not 0 <= index < lengths[row]]
        if bad:
            raise case.wrong(
                stage, f"row {row} has {lengths[row]} tokens, but index {bad[0]} was chosen; read codes.length"
            )
        if len(set(chosen)) < len(chosen):
            raise case.wrong(stage, f"row {row} has a token twice; every position may be chosen once")
        if stage == "coarse_select" and not case.traits.selects_per_query_head:
            count = int(arguments[-1].count[row])
            if len(chosen) > count or (count and not chosen and not selects_nothing(selection)):
                raise case.wrong(stage, f"row {row} has {len(chosen)} candidates; use budget.count, which says {count}")
    return selection


def _check_form(case: Case, stage: str, selection: Selection, size: Budget | int) -> None:
    """Shapes and dtypes of a selection."""
    layer, indices = case.layer, selection.indices
    width = size if isinstance(size, int) else size.width
    width *= layer.group if case.traits.selects_per_query_head else 1
    if selects_nothing(selection):
        width = 0
    wanted = (layer.batch, layer.kv_heads, width)
    if tuple(indices.shape) != wanted or indices.dtype != torch.int32:
        raise case.wrong(
            stage, f"indices are {list(indices.shape)} {indices.dtype}, wanted {list(wanted)} int32, -1 where empty"
        )
    per_head = (layer.batch, layer.kv_heads, layer.group)
    extra, partial = selection.extra, selection.partial
    shapes: list[tuple[str, Tensor | None, tuple[int, ...]]] = [("bias", selection.bias, (*per_head, width))]
    if extra is not None:
        rows = (*wanted[:2], extra.keys.shape[2], layer.head_dim)
        shapes += [("extra.keys", extra.keys, rows), ("extra.values", extra.values, rows)]
        shapes += [("extra.bias", extra.bias, (*per_head, rows[2]))]
    if partial is not None:
        shapes += [("partial.out", partial.out, (*per_head, layer.head_dim)), ("partial.lse", partial.lse, per_head)]
    for name, tensor, shape in shapes:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise case.wrong(stage, f"{name} is {list(tensor.shape)}, wanted {list(shape)}")
        if tensor is not None and bool(tensor.isnan().any()):
            raise case.wrong(stage, f"{name} has NaN; unused entries of the codes hold anything, mask them with where")


def selects_nothing(selection: Selection) -> bool:
    """A selection without a single slot says so openly; one of empty slots has lost its tokens."""
    return selection.indices.dim() == 3 and selection.indices.shape[-1] == 0


def _check_subset(case: Case, candidates: Selection, final: Selection) -> None:
    if selects_nothing(final):
        return
    for row, head in ((row, head) for row in case.rows for head in range(case.layer.kv_heads)):
        offered = _tokens(candidates, row, head)
        chosen = _tokens(final, row, head)
        if not chosen <= offered:
            raise case.wrong("rerank", f"row {row}: token {min(chosen - offered)} was not among the candidates")
        least = min(len(offered), case.top_k)
        is_short = len(chosen) < least and not case.traits.adapts_top_k
        if is_short or (len(chosen) > least and not case.traits.selects_per_query_head):
            raise case.wrong("rerank", f"row {row}: {len(chosen)} of {len(offered)} candidates chosen, wanted {least}")


def _check_row(case: Case, stage: str, selection: Selection, row: int, alone: Selection) -> None:
    """A row chooses in a batch what it chooses alone; two tokens with nearly the same score may change places."""
    for head in range(case.layer.kv_heads):
        together, single = _tokens(selection, row, head), _tokens(alone, 0, head)
        if max(len(together - single), len(single - together)) > max(1, len(together) // 50):
            raise case.wrong(
                stage, f"row {row} of the batch chooses other tokens than alone; use its own length and count"
            )


def _tokens(selection: Selection, row: int, head: int) -> set[int]:
    return set(selection.indices[row, head].tolist()) - {-1}


def _row_of(selection: Selection, row: int) -> Selection:
    bias = None if selection.bias is None else selection.bias[row : row + 1]
    return Selection(selection.indices[row : row + 1], bias)


def check_recall(case: Case, state: Tensors, floor: float) -> None:
    """Of the rows with more than top_k tokens; of the others everything can be chosen."""
    scores = case.heads.float() @ case.keys.float().mT * case.layer.scaling  # [B, H, G, N]
    steady, selection = steady_of(case, case.heads), _final(case, state)
    rows = [row for row in case.rows if case.lengths[row] > case.top_k]
    if not rows:
        raise ValueError(f"recall_floor: wanted a row with more tokens than top_k={case.top_k}, got {case.lengths}")
    found = wanted = 0
    for row, head in ((row, head) for row in rows for head in range(case.layer.kv_heads)):
        mass = scores[row, head, :, : case.lengths[row]]
        if steady is not None:
            mass = torch.cat((mass, steady[row, head].unsqueeze(-1)), dim=-1)
        mass = mass.softmax(-1).sum(0)[: case.lengths[row]]
        found += len(set(mass.topk(case.top_k).indices.tolist()) & _tokens(selection, row, head))
        wanted += case.top_k
    if found < floor * wanted:
        stage = "rerank" if "rerank" in case.stages else "coarse_select"
        chance = sum(case.top_k / case.lengths[row] for row in rows) / len(rows)
        raise case.wrong(
            stage,
            f"recall at {case.top_k} is {found / wanted:.3f}, wanted {floor} or more (tokens at random: {chance:.3f})",
        )


def _final(case: Case, state: Tensors) -> Selection:
    """The top_k of the batch: half of each row's tokens reranked, or chosen by coarse_select alone, as in a run."""
    codes = codes_of(case, state, case.rows, ALL_BLOCKS)
    poison(codes)
    query, reranks = _query(case, state, case.rows), "rerank" in case.stages
    selection = _scattered(case)
    if "coarse_select" in case.stages:
        budget = _budget(case, case.rows)
        alone = Budget(case.top_k, budget.count.clamp(max=case.top_k))
        selection = case.call("coarse_select", query, codes, budget if reranks else alone)
    return case.call("rerank", query, selection, codes, case.top_k) if reranks else selection
