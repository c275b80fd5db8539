"""The results of a file of prompts on the disk: what is done is there at once, whatever happens next.

Beside the output file lies `<output>.journal` while the work goes on: a first line that says what it belongs to, then
one result a line, in the order in which they were ready, each flushed to the disk. `finish` writes the output file,
in the order of the prompts, as a whole or not at all, and removes the journal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from pariskv.errors import ConfigError, PrefixError
from pariskv.prefix.atomic import replacing

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
            self._take_up(header)
        else:
            self._begin(header)

    def _begin(self, header: Mapping[str, Any]) -> None:
        if self.path.exists():
            raise ConfigError(
                f"--output {self.output}: an interrupted run left {self.path}; go on with --resume, or delete it"
            )
        try:
            self._file: BinaryIO = self.path.open("xb")
        except OSError as error:
            raise ConfigError(f"--output {self.output}: {self.path} cannot be written: {error}") from error
        self._write(header)

    def _take_up(self, header: Mapping[str, Any]) -> None:
        if not self.path.exists():
            what = "is finished" if self.output.exists() else "was not begun"
            raise ConfigError(f"--resume: there is no {self.path}, the work {what}; run it without --resume")
        lines = self.path.read_bytes().splitlines(keepends=True)
        # The last line may have been cut off by what interrupted the run; its request is answered again.
        whole = [line for line in lines if line.endswith(b"\n")]
        found = _parsed(whole[0]) if whole else None
        if found != json.loads(json.dumps(header)):
            raise ConfigError(f"--resume: {self.path} {_difference(found, header)}; delete it to begin anew")
        results = [_parsed(line) for line in whole[1:]]
        self.done = {int(result["index"]): result for result in results if result is not None}
        self._file = self.path.open("r+b")
        self._file.truncate(sum(map(len, whole)))
        self._file.seek(0, os.SEEK_END)

    def add(self, result: Result) -> None:
        """Keep a result; it is on the disk when this returns."""
        self._write(result)
        self.done[int(result["index"])] = result

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.write(_line(line))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be written: {error.strerror or error}; make room and go on with --resume"
            ) from error

    def finish(self) -> None:
        """Write the output file in the order of the prompts, and remove the journal."""
        lines = b"".join(_line(result) for _, result in sorted(self.done.items()))
        try:
            with replacing(self.output, len(lines), "the results' file") as file:
                file.write(lines)
        except PrefixError as error:
            raise ConfigError(f"{error}. The results are in {self.path}: --resume then writes the file") from error
        self.close()
        self.path.unlink()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(found: Mapping[str, Any]) -> bytes:
    return json.dumps(found, ensure_ascii=False).encode() + b"\n"


def _parsed(line: bytes) -> Result | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _difference(found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> str:
    """What a journal's first line says that it should not."""
    if found is None:
        return "does not begin with a journal's header"
    keys = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    return f"is of other work: {', '.join(keys)} differ"


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
