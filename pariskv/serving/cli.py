"""`pariskv run CONFIG --prompts FILE`: many prompts, a batch at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pariskv.config import Config
from pariskv.errors import ConfigError
from pariskv.progress import Show, described_progress

if TYPE_CHECKING:
    from pariskv.serving.serve import Progress

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
    with described_progress() as show:
        served = answer_file(session, prompts, rows, output, resume, _shown(show))
    if output is None:
        for result in served.results:
            print(json.dumps(result, ensure_ascii=False))
    earlier = f", {served.resumed} of them by an earlier run" if served.resumed else ""
    print(f"{len(served.results)} prompts answered{earlier}; {served.failed} failed", file=sys.stderr)
    if served.failed:
        raise typer.Exit(SOME_FAILED)


def _shown(show: Show) -> Progress:
    return lambda done, total, failed: show(f"prompts ({failed} failed)" if failed else "prompts", done, total)
