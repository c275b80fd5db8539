"""A file of prompts: JSON lines, each a prompt's text or an object that holds it.

    {"prompt": "Why is the sky blue?", "id": "q1", "max_new_tokens": 64}
    "Why is the sky blue?"

Other keys are left to whoever wrote them. A line that is no request fails alone, with its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pariskv.errors import ConfigError


@dataclass(frozen=True)
class PromptLine:
    """Line `index`, counted from 0 without empty ones; `error` says why it is no request."""

    index: int
    text: str = ""
    id: str | int | None = None
    max_new_tokens: int | None = None
    error: str = ""


def read_prompts(path: Path) -> list[PromptLine]:
    """The requests of a file; raises ConfigError where it cannot be read, or holds none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error}") from error
    found = list(_requests(lines))
    if not found:
        raise ConfigError(f"--prompts {path}: holds no line; wanted one JSON object or string a line")
    return found


def _requests(lines: list[bytes]) -> Iterator[PromptLine]:
    index = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _request(index, number, line)
            index += 1


def _request(index: int, number: int, line: bytes) -> PromptLine:
    try:
        found: Any = json.loads(line.decode("utf-8"))
    except ValueError as error:  # of JSON as of UTF-8
        return PromptLine(index, error=f"line {number}: no JSON in UTF-8 ({error}); wanted an object or a string")
    fields = {"prompt": found} if isinstance(found, str) else found
    if not isinstance(fields, dict):
        return PromptLine(index, error=f"line {number}: got a {type(found).__name__}, wanted a JSON object or string")
    text, name, tokens = fields.get("prompt"), fields.get("id"), fields.get("max_new_tokens")
    name = name if isinstance(name, str | int) else None
    if not isinstance(text, str) or not text.strip():
        return PromptLine(index, id=name, error=f'line {number}: wanted "prompt", a text that is not empty')
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        return PromptLine(index, id=name, error=f'line {number}: "max_new_tokens": got {tokens!r}, wanted 1 or more')
    return PromptLine(index, text, name, tokens)
