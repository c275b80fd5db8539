"""A griffe extension: the project's docstrings, laid out for readers of the source, as Markdown for the API page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Rewrites every docstring once, as it is collected, and lists a class's fields behind its own."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None and (fields := list(_fields(cls))):
            cls.docstring.value += "\n\n" + "\n".join(["```python", *fields, "```"])


def _fields(cls: griffe.Class) -> Iterator[str]:
    """What a class declares without a docstring, and mkdocstrings leaves out: lines of the source."""
    for name, attribute in cls.attributes.items():
        declared = attribute.source.startswith(f"{name}:")
        if declared and attribute.docstring is None and not name.startswith("_"):
            yield attribute.source


def as_markdown(docstring: str) -> str:
    """A docstring of this project as Markdown: `name   meaning` lines become a list, `>>>` lines a code block."""
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", docstring))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if lines[0].startswith(">>> "):
        return "\n".join(["```python", *(line[4:] for line in lines), "```"])
    if text.startswith(("    ", "├", "ParisKVError  ")):
        return "\n".join(line if line.startswith("    ") else f"    {line}" for line in lines)
    if any(re.match(r"[^\s].*?\S {2,}\S", line) for line in lines):
        return "\n".join(_items(lines))
    return text


def _items(lines: list[str]) -> Iterator[str]:
    """Definition lines as list items; the lines before them stay a paragraph, indented ones continue an item."""
    in_list = False
    for line in lines:
        if match := re.match(r"(\S(?:.*?\S)??) {2,}(\S.*)", line):
            if not in_list:
                yield ""
            in_list = True
            yield f"- `{match[1]}`: {match[2]}"
        elif in_list and not line.startswith(" "):
            in_list = False
            yield f"\n{line}"
        else:
            yield f"  {line.strip()}" if in_list else line
