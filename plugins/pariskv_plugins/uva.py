"""The store in host memory that the GPU reads by itself: rows cross the bus when they are fetched, and only those.

In memory a token's heads lie side by side, [capacity, B, H, 2, D], so that a store that grows gets longer at its
end and keeps its place; `rows` is the view [B, H, capacity, 2, D] of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pariskv_kernels.gather import gather_changed, gather_rows
from pariskv_kernels.memory import HostBuffer
from torch import Tensor

from pariskv.errors import BindingError, CapacityError, ConfigError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import LayerInfo, Selected, Selection, Store
from pariskv_plugins.blocks import check_block
from pariskv_plugins.lane import Lane, SideStream

HEADROOM = 8
"""Address space for this many times the first capacity is reserved; it costs nothing until it is used."""

STAGING = 64 << 20
"""Bytes of a block that are brought into the store's order at a time, in device memory."""

MAX_REUSED = 4096
"""Slots per head that `gather_changed` can match."""


@dataclass(frozen=True)
class Options:
    reuse: bool = False  # rows that were also selected in the step before stay in their slots
    sort: bool = False  # read each head's rows in the order of their positions; for selections in another order


class UvaStore(Store):
    """rows [B, H, capacity, 2, D] in host memory, as the device sees them; appended by the copy engine.

    buffer  at least capacity x token_bytes(layer), whose extents cut through no token
    """

    def __init__(self, layer: LayerInfo, capacity: int, buffer: HostBuffer, lane: Lane, options: Options) -> None:
        self.layer, self.buffer, self.lane, self.options = layer, buffer, lane, options
        self.length = [0] * layer.batch
        self.can_fork = not (options.reuse or options.sort)
        self.counts = torch.zeros(2, dtype=torch.int64, device=layer.device)
        self._held: Tensor | None = None
        self._slots: Tensor | None = None
        self._has_fetched = False
        self._take(capacity)

    def _take(self, capacity: int) -> None:
        self.capacity = capacity
        shape = (capacity, self.layer.batch, self.layer.kv_heads, 2, self.layer.head_dim)
        self._host = self.buffer.cpu(shape, self.layer.dtype)
        self.rows = self.buffer.device(shape, self.layer.dtype).permute(1, 2, 0, 3, 4)

    def append(self, keys: Tensor, values: Tensor, rows: Sequence[int]) -> None:
        """Send one block [R, H, n, D] of the given batch rows to where each row ends, and count it.

        The copy runs beside what the device does next. Until `settle`, only reading the store waits for it.
        """
        check_block("uva", self, self.layer.kv_heads, self.layer.head_dim, keys, values, rows)
        n = keys.shape[2]
        with self.lane.copies(keys, values):
            for source, row in enumerate(rows):
                start = self.length[row]
                for first, last in self._pieces(start, start + n):
                    tokens = slice(first - start, last - start)
                    block = self._as_rows(keys[source, :, tokens], values[source, :, tokens])
                    self.buffer.driver.copy(block, self._host[first:last, row])
                self.length[row] = start + n
        if self._has_fetched:
            # Steps may be replayed from now on, and what they read must have arrived: a graph waits for nobody.
            self.settle()

    def _as_rows(self, keys: Tensor, values: Tensor) -> Tensor:
        """Keys and values [H, n, D] as the store has them: [n, H, 2, D]."""
        heads, n, dim = keys.shape
        block = keys.new_empty(n, heads, 2, dim, dtype=self.layer.dtype)
        block[:, :, 0] = keys.transpose(0, 1)
        block[:, :, 1] = values.transpose(0, 1)
        return block

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The tokens start .. stop - 1 in pieces for one copy each: within an extent, and not too large to stage."""
        size = token_bytes(self.layer)
        step = max(1, STAGING * self.layer.batch // size)
        for low, high in self.buffer.spans(start * size, stop * size):
            for first in range(low // size, high // size, step):
                yield first, min(first + step, high // size)

    def settle(self) -> None:
        """Make what the device is given next wait for the rows that are on their way; the host goes on."""
        self.lane.settle()

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copied by the copy engine, in the order of torch's current stream."""
        self.settle()
        shape = (stop - start, self.layer.kv_heads, 2, self.layer.head_dim)
        block = torch.empty(shape, dtype=self.layer.dtype, device=self.layer.device)
        for first, last in self._pieces(start, stop):
            self.buffer.driver.copy(self._host[first:last, row], block[first - start : last - start])
        keys, values = block.transpose(0, 1).unbind(2)
        return keys, values

    def crop(self, row: int, tokens: int) -> None:
        """What comes in the place of the forgotten rows has their positions: no slot holds them any more."""
        self.settle()
        self.length[row] = min(self.length[row], tokens)
        if self._held is not None:
            self._held[row].fill_(-1)

    def grow(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        with capacity_error(self.layer):
            self.buffer.grow(capacity * token_bytes(self.layer))
        self._take(capacity)

    def fetch(self, selection: Selection, slots: Tensor) -> Selected:
        self.settle()
        self._has_fetched = True
        if self.options.sort:
            selection = ascending(selection)
        if not self.options.reuse:
            valid = gather_rows(self.rows, selection.indices, slots)
            return Selected(valid, selection.bias, selection.extra, selection.partial)
        held = self._held_in(slots)
        valid, order = gather_changed(self.rows, selection.indices, held, slots, self.counts)
        bias = None if selection.bias is None else permuted(selection.bias, order.clamp(min=0))
        return Selected(valid, bias, selection.extra, selection.partial)

    def _held_in(self, slots: Tensor) -> Tensor:
        """The map of what the slots hold; a new one for slots that the last call did not write."""
        # The old slots are kept, not their address: another tensor may get that once they are gone.
        same = self._slots is not None and slots.is_set_to(self._slots)
        if self._held is None or not same:
            if slots.shape[2] > MAX_REUSED:
                raise ConfigError(
                    f"uva: reuse: true works for up to {MAX_REUSED} selected rows per head, got {slots.shape[2]}; "
                    f"lower top_k or set reuse: false"
                )
            if slots.is_cuda and torch.cuda.is_current_stream_capturing():
                raise BindingError("uva: reuse: true has not seen these slots; run one step before the capture")
            self._held = torch.full(slots.shape[:3], -1, dtype=torch.int32, device=slots.device)
            self._slots = slots
        return self._held

    def invalidate(self) -> None:
        """Forget what the slots hold: their rows, or rows of the store, were changed by somebody else."""
        self._held = self._slots = None

    @property
    def hit_rate(self) -> float:
        """Share of the selected rows that did not cross the bus, 0 before the first; asks the device."""
        hits, asked = self.counts.tolist()
        return hits / asked if asked else 0.0

    @property
    def host_bytes(self) -> int:
        return self.buffer.nbytes

    @property
    def device_bytes(self) -> int:
        return self.counts.nbytes + (self._held.nbytes if self._held is not None else 0)


class Uva(Retriever):
    """Keeps rows in host memory and fetches them; chooses nothing itself, so another retriever selects."""

    graph_safe = True
    host_resident = True

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    @hookimpl
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        if layer.device.type != "cuda":
            raise ConfigError(
                f"layer {layer.index}: store uva is host memory that a CUDA device reads, but the layer is on "
                f"{layer.device}; write `store: resident`, which on a CPU is host memory, too"
            )
        size = token_bytes(layer)
        with capacity_error(layer):
            buffer = HostBuffer(capacity * size, layer.device, unit=size, headroom=HEADROOM)
        return UvaStore(layer, capacity, buffer, SideStream(layer.device), self.options)

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        return own(store).fetch(selection, slots)

    @hookimpl
    def update(self, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
        own(store).append(keys, values, rows)


def token_bytes(layer: LayerInfo) -> int:
    """Of one token of every batch row: all heads' keys and values."""
    return layer.batch * layer.kv_heads * 2 * layer.head_dim * layer.dtype.itemsize


def ascending(selection: Selection) -> Selection:
    """The same selection by position, empty entries at the end."""
    last = torch.iinfo(torch.int32).max
    positions, order = selection.indices.masked_fill(selection.indices < 0, last).sort(-1)
    bias = None if selection.bias is None else permuted(selection.bias, order)
    return Selection(positions.masked_fill(positions == last, -1), bias, selection.extra, selection.partial)


def permuted(bias: Tensor, order: Tensor) -> Tensor:
    """The bias [B, H, G, K] in the order [B, H, K]."""
    return bias.gather(-1, order.long().unsqueeze(2).expand_as(bias))


@contextmanager
def capacity_error(layer: LayerInfo) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise CapacityError(f"layer {layer.index}: {error}") from error


def own(store: Store) -> UvaStore:
    """The store, if `allocate_store` of this module made it."""
    if not isinstance(store, UvaStore):
        raise BindingError(
            f"uva: got a {type(store).__name__}, but fetch and update only know the store of uva's own "
            f"allocate_store; take all three stages from one retriever"
        )
    return store


@hookimpl
def register_retrievers(register: Register) -> None:
    register("uva", Uva, options=Options)
