"""What RULER's prompts are made of: random words, numbers, hay; and how much of it fits a number of tokens."""

from __future__ import annotations

import functools
import importlib
import random
import re
import uuid
from collections.abc import Callable

from pariskv import texts
from pariskv.errors import ConfigError

ROUNDS = 4
"""How often the number of units is estimated anew before it is only made smaller."""


def largest_fitting(tokens_of: Callable[[int], int], room: int, least: int, what: str) -> int:
    """About the most units of hay, `least` at least, of which a prompt has at most `room` tokens.

    The size grows about linearly, so a line through two sizes says where to look; what does not fit is made smaller
    by a half per cent at a time. Does not depend on what was asked before.

    Raises ConfigError where the smallest prompt does not fit.
    """
    base = tokens_of(least)
    if base > room:
        raise ConfigError(
            f"{what}: the smallest prompt takes {base} tokens with its answer's room, got {room}; ask for more"
        )
    units, best = least + max(1, room // 40), least
    for _ in range(ROUNDS):
        tokens = tokens_of(units)
        if tokens <= room:
            best = max(best, units)
        slope = (tokens - base) / (units - least)
        better = least + int((room - base) / slope) if slope > 0 else best
        if better <= best or better == units:
            break
        units = better
    while units > best and tokens_of(units) > room:
        units -= max(1, units // 200)
    return max(units, best)


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """All nouns or adjectives of one word that wonderwords has, in the order of the alphabet."""
    try:
        wonderwords = importlib.import_module("wonderwords")
    except ImportError as error:
        raise ConfigError("ruler needs wonderwords: pip install 'pariskv[tasks]'") from error
    found = wonderwords.RandomWord().filter(include_parts_of_speech=[kind])
    return tuple(sorted({word.lower() for word in found if re.fullmatch(r"[A-Za-z]+", word)}))


def word(rng: random.Random) -> str:
    """An adjective and a noun, such as `gentle-harbor`."""
    return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"


def number(rng: random.Random) -> str:
    """Seven digits."""
    return str(rng.randrange(1_000_000, 10_000_000))


def identifier(rng: random.Random) -> str:
    """A UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(make: Callable[[random.Random], str], count: int, rng: random.Random) -> list[str]:
    """So many different ones, in the order in which they were made."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(rng)] = None
    return list(found)


@functools.cache
def own_haystack() -> tuple[str, ...]:
    """Words of the standard library's help topics: the hay where RULER's essays are not at hand."""
    return tuple(texts.prose(0, 1).split())
