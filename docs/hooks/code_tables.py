"""Tables of what is declared in the code: the schema of the YAML, the budget, the hooks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from itertools import groupby, pairwise

from markup import code, summary, table
from pariskv_plugins.paris.paper import COLLIDING

from pariskv.budget import AUTO_RATIOS
from pariskv.config import Row, describe_schema
from pariskv.hookspecs import PluginSpec, Retriever, StageSpec
from pariskv.stages import STAGES


def schema() -> str:
    """A table for each section, in the order of the file."""
    sections = groupby(describe_schema(), key=lambda row: row.path.partition(".")[0])
    return "\n\n".join(f"### {name}\n\n{_keys(rows)}" for name, rows in sections)


def _keys(rows: Iterable[Row]) -> str:
    cells = ((code(row.path), row.type, code(row.default), row.help) for row in rows)
    return table(("Key", "Type", "Default", "Meaning"), cells)


def budget() -> str:
    starts = [start for start, _ in AUTO_RATIOS]
    assert [start for start, _ in COLLIDING] == starts, (
        "candidates and collisions change at different lengths: use two tables"
    )
    names = [f"{low:,} to {high - 1:,}" for low, high in pairwise(starts)] + [f"from {starts[-1]:,}"]
    rows = (
        (name, f"{float(ratio * 100):.0f} %", f"{collided} %")
        for name, (_, ratio), (_, collided) in zip(names, AUTO_RATIOS, COLLIDING, strict=True)
    )
    return table(("Tokens N in the zone", "Candidates", "Collision ratio"), rows)


def hooks() -> str:
    rows = []
    for stage in STAGES:
        function = getattr(StageSpec, stage)
        rows.append((code(stage), code(arguments(function)), code(returned(function)), summary(function)))
    registering = PluginSpec.register_retrievers
    rows.insert(0, ("`register_retrievers`", code(arguments(registering)), "`None`", summary(registering)))
    return table(("Hook", "Arguments", "Returns", "Meaning"), rows)


def arguments(function: Callable[..., object]) -> str:
    return ", ".join(list(inspect.signature(function).parameters)[1:])


def returned(function: Callable[..., object]) -> str:
    return str(inspect.signature(function).return_annotation)


def traits() -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(Retriever)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    rows = [
        (code(item.target.id), code(ast.unparse(item.value)), " ".join(text.value.value.split()))
        for item, text in pairwise(body)
        if isinstance(item, ast.AnnAssign)
    ]
    return table(("Attribute", "Default", "Meaning"), rows)
