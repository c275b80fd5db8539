"""The commands about plugins: `pariskv plugins [NAME]` and `pariskv new-plugin NAME`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="a retriever, to see its options")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]


def plugins(name: Name = None, as_json: AsJson = False) -> None:
    """List the retrievers that are installed, and what is wrong with broken ones; of one of them, its options."""
    from pariskv.cli import wide_console
    from pariskv.describe import describe_retriever
    from pariskv.registry import Registry

    registry = Registry.load()
    if name is not None:
        described = describe_retriever(name, registry)
        if as_json:
            print(json.dumps(described.to_dict()))
        else:
            wide_console().print(*described.renderables(), sep="\n")
        return
    rows = registry.listing()
    keys = ("name", "distribution", "version", "stages", "format", "error")
    if as_json:
        print(json.dumps([{key: asdict(row)[key] for key in keys} for row in rows]))
        return
    table = Table(*keys)
    for row in rows:
        stages = ", ".join(row.stages)
        table.add_row(row.name, row.distribution, row.version, stages, row.format or "", row.error or "")
    wide_console().print(table)


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="what the retriever is called, such as my-idea")],
    into: Annotated[Path, typer.Option(help="where the new folder goes")] = Path(),
) -> None:
    """Write a package with a retriever that works (options, tests, README, CI), to be changed into your idea."""
    from pariskv.new_plugin import create, names_of
    from pariskv.registry import Registry

    names = names_of(name, Registry.load())
    folder, *files = create(names, into)
    for file in files:
        print(f"  {file.relative_to(folder)}")
    print(f"{folder}: a retriever {name!r} that works. Next:")
    print(f"  cd {folder} && pip install -e '.[dev]' && pytest && pariskv run {name}.yaml")
    print(f"Your idea goes into src/{names.package}/retriever.py.")
    print(f"The tests, {name}.yaml and README.md name its option, too: change them with it.")
