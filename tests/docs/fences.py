"""The Markdown pages and their fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
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
    """Every page by its path without the ending: `quickstart`, `retrievers/quest`, `retrievers/index`."""
    return sorted(
        path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md") if EXAMPLES not in path.parents
    )
