"""The device rows of one layer: sink, ring and the slots of the selected rows, in one buffer.

    rows    [B, H, sink + ring + K, 2, D]    key and value of a token
    steady  bool [B, sink + ring]            which sink and ring slots hold a token
    length  int64 [B]                        tokens of each row
    active  bool [B]                         rows that still generate

`append` is the only thing that a decode step does here; it has fixed shapes, reads the lengths
from the device and never asks the host. Everything else happens between steps.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count

import torch
from torch import Tensor

from pariskv.types import LayerInfo, WorkingSet
from pariskv.window import Window

_serials = count()


class DeviceRows:
    """Sink, ring and slots of one layer, and the arithmetic that finds a token among them."""

    def __init__(self, info: LayerInfo, window: Window, ring: int, slots: int):
        self.serial = next(_serials)  # an id() may come again once an object is gone
        self.window = window
        self.ring = ring
        steady = window.sink + ring
        # In memory all keys of a head lie before its values: attention reads the one, then the other.
        shape = (info.batch, info.kv_heads, 2, steady + slots, info.head_dim)
        self.rows = torch.zeros(shape, dtype=info.dtype, device=info.device).transpose(2, 3)
        self.steady = torch.zeros(info.batch, steady, dtype=torch.bool, device=info.device)
        self.length = torch.zeros(info.batch, dtype=torch.int64, device=info.device)
        self.active = torch.ones(info.batch, dtype=torch.bool, device=info.device)
        self.working = WorkingSet(self.rows, self.steady, self.length, self.active, window.sink)
        self._batch = torch.arange(info.batch, device=info.device)
        self._by_slot = self.rows.permute(0, 2, 1, 3, 4)  # [B, M, H, 2, D]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.steady.nbytes

    def next_slots(self) -> Tensor:
        """Where each row's next token goes [B]."""
        return slots_of(self.length, self.window.sink, self.ring)

    def append(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put one token [B, H, 1, D] at the end of every active row, into its slot of `next_slots`.

        A row that is not active keeps its length, and what is written for it stays invalid: the slot
        after a row's last token is free between steps.
        """
        where = (self._batch, slots)
        self._by_slot[where] = torch.stack((keys[:, :, 0], values[:, :, 0]), dim=2)
        self.steady[where] = self.active
        self.length += self.active

    def place(self, row: int, start: int, tokens: Tensor) -> None:
        """Write the tokens [H, n, 2, D] of one row at the positions from `start` on."""
        self.rows[row].index_copy_(1, self._slots(start, start + tokens.shape[1]), tokens.to(self.rows.dtype))

    def read(self, row: int, start: int, stop: int) -> Tensor:
        """The tokens [H, n, 2, D] of one row at the positions start .. stop - 1, all in sink or ring."""
        return self.rows[row].index_select(1, self._slots(start, stop))

    def publish(self, row: int, tokens: int, zone: int) -> None:
        """Say which slots are valid, once a row has `tokens` tokens of which `zone` are in the zone."""
        self.length[row] = tokens
        self.steady[row].copy_(_used_slots(self.window.sink, self.ring, tokens, zone, self.steady.device))

    def grown(self, info: LayerInfo, ring: int, lengths: list[int], zones: list[int]) -> DeviceRows:
        """A copy with a larger ring."""
        slots = self.rows.shape[2] - self.steady.shape[1]
        new = DeviceRows(info, self.window, ring, slots)
        new.active.copy_(self.active)
        for row, (tokens, zone) in enumerate(zip(lengths, zones, strict=True)):
            first = min(self.window.sink, tokens)
            new.place(row, 0, self.read(row, 0, first))
            new.place(row, first + zone, self.read(row, first + zone, tokens))
            new.publish(row, tokens, zone)
        return new

    def _slots(self, start: int, stop: int) -> Tensor:
        """Slots of the positions start .. stop - 1."""
        return _slots_between(self.window.sink, self.ring, start, stop, self.rows.device)


def slots_of(positions: Tensor, sink: int, ring: int) -> Tensor:
    """A token's slot: its position in the sink, and behind it its position modulo the ring."""
    return torch.where(positions < sink, positions, (positions - sink).remainder(ring) + sink)


# All layers of a request ask for the same in turn.


@lru_cache(maxsize=64)
def _slots_between(sink: int, ring: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Slots [stop - start] of the positions start .. stop - 1."""
    return slots_of(torch.arange(start, stop, device=device), sink, ring)


@lru_cache(maxsize=64)
def _used_slots(sink: int, ring: int, tokens: int, zone: int, device: torch.device) -> Tensor:
    """bool [sink + ring], the slots of a row with `tokens` tokens of which `zone` are in the zone."""
    used = torch.zeros(sink + ring, dtype=torch.bool, device=device)
    used[: min(sink, tokens)] = True
    if tokens > sink + zone:
        used[_slots_between(sink, ring, sink + zone, tokens, device)] = True
    return used
