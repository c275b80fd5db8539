"""The Markdown pages and their fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    text: str


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def blocks(name: str, language: str = "") -> list[Block]:
    """The blocks of a page, of one language if it is given."""
    found = [Block(match[1], match[2] or "", match[3]) for match in FENCE.finditer(page(name))]
    return [block for block in found if language in ("", block.language)]


def names() -> list[str]:
    return sorted(path.stem for path in DOCS.glob("*.md"))
