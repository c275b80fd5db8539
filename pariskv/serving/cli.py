"""`pariskv run CONFIG --prompts FILE`: many prompts, a batch at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pariskv.config import Config
from pariskv.errors import ConfigError

SOME_FAILED = 1
DEFAULT_BATCH = 8


def check_options(prompts: Path | None, others: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise ConfigError for options that do not go together: `others` are for one prompt, `own` for a file of them."""
    refused, what = (others, "is for one prompt") if prompts else (own, "is for --prompts FILE")
    for name, value in refused.items():
        if value not in (None, False):
            raise ConfigError(f"{name} {what}, which was {'also' if prompts else 'not'} given")


def run_prompts(settings: Config, prompts: Path, rows: int, output: Path | None, resume: bool) -> None:
    """Answer them; results go to the output, or as JSON lines to standard output. Exit code 1 where some failed."""
    from pariskv.serving.serve import answer_file
    from pariskv.session import Session

    if not prompts.is_file():
        raise ConfigError(f"--prompts {prompts}: no such file (looked in {Path.cwd()})")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.absolute().parent}")
    session = Session.load(settings)
    with _progress() as progress:
        served = answer_file(session, prompts, rows, output, resume, progress)
    if output is None:
        for result in served.results:
            print(json.dumps(result, ensure_ascii=False))
    earlier = f", {served.resumed} of them by an earlier run" if served.resumed else ""
    print(f"{len(served.results)} prompts answered{earlier}; {served.failed} failed", file=sys.stderr)
    if served.failed:
        raise typer.Exit(SOME_FAILED)


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on standard error, none where nobody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=None)

        def update(done: int, total: int, failed: int) -> None:
            what = f"prompts ({failed} failed)" if failed else "prompts"
            bar.update(task, description=what, completed=done, total=total)

        yield update
