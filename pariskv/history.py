"""A prompt that is read over the store: what has moved into the zone is not kept on the device.

StreamedPrompt   holds the sink and what is not in the zone yet; a chunk's queries attend to that, then to the
                 zone block by block, and the parts are merged by log-sum-exp
ReadAhead        the zone's blocks in order, the next one on its way while the last one is attended to
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pariskv.attention import QUERY_BLOCK, merge, partial_attention, weaken_by_sinks
from pariskv.errors import ModelError
from pariskv.pairs import Pair
from pariskv.prompt import History, Prompt, without_the_rest
from pariskv.types import LayerInfo, Partial, Store

BLOCK = 16_384
"""Tokens of a row that are read from the store at a time; two blocks are on the device at most."""


class StreamedPrompt(Prompt):
    """What of one layer's prompt is on the device only; the zone is read from the store.

    held   a row each: keys and values [H, m, D] of the sink and of what follows the zone, without padding
    gone   a row each: tokens of the zone, which are in the store and not held
    """

    history: History = "store"

    def __init__(self, info: LayerInfo, sink: int):
        super().__init__(info)
        self.sink = sink
        nothing = torch.empty(info.kv_heads, 0, info.head_dim, dtype=info.dtype, device=info.device)
        self.held: list[Pair] = [(nothing, nothing)] * info.batch
        self.gone = [0] * info.batch
        self.store: Store | None = None
        self._chunk: Pair | None = None
        self._new = [0] * info.batch  # tokens of the newest chunk that are not padding

    def resume(self, columns: int, held: Sequence[Pair], zones: Sequence[int], store: Store | None) -> None:
        """Begin with `columns` columns of history: of each row what is held, and a zone in the store."""
        self.columns = columns
        self.held, self.gone, self.store = list(held), list(zones), store
        self.pads = [columns - self._count(row) for row in range(len(held))]

    def _count(self, row: int) -> int:
        return self.held[row][0].shape[1] + self.gone[row]

    def append(self, keys: Tensor, values: Tensor) -> Pair:
        """Add a chunk [B, H, Q, D], and return it: the model has nothing else to attend to."""
        assert self._chunk is None, "the chunk before has not been attended to"
        self.columns += keys.shape[2]
        self._chunk = keys, values
        return keys, values

    def note_mask(self, mask: Tensor | None) -> None:
        super().note_mask(mask)
        if mask is not None:
            refuse_unless_causal(mask, self.pads, self.columns)
        self._hold()

    def _hold(self) -> None:
        """Put the chunk's tokens behind what is held, now that its padding is known."""
        assert self._chunk is not None
        keys, values = self._chunk
        self._chunk = None
        self._new = [length - self._count(row) for row, length in enumerate(self.lengths)]
        for row, new in enumerate(self._new):
            self._refuse_other_padding(row, new, keys.shape[2])
            first = keys.shape[2] - new
            old_keys, old_values = self.held[row]
            self.held[row] = _joined(old_keys, keys[row, :, first:]), _joined(old_values, values[row, :, first:])

    def _refuse_other_padding(self, row: int, new: int, columns: int) -> None:
        if not 0 <= new <= columns:
            raise ModelError(
                f"attention_mask: row {row} held {self._count(row)} tokens, and with a chunk of {columns} columns the "
                f"mask speaks of {self.lengths[row]}; the padding of a row must stay as it was"
            )

    def attend(self, query: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        out = torch.zeros_like(query)  # what padding finds
        for row, new in enumerate(self._new):
            if new:
                first = query.shape[2] - new
                found = self._attend_row(row, query[row : row + 1, :, first:])
                if sinks is not None:
                    found = Partial(weaken_by_sinks(found.out, found.lse, sinks), found.lse)
                out[row, :, first:] = found.out[0]
        return out

    def _attend_row(self, row: int, query: Tensor) -> Partial:
        """Attention of one row's queries [1, H * G, q, D] to the tokens held, and to the zone before them."""
        blocks = ReadAhead(self.store, row, self.gone[row], self.info.device)
        scaling, softcap = self.info.scaling, self.info.softcap
        keys, values = (tensor.unsqueeze(0) for tensor in self.held[row])
        found = partial_attention(query, keys, values, scaling, softcap, is_causal=True)
        for keys, values in blocks:
            part = partial_attention(query, keys.unsqueeze(0), values.unsqueeze(0), scaling, softcap)
            found = Partial(*merge(found, part))
            del keys, values  # so that the block after the next can have their memory
        return found

    def read(self, row: int, start: int, stop: int) -> Pair:
        gone = self.gone[row] if start >= self.sink else 0
        keys, values = self.held[row]
        return keys[:, start - gone : stop - gone], values[:, start - gone : stop - gone]

    def leave(self, zones: Sequence[int], store: Store | None) -> None:
        self.store = store
        for row, zone in enumerate(zones):
            moved = zone - self.gone[row]
            keys, values = (self._without(tensor, moved) for tensor in self.held[row])
            self.held[row] = keys, values
            self.gone[row] = zone

    def _without(self, held: Tensor, moved: int) -> Tensor:
        """What is held [H, m, D] without the `moved` tokens after the sink, in memory of its own."""
        if not moved:
            return without_the_rest(held)
        return torch.cat((held[:, : self.sink], held[:, self.sink + moved :]), dim=1)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.held for tensor in pair)


