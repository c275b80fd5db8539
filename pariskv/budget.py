"""How many candidates `coarse_select` returns: integers and exact fractions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite
from typing import Literal

from pariskv.errors import ConfigError

AUTO_RATIOS: tuple[tuple[int, Fraction], ...] = (
    (0, Fraction(1, 2)),
    (5_000, Fraction(1, 4)),
    (10_000, Fraction(1, 5)),
    (30_000, Fraction(1, 10)),
)
"""`candidates: auto`: from this many zone tokens on, this share of them (ParisKV, arXiv 2602.07721)."""


def _as_written(ratio: float) -> Fraction:
    """The decimal that was written, not its binary neighbour: 0.1 of 30 is 3, not 4."""
    return Fraction(str(ratio))


@dataclass(frozen=True)
class CandidateRule:
    """Candidates of a row as a function of its zone tokens N: min(N, max(ceil(ratio(N) * N), minimum, top_k)).

    ratios   (from, ratio): the last entry whose `from` is at most N applies; the first is from 0
    minimum  a fixed number of candidates
    """

    ratios: tuple[tuple[int, Fraction], ...] = ()
    minimum: int = 0

    @classmethod
    def parse(
        cls, value: Literal["auto"] | str | int | float, ratios: Sequence[tuple[int, float]] | None = None
    ) -> CandidateRule:
        """The rule of `candidates:`: auto, a ratio (a float in (0, 1]) or a count (an integer from 1).

        ratios  what auto is; None: the paper's table
        """
        if value == "auto" and ratios is not None:
            return cls(tuple((start, _as_written(ratio)) for start, ratio in ratios))
        if value == "auto":
            return cls(AUTO_RATIOS)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return cls(minimum=value)
        if isinstance(value, float) and isfinite(value) and 0 < value <= 1:
            return cls(((0, _as_written(value)),))
        raise ConfigError(
            f"candidates: got {value!r}, wanted auto, a ratio (a float with 0 < ratio <= 1) or a count (an int >= 1)"
        )

    @classmethod
    def first_top_k(cls) -> CandidateRule:
        """The rule of `rerank: none`: exactly min(N, top_k), so that keeping the first top_k needs no order."""
        return cls()

    def count(self, zone_tokens: int, top_k: int) -> int:
        """Candidates of a row with `zone_tokens` tokens in its zone."""
        return min(zone_tokens, max(ceil(self._ratio(zone_tokens) * zone_tokens), self.minimum, top_k))

    def width(self, capacity: int, top_k: int) -> int:
        """The largest `count` of any zone from 0 to `capacity` tokens.

        Between two steps of the table `count` never falls, so it is largest just before a step or at the end.
        """
        ends = [start - 1 for start, _ in self.ratios if 0 < start <= capacity]
        return max(self.count(end, top_k) for end in [*ends, capacity])

    def _ratio(self, zone_tokens: int) -> Fraction:
        return next((ratio for start, ratio in reversed(self.ratios) if start <= zone_tokens), Fraction(0))
