"""What a saved prefix belongs to, compared field by field with the model and configuration at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pariskv.prefix.file import PrefixFile
from pariskv.records import differences

SHOWN = 3
"""Differences that a message names."""

FIRST = ("model", "id", "revision", "tokenizer", "retrievers")

ADVICE = (
    ("model.dtype", "load the model with the saved dtype (model.dtype)"),
    ("model", "load the model that the prefix was read by (model.name)"),
    ("tokenizer", "load the model with the tokenizer that the prefix was read by"),
)
ADVICE_ELSE = "load it with the configuration that it was saved with; `pariskv prefix info` shows that"


def refuse_mismatch(file: PrefixFile, here: Mapping[str, Any]) -> None:
    """Raise PrefixError, by name, where the prefix was saved from something else than what is at hand."""
    found = sorted(differences(file.header["belongs"], here), key=lambda one: _order(one[0]))
    if not found:
        return
    listed = "; ".join(f"{name}: saved {_shown(saved)}, here {_shown(given)}" for name, saved, given in found[:SHOWN])
    more = f" (and {len(found) - SHOWN} differences more)" if len(found) > SHOWN else ""
    first = found[0][0]
    advice = next((text for field, text in ADVICE if first.startswith(field)), ADVICE_ELSE)
    raise file.refusal(first, f"the prefix does not belong here: {listed}{more}; {advice}, or save it again")


def _order(name: str) -> list[tuple[int, int, str]]:
    """What explains the most first; numbers by their size."""
    parts = name.split(".")
    return [(FIRST.index(p) if p in FIRST else len(FIRST), int(p) if p.isdecimal() else -1, p) for p in parts]


def _shown(value: Any) -> str:
    return "nothing" if value is None or value == "" else str(value)


def hash_tokens(rows: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the rows' token ids: of each row its number of tokens, then these, as 64-bit integers."""
    digest = hashlib.sha256()
    for row in rows:
        for number in (len(row), *row):
            digest.update(number.to_bytes(8, "little", signed=True))
    return digest.hexdigest()
