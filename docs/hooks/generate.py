"""What the pages take from the code at build time: tables of the schema, the options and the hooks; inlined diagrams.

A page says `<!-- generated: NAME -->` where the table goes. mkdocs runs this file (`hooks:` in mkdocs.yml).
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARKER = re.compile(r"<!-- generated: ([a-z0-9 -]+?) -->")
DIAGRAM = re.compile(r'<img alt="([^"]*)" src="[^"]*img/([\w-]+\.svg)"\s*/?>')

# The checkout's own code is documented, whether or not it is installed.
FOLDERS = ("", "plugins", "kernels", "docs/hooks")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS if str(ROOT / folder) not in sys.path]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the generated parts in; an unknown name is an error."""
    return MARKER.sub(lambda match: PARTS[match[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put diagrams into the page itself, so that they follow its light or dark colours."""
    return DIAGRAM.sub(lambda match: diagram(match[2]), html)


def diagram(name: str) -> str:
    svg = (ROOT / "docs" / "img" / name).read_text(encoding="utf-8")
    # A phone scrolls sideways, so that the text stays large enough to read.
    svg = svg.replace("<svg ", '<svg style="display:block;min-width:600px;width:100%" ', 1)
    return f'<span class="pk-scroll" style="display:block;overflow-x:auto">{svg.strip()}</span>'


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: object) -> str:
    return f"`{text}`"


# The parts


def schema() -> str:
    from pariskv.config import describe_schema

    rows = ((code(row.path), row.type, code(row.default), row.help) for row in describe_schema())
    return table(("Key", "Type", "Default", "Meaning"), rows)


def options() -> str:
    registry = builtin_registry()
    rows: list[tuple[str, ...]] = []
    for name in registry.names():
        dataclass = registry.retrievers[name][0].options
        if dataclass is None:
            rows.append((code(name), "none", "", ""))
            continue
        comments = comments_of(dataclass)
        for item in fields(dataclass):
            default = "required" if item.default is MISSING else code(item.default)
            rows.append((code(name), code(item.name), default, comments.get(item.name, "")))
    return table(("Retriever", "Option", "Default", "Meaning"), rows)


def builtin_registry() -> Any:
    from pariskv.registry import Registry

    return Registry.load(entry_points=False)


def comments_of(dataclass: type) -> dict[str, str]:
    """The comment behind each field, which is where options are explained."""
    lines = inspect.getsource(dataclass).splitlines()
    found = (re.match(r"\s*(\w+): [^#]*#\s*(.*)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def index_bytes() -> str:
    head = ("Retriever", "Format", "D = 64, bf16", "D = 128, bf16", "D = 256, bf16")
    registry = builtin_registry()
    instances = [(name, registry.make(name, {})) for name in registry.names()]
    instances.append(("pariskv, subspace_dim 4", registry.make("pariskv", {"subspace_dim": 4})))
    makers = sorted((name, one) for name, one in instances if hasattr(one, "allocate_codes"))
    sizes = (64, 128, 256)
    rows = [(name, code(one.format), *(f"{bytes_per_token(one, size)} B" for size in sizes)) for name, one in makers]
    return table(head, [*rows, ("keys and values", "", *(f"{4 * size} B" for size in sizes))])


def bytes_per_token(retriever: Any, head_dim: int) -> int:
    """Bytes of a format per token and key/value head, from two allocations on a line."""
    import torch

    from pariskv.types import LayerInfo

    layer = LayerInfo(0, 1, 1, 1, head_dim, torch.bfloat16, torch.device("cpu"), head_dim**-0.5)
    one, two = (retriever.allocate_codes(layer, tokens).nbytes for tokens in (256, 512))
    return int(two - one) // 256


def budget() -> str:
    from pariskv_plugins.paris.paper import COLLIDING

    from pariskv.budget import AUTO_RATIOS

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
    from pariskv.hookspecs import PluginSpec, StageSpec
    from pariskv.stages import STAGES

    rows = []
    for stage in STAGES:
        function = getattr(StageSpec, stage)
        rows.append((code(stage), code(arguments(function)), code(returned(function)), summary(function)))
    registering = PluginSpec.register_retrievers
    rows.insert(0, ("`register_retrievers`", code(arguments(registering)), "`None`", summary(registering)))
    return table(("Hook", "Arguments", "Returns", "Meaning"), rows)


def hook_reference() -> str:
    import hook_reference

    return str(hook_reference.reference())


def hook_api() -> str:
    import hook_reference

    return str(hook_reference.api())


def arguments(function: Callable[..., object]) -> str:
    return ", ".join(list(inspect.signature(function).parameters)[1:])


def returned(function: Callable[..., object]) -> str:
    return str(inspect.signature(function).return_annotation)


def summary(thing: object) -> str:
    """The first paragraph of a docstring."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def traits() -> str:
    from pariskv.hookspecs import Retriever

    tree = ast.parse(textwrap.dedent(inspect.getsource(Retriever)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    rows = [
        (code(item.target.id), code(ast.unparse(item.value)), " ".join(text.value.value.split()))
        for item, text in pairwise(body)
        if isinstance(item, ast.AnnAssign)
    ]
    return table(("Attribute", "Default", "Meaning"), rows)


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


MEASURED = sorted(file.stem for file in (ROOT / "docs" / "benchmarks").glob("*.json"))
"""Files of docs/benchmarks."""


def measured(name: str) -> str:
    """The table of what `pariskv bench COMMAND --json` wrote."""
    from pariskv.bench.output import as_markdown, read_json

    return as_markdown(read_json(ROOT / "docs" / "benchmarks" / f"{name}.json"))


PARTS: dict[str, Callable[[], str]] = {
    "schema": schema,
    "options": options,
    "index bytes": index_bytes,
    "budget": budget,
    "hooks": hooks,
    "hook reference": hook_reference,
    "hook api": hook_api,
    "traits": traits,
    "changelog": changelog,
    **{f"bench {name}": partial(measured, name) for name in MEASURED},
}


# Docstrings for the API page


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
