"""Checks of a format: allocate_codes, fit, is_stale, encode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from pariskv.errors import ShapeError
from pariskv.testing.case import Case, same_bits
from pariskv.testing.stores import filled
from pariskv.types import RECENT_QUERIES, Codes, Prefill, Store, Tensors

ROOM = 64
"""Blocks of room past the longest row, all poisoned."""

ALL_BLOCKS = 1 << 20


class NoRotation:
    """The rotary embedding of a model that has none: keys before it are the keys."""

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return keys

    unrotate = rotate


class PromptView(Prefill):
    """What `fit` sees of the case's prompt, with the retriever's own store where it brings one."""

    def __init__(self, case: Case) -> None:
        self.case, self.lengths = case, case.lengths
        layer, needs = case.layer, case.made.needs
        queries = torch.nn.functional.normalize(case.heads.double(), dim=-1)
        self.query_moment = queries.mT @ queries if "query_moment" in needs else None
        self.model_moment = (queries.mT @ queries).sum(0).float() if "model_moment" in needs else None
        recent = case.heads.unsqueeze(3).expand(-1, -1, -1, RECENT_QUERIES, layer.head_dim)
        self.recent_queries = recent if "recent_queries" in needs else None
        self.rotary = NoRotation() if "pre_rope" in needs else None
        self.store: Store | None = filled(case) if "allocate_store" in case.stages else None

    def blocks(self, row: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start, stop in split(self.lengths[row], 128 * self.case.made.block):
            yield self.case.keys[row, :, start:stop], self.case.values[row, :, start:stop]

    def dense(self, row: int) -> tuple[Tensor, Tensor]:
        return -self.case.keys[row, :, :8], self.case.values[row, :, :8]

    def pre_rope_blocks(self, row: int) -> Iterator[Tensor]:
        for keys, _ in self.blocks(row):
            yield keys


def split(tokens: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def check_fit(case: Case) -> Tensors:
    if "fit" not in case.source:
        return {}
    state: Tensors = case.call("fit", case.layer, PromptView(case))
    for name, tensor in state.items():
        if tensor.dim() == 0 or tensor.shape[0] != case.layer.batch:
            raise case.wrong(
                "fit", f"{name} is {list(tensor.shape)}; the first axis must be the {case.layer.batch} rows"
            )
    again = case.call("fit", case.layer, PromptView(case))
    if any(not same_bits(tensor, again[name]) for name, tensor in state.items()):
        raise case.wrong("fit", "gives another state for the same prompt; seed a torch.Generator of its own")
    return state


def check_stale(case: Case, state: Tensors) -> None:
    """`is_stale` gives a bool for each row, and the same for a row alone."""
    block = case.made.block
    rows = [row for row in case.rows if case.lengths[row] >= block]
    since = [case.lengths[row] for row in rows]  # as many tokens as it was fitted to
    keys = case.keys[rows, :, :block]
    stale = case.call("is_stale", keys, state_of(state, rows), list(since), since)
    if not isinstance(stale, list) or len(stale) != len(rows) or any(type(one) is not bool for one in stale):
        raise case.wrong("is_stale", f"returned {stale!r}; return a list of {len(rows)} bools, one for each row it got")
    alone = [
        case.call("is_stale", keys[[i]], state_of(state, [row]), [since[i]], [since[i]]) for i, row in enumerate(rows)
    ]
    if alone != [[one] for one in stale]:
        raise case.wrong("is_stale", "answers otherwise for a row alone than for the row in a batch")


def state_of(state: Tensors, rows: Sequence[int]) -> Tensors:
    return {name: tensor[list(rows)] for name, tensor in state.items()}


def codes_of(case: Case, state: Tensors, rows: Sequence[int], blocks_at_once: int) -> Codes:
    """The codes of some of the rows, each as if it was the whole batch, encoded some blocks at a time."""
    capacity = max(case.lengths) + ROOM * case.made.block
    lengths = torch.tensor([case.lengths[row] for row in rows], dtype=torch.int32, device=case.layer.device)
    if "encode" not in case.source:
        return Codes({}, {}, lengths, capacity)
    codes = case.call("allocate_codes", replace(case.layer, batch=len(rows)), capacity)
    if not isinstance(codes, Codes) or codes.capacity != capacity or codes.length.tolist() != [0] * len(rows):
        raise case.wrong("allocate_codes", "return Codes.empty(layer, capacity, name=CodeField(...))")
    for to, row in enumerate(rows):
        for start, stop in split(case.lengths[row], blocks_at_once * case.made.block):
            keys, values = case.keys[[row], :, start:stop], case.values[[row], :, start:stop]
            block = case.call("encode", keys, values, state_of(state, [row]))
            _append(case, codes, to, start, block, stop - start)
    codes.length.copy_(lengths)
    return codes


def _append(case: Case, codes: Codes, row: int, start: int, block: Tensors, tokens: int) -> None:
    try:
        codes.append([row], [start], block, tokens)
    except ShapeError as error:
        raise case.wrong("encode", str(error)) from error


def check_encode(case: Case, state: Tensors) -> None:
    """The same keys give the same bits, however they are cut into blocks and batched."""
    whole = codes_of(case, state, case.rows, ALL_BLOCKS)
    fewer = max(case.lengths) // case.made.block // 5 + 1
    for blocks_at_once, how in ((ALL_BLOCKS, "a second time"), (fewer, "in blocks of another size")):
        other = codes_of(case, state, case.rows, blocks_at_once)
        for name, row in ((name, row) for name in whole.spec for row in case.rows):
            if not same_bits(_valid(whole, name, row), _valid(other, name, row)):
                raise case.wrong("encode", f"{name} is not the same to the bit when the keys are encoded {how}")
    tokens = min(filter(None, case.lengths), default=0)
    keys, values = case.keys[:, :, :tokens], case.values[:, :, :tokens]
    together = case.call("encode", keys, values, state)
    for row in case.rows:
        alone = case.call("encode", keys[row : row + 1], values[row : row + 1], state_of(state, [row]))
        for name, tensor in together.items():
            if not same_bits(tensor[row : row + 1], alone[name]):
                raise case.wrong("encode", f"{name} of a row depends on the other rows of the batch")


def _valid(codes: Codes, name: str, row: int) -> Tensor:
    """The entries of one row that hold tokens."""
    field, tensor = codes.spec[name], codes[name][row]
    if field.reduce is not None:
        return tensor
    entries = ceil(int(codes.length[row]) / field.tokens_per_entry)
    return tensor.narrow(field.token_axis - 1, 0, entries)


def poison(codes: Codes) -> None:
    """Fill what holds no token with what must not get through: NaN, the largest integer."""
    for name, field in codes.spec.items():
        if field.reduce is None:
            tensor = codes[name]
            bad = float("nan") if tensor.is_floating_point() else _largest(tensor.dtype)
            for row in range(tensor.shape[0]):
                used = _valid(codes, name, row).shape[field.token_axis - 1]
                unused = tensor.shape[field.token_axis] - used
                tensor[row].narrow(field.token_axis - 1, used, unused).fill_(bad)


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max
