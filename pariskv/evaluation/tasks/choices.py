"""Four choices by letter: what LongBench-v2 and GPQA share."""

from __future__ import annotations

from collections.abc import Sequence

LETTERS = "ABCD"


def with_letters(choices: Sequence[str]) -> str:
    """The choices on a line each, as (A) to (D)."""
    return "\n".join(f"({letter}) {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=True))
