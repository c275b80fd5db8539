"""A layer's keys and values while a prompt (or a later turn) is read, and what `fit` sees of them.

Prompt           what a chunk needs of the layer: the base of the two ways to read a prompt
BufferedPrompt   everything so far stays in a buffer on the device until the prefill ends
                 (the other way, from the store: `pariskv.history.StreamedPrompt`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pariskv.attention import dense_attention
from pariskv.errors import BindingError, ModelError
from pariskv.pairs import Pair
from pariskv.types import RECENT_QUERIES, LayerInfo, Prefill, Rotary, Store
from pariskv.window import Window

History = Literal["buffer", "store"]
"""Where a prompt's earlier chunks are while it is read: all in a buffer on the device, or in the store."""

TOKENS_AT_ONCE = 4096
"""Tokens of a row that `fit` sees in a block, about: whole updates, counted from the zone's first token."""


class Prompt(ABC):
    """One layer's prompt while it is read, in the model's columns: each row right-aligned, padding on the left.

    Lives from the first chunk to the end of the prefill; `pads[b]` columns of row b are padding. A chunk
    comes in three calls: `append`, `note_mask`, and `leave` once its blocks have moved into the zone.
    """

    history: History

    def __init__(self, info: LayerInfo):
        self.info = info
        self.columns = 0
        self.pads = [0] * info.batch

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return [self.columns - pad for pad in self.pads]

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> Pair:
        """Add a chunk [B, H, Q, D]; returns what there is of the prompt in the model's columns [B, H, n, D]."""

    @abstractmethod
    def attend(self, query: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """Causal attention of the newest chunk's queries [B, H * G, Q, D] to everything so far, of the same shape."""

    @abstractmethod
    def read(self, row: int, start: int, stop: int) -> Pair:
        """Keys and values [H, n, D] of one row at the positions start .. stop - 1, none of them left."""

    @abstractmethod
    def leave(self, zones: Sequence[int], store: Store | None) -> None:
        """Learn that the first `zones[b]` tokens after the sink of row b are in the store."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of keys and values held on the device."""

    def note_mask(self, mask: Tensor | None) -> None:
        """Learn the padding from the attention mask [B, 1, Q, n] of the newest chunk (bool, True: attend).

        Raises ModelError where a row is padded anywhere but on the left.
        """
        if mask is None:
            return
        last = mask[:, 0, -1, : self.columns] if mask.dtype == torch.bool else mask[:, 0, -1, : self.columns] >= 0
        last = last.expand(len(self.pads), -1)
        pads = (~last).sum(dim=-1)
        expected = torch.arange(self.columns, device=last.device) >= pads.unsqueeze(-1)
        if not torch.equal(last, expected):
            raise ModelError(
                "attention_mask: wanted padding on the left of each row only, got it elsewhere; "
                "set tokenizer.padding_side = 'left', or pass the rows apart"
            )
        self.pads = [int(pad) for pad in pads.tolist()]


class BufferedPrompt(Prompt):
    """Everything so far of one layer on the device.

    A prompt of one chunk is kept as it came; more chunks are copied into one buffer of `expected` columns.
    """

    history: History = "buffer"

    def __init__(self, info: LayerInfo, expected: int):
        super().__init__(info)
        self.expected = expected
        self.keys = torch.empty(info.batch, info.kv_heads, 0, info.head_dim, dtype=info.dtype, device=info.device)
        self.values = self.keys

    def resume(self, columns: int, lengths: Sequence[int], history: Callable[[int], Iterable[Pair]]) -> None:
        """Begin with `columns` columns of history; history(row): keys and values [H, n, D], piece by piece."""
        self.columns = columns
        self.pads = [columns - length for length in lengths]
        self.reserve(self.expected, held=0)
        for row, pad in enumerate(self.pads):
            self.keys[row, :, :pad] = 0
            self.values[row, :, :pad] = 0
            column = pad
            for keys, values in history(row):
                stop = column + keys.shape[1]
                self.keys[row, :, column:stop] = keys
                self.values[row, :, column:stop] = values
                column = stop

    def append(self, keys: Tensor, values: Tensor) -> Pair:
        start, self.columns = self.columns, self.columns + keys.shape[2]
        if start == 0 and self.columns >= self.expected:
            self.keys, self.values = without_the_rest(keys), without_the_rest(values)
            return self.keys, self.values
        if self.columns > self.keys.shape[2]:
            self.reserve(max(self.columns, self.expected, start * 3 // 2), held=start)
        self.keys[:, :, start : self.columns] = keys
        self.values[:, :, start : self.columns] = values
        return self.so_far

    @property
    def so_far(self) -> Pair:
        """Keys and values [B, H, n, D] of all columns."""
        return self.keys[:, :, : self.columns], self.values[:, :, : self.columns]

    def reserve(self, columns: int, held: int) -> None:
        """A buffer of `columns` columns, with the `held` ones there are in front."""
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_empty((*old.shape[:2], columns, old.shape[3]))
            new[:, :, :held] = old[:, :, :held]
            setattr(self, name, new)

    def attend(self, query: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        return dense_attention(query, *self.so_far, mask, self.info.scaling, self.info.softcap, sinks)

    def read(self, row: int, start: int, stop: int) -> Pair:
        columns = slice(self.pads[row] + start, self.pads[row] + stop)
        return self.keys[row, :, columns], self.values[row, :, columns]

    def leave(self, zones: Sequence[int], store: Store | None) -> None:
        """Keep everything: later chunks attend to the buffer."""

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def without_the_rest(tensor: Tensor) -> Tensor:
    """The tensor, copied where keeping it would keep more alive: a fused projection's values are a part of it."""
    return tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()


MOST_BLOCKS = 8
"""Blocks of queries whose moments are taken at once: of many short ones each would wait for the host."""


class QueryStatistics:
    """What formats want to know of the prompt's queries: their second moment, and the last of them.

    Moments are summed in float64 over blocks that start at the row's own zone origin, so that they
    do not depend on the prefill's chunks.
    """

    def __init__(self, info: LayerInfo, window: Window):
        self.window = window
        self.info = info
        size = info.head_dim
        moment = (info.batch, info.kv_heads, size, size)
        self.moment = torch.zeros(moment, dtype=torch.float64, device=info.device)
        recent = (info.batch, info.kv_heads, info.group, RECENT_QUERIES, size)
        self.recent = torch.zeros(recent, dtype=info.dtype, device=info.device)
        self._waiting = [self.recent[row, :, :, :0] for row in range(info.batch)]
        self._seen = [0] * info.batch

    def add(self, query: Tensor, lengths: list[int]) -> None:
        """Take a chunk's queries [B, H * G, Q, D]; `lengths` are the rows' real tokens with it."""
        heads = query.view(query.shape[0], self.info.kv_heads, self.info.group, *query.shape[2:])
        for row, length in enumerate(lengths):
            real = min(length - self._seen[row] - self._waiting[row].shape[2], query.shape[2])
            new = heads[row, :, :, query.shape[2] - real :]
            self._take_moment(row, new)
            self.recent[row] = torch.cat((self.recent[row], new), dim=2)[:, :, -RECENT_QUERIES:]

    def _take_moment(self, row: int, new: Tensor) -> None:
        waiting = torch.cat((self._waiting[row], new), dim=2)
        while waiting.shape[2] >= (size := self._block(row)):
            blocks = 1 if self._seen[row] < self.window.sink else min(MOST_BLOCKS, waiting.shape[2] // size)
            self._sum(row, waiting[:, :, : blocks * size], blocks)
            self._seen[row] += blocks * size
            waiting = waiting[:, :, blocks * size :]
        self._waiting[row] = without_the_rest(waiting)  # or a few queries would keep the whole chunk's alive

    def _block(self, row: int) -> int:
        return self.window.sink if self._seen[row] < self.window.sink else self.window.update

    def _sum(self, row: int, queries: Tensor, blocks: int) -> None:
        """Add the queries [H, G, blocks * n, D], block by block in order, whichever came together."""
        heads, group, _, dim = queries.shape
        cut = queries.reshape(heads, group, blocks, -1, dim).permute(2, 0, 1, 3, 4)
        flat = cut.reshape(blocks, heads, -1, dim).double()
        for moment in flat.transpose(2, 3) @ flat:
            self.moment[row] += moment

    def crop(self, row: int, tokens: int) -> None:
        """A row goes back to `tokens` tokens; what the others asked stays in the moment and among the recent."""
        self._waiting[row] = self._waiting[row][:, :, : max(0, tokens - self._seen[row])]
        self._seen[row] = min(self._seen[row], tokens)

    def take_row(self, row: int, source: QueryStatistics, source_row: int) -> None:
        """Copy what other statistics of this layer know of one of their rows."""
        self.moment[row] = source.moment[source_row]
        self.recent[row] = source.recent[source_row]
        self._waiting[row], self._seen[row] = source._waiting[source_row].clone(), source._seen[source_row]

    def query_moment(self) -> Tensor:
        """[B, H, D, D] with the rest that does not fill a block."""
        total = self.moment.clone()
        for row, rest in enumerate(self._waiting):
            flat = rest.flatten(1, 2).double()
            total[row] += flat.transpose(1, 2) @ flat
        return total


@dataclass(frozen=True)
class ZoneRotary:
    """The model's rotary embedding by positions in the zone, whose first token is the row's token `start`."""

    model: Rotary
    start: int

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self.model.rotate(keys, positions + self.start)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self.model.unrotate(keys, positions + self.start)


class PromptView(Prefill):
    """One layer's zone as `fit` sees it, read from the store, or from the prompt while that is on the device.

    read   keys and values [H, n, D] of a row's zone, from a token to another
    dense  those of what is in no zone
    rows   the rows that are to be fitted; the others have no tokens
    """

    def __init__(
        self,
        info: LayerInfo,
        window: Window,
        store: Store,
        needs: frozenset[str],
        rows: Collection[int],
        read: Callable[[int, int, int], Pair],
        dense: Callable[[int], Pair],
        queries: QueryStatistics | None,
        rotary: Rotary | None,
        model_moment: Tensor | None,
    ):
        self.lengths = [length if row in rows else 0 for row, length in enumerate(store.length)]
        self.query_moment = queries.query_moment() if queries and "query_moment" in needs else None
        self.recent_queries = queries.recent if queries and "recent_queries" in needs else None
        self.model_moment = model_moment if "model_moment" in needs else None
        self.rotary = ZoneRotary(rotary, window.sink) if rotary and "pre_rope" in needs else None
        self.store: Store = store
        self._info, self._read, self._dense = info, read, dense
        self._block = window.update * max(1, TOKENS_AT_ONCE // window.update)

    def blocks(self, row: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.lengths[row], self._block):
            yield self._read(row, start, min(start + self._block, self.lengths[row]))

    def dense(self, row: int) -> Pair:
        return self._dense(row)

    def pre_rope_blocks(self, row: int) -> Iterator[Tensor]:
        if self.rotary is None:
            raise BindingError(
                f"layer {self._info.index}: keys before RoPE were asked for, but there is no rotary embedding to undo "
                f"them by, or they were not declared: add 'pre_rope' to the retriever's needs"
            )
        start = 0
        for keys, _ in self.blocks(row):
            stop = start + keys.shape[1]
            yield self.rotary.unrotate(keys.unsqueeze(0), torch.arange(start, stop, device=keys.device).unsqueeze(0))[0]
            start = stop
