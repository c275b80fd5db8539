"""Where each token of a row lives: sink, zone, ring. Integers only.

    position  0 .. sink-1            sink    the first real tokens, always attended
              sink .. sink+zone-1    zone    in the store, indexed, retrieved
              sink+zone .. n-1       ring    the newest (local + update buffer), always attended

The length of the zone is a function of the number of tokens alone, so prefill, decoding and a
later turn agree by construction: `Window.zone`. What else a retriever may index (`indexes`) is `Window.suited_to`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Window:
    """The region arithmetic of one layer.

    sink           first tokens kept on the device
    local          newest tokens that never leave the device
    update         U, tokens that leave together; a multiple of the block of every format
    dense_below    a row with fewer tokens has no zone and attends to everything
    is_fixed       the zone is the prompt's: nothing joins it while tokens are generated
    """

    sink: int
    local: int
    update: int
    dense_below: int = 0
    is_fixed: bool = False

    def suited_to(self, indexes: Literal["all", "prompt", "none"]) -> Window:
        """The same window for a layer whose retrievers index everything, the prompt, or nothing."""
        return self.without_zone() if indexes == "none" else replace(self, is_fixed=indexes == "prompt")

    def while_reading(self) -> Window:
        """The same window while a prompt is read, whose zone is not yet what it will be."""
        return replace(self, is_fixed=False)

    def without_zone(self) -> Window:
        """The same window for a layer that keeps everything on the device."""
        return replace(self, dense_below=UNBOUNDED)

    def zone(self, tokens: int) -> int:
        """How many of a row's `tokens` tokens are in the zone, a multiple of U."""
        if tokens < self.dense_below:
            return 0
        return max(0, tokens - self.sink - self.local) // self.update * self.update

    def zone_from(self, held: int, tokens: int) -> int:
        """While tokens are generated: the zone of a row whose zone has been `held` until now."""
        return held if self.is_fixed else self.zone(tokens)

    def zone_before(self, tokens: int) -> int:
        """The most that may have been in the zone when a row held so many tokens."""
        return max(0, tokens - self.sink) // self.update * self.update if self.is_fixed else self.zone(tokens)

    def last_of_zone(self, tokens: int) -> int:
        """The largest number of tokens with the same zone as `tokens`."""
        if self.is_fixed:
            return UNBOUNDED
        if tokens < self.dense_below:
            return self.dense_below - 1
        return self.sink + self.local + self.zone(tokens) + self.update - 1

    def ring(self, tokens: int, zone: int) -> int:
        """How many of a row's `tokens` tokens are in the ring."""
        return max(0, tokens - self.sink - zone)

    def ring_capacity(self, tokens: int, final_tokens: int) -> int:
        """Ring slots that a row needs on its way from `tokens` to `final_tokens`, at least 1.

        A step appends before the zone takes over, so a ring holds local + U tokens for a moment,
        and a row that is still below `dense_below` holds everything until it gets there.
        """
        if self.is_fixed:
            return max(1, self.ring(final_tokens, self.zone(tokens)))
        most = self.local + self.update
        if tokens < self.dense_below:
            most = max(most, self.dense_below - self.sink)
        return max(1, min(most, final_tokens - self.sink))
