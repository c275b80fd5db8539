"""Which rows of a batch begin alike, and the copies that bring them into another order. Integers only.

Beams and forks differ in their last tokens. What two rows are known to have in common need not be copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

SPARE = -1
"""Stands for a row beside those of the batch, which holds one while its place is taken."""


class Lineage:
    """How many tokens at their beginning any two rows are known to have in common."""

    def __init__(self, common: Mapping[frozenset[int], int] | None = None) -> None:
        self._common = dict(common or {})

    def copy(self) -> Lineage:
        return Lineage(self._common)

    def common(self, one: int, two: int) -> int:
        return self._common.get(frozenset((one, two)), 0)

    def copied(self, row: int, source: int, tokens: int) -> None:
        """`row` now holds the `tokens` tokens of `source`; what follows in either is its own."""
        self.forget(row)
        for pair, common in list(self._common.items()):
            if source in pair:
                (other,) = pair - {source}
                self._common[frozenset((row, other))] = common
        self._common[frozenset((row, source))] = tokens

    def cropped(self, row: int, tokens: int) -> None:
        for pair in self._common:
            if row in pair:
                self._common[pair] = min(self._common[pair], tokens)

    def forget(self, row: int) -> None:
        """The row holds something else."""
        for pair in [pair for pair in self._common if row in pair]:
            del self._common[pair]


def moves(sources: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Copies (row, source), one after the other, after which every row b holds what row sources[b] did."""
    pending = {row: source for row, source in enumerate(sources) if row != source}
    while pending:
        wanted = set(pending.values())
        free = [row for row in pending if row not in wanted]
        for row in free:
            yield row, pending.pop(row)
        if not free:  # cycles are left
            row = next(iter(pending))
            yield SPARE, row
            pending = {one: SPARE if source == row else source for one, source in pending.items()}
