"""The results of a file of prompts on the disk: what is done is there at once, whatever happens next.

Beside the output file lies `<output>.journal` while the work goes on: a first line that says what it belongs to, then
one result a line, in the order in which they were ready, each flushed to the disk. `finish` writes the output file,
in the order of the prompts, as a whole or not at all, and removes the journal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pariskv.errors import ConfigError, PrefixError
from pariskv.prefix.atomic import replacing
from pariskv.records import append_lines, as_lines, differing, drop_broken_line, read_lines

VERSION = 1

Result = dict[str, Any]
"""A line of the output; `index` is the prompt's."""


class Journal:
    """Results by the prompt's index; `done` are those that an interrupted run has left.

    Raises ConfigError where there is a journal and `resume` is false, none and it is true, or one of other work.
    """

    def __init__(self, output: Path, belongs: Mapping[str, Any], resume: bool):
        self.output = output
        self.path = output.with_name(output.name + ".journal")
        self.done: dict[int, Result] = {}
        header = {"pariskv_journal": VERSION, **belongs}
        if resume:
            self._take_up(json.loads(json.dumps(header)))
        elif self.path.exists():
            raise ConfigError(
                f"--output {output}: an interrupted run left {self.path}; --resume it, or delete that file"
            )
        else:
            self._write([header])

    def _take_up(self, header: Mapping[str, Any]) -> None:
        if not self.path.exists():
            what = "is finished" if self.output.exists() else "was not begun"
            raise ConfigError(f"--resume: there is no {self.path}, the work {what}; run it without --resume")
        # The last line may have been cut off by what interrupted the run; its request is answered again.
        drop_broken_line(self.path)
        try:
            found, *results = read_lines(self.path)
            if not isinstance(found, dict):
                raise TypeError("its first line is no object")
            self.done = {int(result["index"]): result for result in results}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--resume: {self.path} is no journal ({error}); delete it to begin anew") from error
        if shown := differing(found, header):
            raise ConfigError(f"--resume: {self.path} is of other work: {shown} differ; delete it to begin anew")

    def add(self, result: Result) -> None:
        """Keep a result; it is on the disk when this returns."""
        self._write([result])
        self.done[int(result["index"])] = result

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            append_lines(self.path, rows)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"{self.path}: cannot be written: {why}; make room, and go on with --resume") from error

    def finish(self) -> None:
        """Write the output file in the order of the prompts, and remove the journal."""
        lines = as_lines([result for _, result in sorted(self.done.items())])
        try:
            with replacing(self.output, len(lines), "the results' file") as file:
                file.write(lines)
        except PrefixError as error:
            raise ConfigError(f"{error}. The results are in {self.path}: --resume then writes the file") from error
        self.path.unlink()


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
