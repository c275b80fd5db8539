"""Sizes as people write them: `128K` tokens, `80GB` of memory, lists with commas."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from pariskv.budget import CandidateRule
from pariskv.errors import ConfigError

TOKEN_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
BYTE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
RATE_UNITS = {f"{unit}/S": factor for unit, factor in BYTE_UNITS.items() if unit} | {"TB/S": 10**12, "TIB/S": 1 << 40}
FLOPS_UNITS = {f"{unit}FLOP{per}": 10**power for unit, power in (("G", 9), ("T", 12), ("P", 15)) for per in ("/S", "S")}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z/]*)")

T = TypeVar("T")


def parse_tokens(text: str) -> int:
    """`32768`, `32K` (1024 tokens each) or `1M`, from 1 on."""
    return _size(text, TOKEN_UNITS, "a number of tokens such as 32768, 128K or 1M")


def parse_bytes(text: str) -> int:
    """`80GB` (10^9 bytes each), `64GiB` (2^30) or a plain number, from 1 on."""
    return _size(text, BYTE_UNITS, "a size such as 80GB or 512MiB")


def parse_rate(text: str) -> int:
    """Bytes per second: `4.8TB/s` (10^12 bytes each), `50GB/s` or `64GiB/s`, from 1 on."""
    return _size(text, RATE_UNITS, "bytes per second such as 4.8TB/s or 50GB/s")


def parse_flops(text: str) -> int:
    """Operations per second: `989TFLOP/s` (10^12 each) or `1.5PFLOPS`, from 1 on."""
    return _size(text, FLOPS_UNITS, "operations per second such as 989TFLOP/s")


def parse_count(text: str) -> int:
    """A plain number from 1 on."""
    return _size(text, {"": 1}, "an integer from 1 on")


def parse_candidates(text: str) -> str | int | float:
    """What `candidates:` of a configuration takes: auto, a count or a ratio."""
    try:
        value: str | int | float = int(text) if text.isdigit() else float(text)
    except ValueError:
        value = text
    CandidateRule.parse(value)
    return value


def with_option(option: str, parse: Callable[[str], T], text: str) -> T:
    """What an option's text means; ConfigError with the option's name where it means nothing."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def parse_list(text: str, parse: Callable[[str], T], option: str) -> tuple[T, ...]:
    """The parts of a list with commas, each parsed; ConfigError with the option's name where one is wrong."""
    try:
        return tuple(parse(part.strip()) for part in text.split(","))
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def one_of(known: tuple[str, ...]) -> Callable[[str], str]:
    """A parser that takes one of the known names."""

    def parse(text: str) -> str:
        if text not in known:
            raise ConfigError(f"got {text!r}, wanted one of {', '.join(known)}")
        return text

    return parse


def show_tokens(count: int) -> str:
    """The shortest of 131072 and 128K."""
    for unit in ("M", "K"):
        if count % TOKEN_UNITS[unit] == 0:
            return f"{count // TOKEN_UNITS[unit]}{unit}"
    return str(count)


def _size(text: str, units: dict[str, int], wanted: str) -> int:
    match = SIZE.fullmatch(text.strip())
    factor = units.get(match[2].upper()) if match else None
    count = Fraction(match[1]) * factor if match and factor else Fraction()
    if count < 1 or count.denominator != 1:
        raise ConfigError(f"got {text!r}, wanted {wanted}")
    return int(count)
