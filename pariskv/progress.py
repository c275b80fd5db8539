"""Progress on standard error, for whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Show = Callable[[str, int, int], None]
"""Called with (what it is about, done, in all)."""


@contextmanager
def described_progress(until_full: bool = False) -> Iterator[Show]:
    """A bar that says what it is about; gone in the end, none where nobody watches.

    until_full  gone as soon as all is done, for what is printed after that
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            if until_full and done >= total:
                bar.stop()

        yield show
