"""What a retriever says about itself: options with types and defaults, stages, declarations. For users and the docs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import Any, get_type_hints

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pariskv.registry import PluginRow, Registry
from pariskv.structured import dump_yaml, is_required, type_name

COMMENT = re.compile(r"\s*(\w+)\s*:[^#]*#\s*(.*)")


@dataclass(frozen=True)
class Option:
    """One option; `default` as YAML writes it, None where it must be given."""

    name: str
    type: str
    default: str | None
    help: str


@dataclass(frozen=True)
class Described:
    """A retriever or wrapper: its line of the listing, the first paragraph of its docstring, its options."""

    row: PluginRow
    summary: str
    options: tuple[Option, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.row), "summary": self.summary, "options": [asdict(option) for option in self.options]}

    def renderables(self) -> Iterator[RenderableType]:
        """For a terminal."""
        row = self.row
        yield Text(f"{row.name}  ({row.kind} of {row.distribution} {row.version})", style="bold")
        if self.summary:
            yield Text(self.summary)
        if row.error:
            yield Text(f"broken: {row.error}")
        yield Text(f"stages: {', '.join(row.stages) or 'none'}" + (f"   format: {row.format}" if row.format else ""))
        if not self.options:
            yield Text("options: none")
            return
        table = Table("option", "type", "default", "meaning")
        for option in self.options:
            default = "required" if option.default is None else option.default
            table.add_row(option.name, option.type, default, Text(option.help))
        yield table


def describe_retriever(name: str, registry: Registry) -> Described:
    """What is offered under a name; raises ConfigError or PluginLoadError where nothing is."""
    rows = {row.name: row for row in registry.listing() if row.kind != "plugin"}
    if name not in rows:
        raise registry.unknown(name, "plugins", also=registry.wrappers)
    offers = registry.retrievers if name in registry.retrievers else registry.wrappers
    offer = offers[name][0]
    return Described(rows[name], summary(offer.factory), tuple(options_of(offer.options)))


def options_of(schema: type | None) -> Iterator[Option]:
    """The options of a dataclass, in its order; none where there is no dataclass."""
    if schema is None:
        return
    hints, comments = get_type_hints(schema), comments_of(schema)
    for item in fields(schema):
        help_text = str(item.metadata.get("help", comments.get(item.name, "")))
        yield Option(item.name, type_name(hints[item.name]), _default(item), help_text)


def _default(item: Field[Any]) -> str | None:
    if is_required(item):
        return None
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    return dump_yaml({"value": value}).removeprefix("value:").strip()


def comments_of(schema: type) -> dict[str, str]:
    """The comment behind each field, which is where options are explained; empty where there is no source."""
    try:
        lines = inspect.getsource(schema).splitlines()
    except (OSError, TypeError):
        return {}
    return {match[1]: match[2] for match in map(COMMENT.match, lines) if match}


def summary(thing: object) -> str:
    """The first paragraph of a docstring."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
