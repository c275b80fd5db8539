"""What the pages take from the code at build time: tables of the schema, the options, the hooks and the commands.

A page says `<!-- generated: NAME -->` where Markdown goes, and `<!-- drawn: NAME -->` where a chart goes. mkdocs runs
this file (`hooks:` in mkdocs.yml). The parts are made by the modules beside it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARKER = re.compile(r"<!-- generated: ([a-z0-9 -]+?) -->")
CHART = re.compile(r"<!-- drawn: (\w+) -->")
DIAGRAM = re.compile(r'<img alt="([^"]*)" src="[^"]*img/([\w-]+\.svg)"\s*/?>')


def on_startup(**_: Any) -> None:
    """The checkout's own code is documented, whether or not it is installed."""
    sys.path[:0] = [str(ROOT / folder) for folder in ("", "plugins", "kernels", "docs/hooks")]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the generated parts in; an unknown name is an error."""
    known = parts()
    return MARKER.sub(lambda match: known[match[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put charts and diagrams into the page itself, so that they follow its light or dark colours."""
    import landing

    charts = {"speed": landing.speed, "quality": landing.quality}
    html = CHART.sub(lambda match: charts[match[1]](), html)
    return DIAGRAM.sub(lambda match: diagram(match[2]), html)


def diagram(name: str) -> str:
    return (ROOT / "docs" / "img" / name).read_text(encoding="utf-8").strip()


def parts() -> dict[str, Callable[[], str]]:
    """What a marker may name."""
    import cli_reference
    import code_tables
    import hook_reference
    import plan_tables
    import retriever_pages

    measured = sorted(file.stem for file in (ROOT / "docs" / "benchmarks").glob("*.json"))
    return {
        "schema": code_tables.schema,
        "budget": code_tables.budget,
        "hooks": code_tables.hooks,
        "traits": code_tables.traits,
        "hook reference": hook_reference.reference,
        "hook api": hook_reference.api,
        "commands": cli_reference.overview,
        "command reference": cli_reference.reference,
        "retrievers": retriever_pages.overview,
        "index bytes": retriever_pages.index_bytes,
        **{f"options {name}": partial(retriever_pages.options, name) for name in retriever_pages.names()},
        **{f"cost {name}": partial(retriever_pages.cost, name) for name in retriever_pages.names()},
        **{f"declared {name}": partial(retriever_pages.declared, name) for name in retriever_pages.names()},
        "prompt times": plan_tables.prompts,
        "step times": plan_tables.steps,
        "paper memory": plan_tables.memory,
        "paper times": plan_tables.times,
        "changelog": changelog,
        **{f"bench {name}": partial(bench, name) for name in measured},
    }


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def bench(name: str) -> str:
    """The table of what `pariskv bench COMMAND --json` wrote to docs/benchmarks."""
    from pariskv.bench.output import as_markdown, read_json

    return as_markdown(read_json(ROOT / "docs" / "benchmarks" / f"{name}.json"))