def _joined(old: Tensor, new: Tensor) -> Tensor:
    """The tokens [H, n, D] one after the other; a first chunk is not copied."""
    return torch.cat((old, new), dim=1) if old.shape[1] else new


def refuse_unless_causal(mask: Tensor, pads: Sequence[int], columns: int) -> None:
    """Raise ModelError where the newest chunk's mask [B, 1, Q, n] is not that of causal attention with padding.

    The store's blocks are attended to without a mask. What queries of padding may see is of no interest.
    """
    num_queries, device = mask.shape[2], mask.device
    column = torch.arange(columns, device=device)
    first = torch.tensor(pads, device=device).view(-1, 1, 1)
    is_other = torch.zeros((), dtype=torch.bool, device=device)
    for start in range(0, num_queries, QUERY_BLOCK):
        rows = mask[:, 0, start : start + QUERY_BLOCK, :columns]
        allowed = rows if rows.dtype == torch.bool else rows == 0
        own = torch.arange(start, start + rows.shape[1], device=device).view(-1, 1) + columns - num_queries
        wanted = (column >= first) & (column <= own)
        is_other |= ((allowed != wanted) & (own >= first)).any()
    if is_other:
        raise ModelError(
            "attention_mask: wanted causal attention with padding on the left, got another mask, which a prompt that "
            "is read over the store cannot follow; set prefill.history=buffer"
        )


class _Block(NamedTuple):
    """A block of a row's zone on its way; `arrived` is None where nobody has to wait."""

    keys: Tensor
    values: Tensor
    arrived: torch.cuda.Event | None


class ReadAhead:
    """A row's zone in blocks of keys and values [H, n, D], in order, the next one read while one is in use.

    On a CUDA device the reads run on a stream of their own, elsewhere one after the other. The first read starts at
    once. To be iterated over once, and a block is in use until the next one is asked for: then its memory, once the
    device is done with it, is free for the block after that. So two blocks are enough, and the host never waits.
    """

    def __init__(self, store: Store | None, row: int, tokens: int, device: torch.device):
        self.store, self.row, self.tokens, self.device = store, row, tokens, device
        self._position = 0
        self._stream = _read_stream(device) if device.type == "cuda" and tokens else None
        self._meet()
        self._ahead = self._start()

    def __iter__(self) -> Iterator[Pair]:
        while self._ahead is not None:
            block = self._ahead
            if block.arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(block.arrived)
            self._ahead = self._start()
            yield block.keys, block.values
            self._meet()
            del block

    def _start(self) -> _Block | None:
        """Start reading the next block, None behind the last one."""
        start, self._position = self._position, min(self._position + BLOCK, self.tokens)
        if start == self.tokens:
            return None
        assert self.store is not None
        with torch.cuda.stream(self._stream):  # does nothing where there is none
            keys, values = self.store.read(self.row, start, self._position)
        return _Block(keys, values, None if self._stream is None else self._stream.record_event())

    def _meet(self) -> None:
        """Let the reads to come wait for what the device has been given so far: it may write or use their memory."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))


@lru_cache
def _read_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
