"""What all layers of a request share: how long it will be, and what the first layer that asks decides for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pariskv.prompt import History
from pariskv.types import Rotary
from pariskv.working import DeviceRows

HEADROOM = 256
"""Tokens that a request without a known end gets room for beyond its prompt."""

ChooseHistory = Callable[[int, int, int], History]
"""(batch rows, columns of the prompt with its history, new tokens) -> where its earlier chunks are meanwhile."""


@dataclass
class Request:
    """What all layers of a request share.

    prompt_tokens  columns that the prompt being read will have in the end, 0 where nobody knows
    new_tokens     tokens that will be generated after it
    prefilling     the loop says that a prompt is being read; without a loop it is inferred
    rotary         the model's rotary embedding, None where it has none that can be undone
    moments        the model's query moments [H, D, D] by layer, of its calibration; empty without one
    choose         decides where the earlier chunks of a prompt are while it is read; None: in a buffer
    """

    prompt_tokens: int = 0
    new_tokens: int = HEADROOM
    prefilling: bool = False
    rotary: Rotary | None = None
    moments: Mapping[int, Tensor] = field(default_factory=dict)
    choose: ChooseHistory | None = None
    _chosen: tuple[int, History] | None = None
    _slots: dict[tuple[int, int], tuple[int, Tensor]] = field(default_factory=dict)

    def history(self, batch: int, columns: int) -> History:
        """Where the earlier chunks of a prompt of `columns` columns are, decided once for all layers."""
        if self.choose is None:
            return "buffer"
        if self._chosen is None or self._chosen[0] != columns:
            self._chosen = columns, self.choose(batch, columns, self.new_tokens)
        return self._chosen[1]

    def next_slots(self, step: int, device: DeviceRows) -> Tensor:
        """`DeviceRows.next_slots` [B], computed once a step for all layers of the same regions.

        step  the model's columns, which tell one step from the next
        """
        regions = device.window.sink, device.ring
        known = self._slots.get(regions)
        if known is None or known[0] != step:
            known = self._slots[regions] = step, device.next_slots()
        return known[1]

    def forget_slots(self) -> None:
        """Rows have changed between two steps."""
        self._slots.clear()
