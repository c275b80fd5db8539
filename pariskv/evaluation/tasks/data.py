"""Files of published data: found in `--data` or in the hub's cache, downloaded from the hub, checked, never changed."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pariskv.errors import ConfigError

PIECE = 1 << 20


@dataclass(frozen=True)
class Published:
    """A file that somebody else publishes.

    path     where it lies under `--data`
    where    where people get it, in words
    hub      the data set of the hub, and the file in it; None where the hub has none that can be read as it is
    sha256   of the files that it can be, none where its source is not fixed
    is_gated the hub wants its terms accepted before
    """

    path: str
    where: str
    hub: tuple[str, str] | None = None
    sha256: tuple[str, ...] = ()
    is_gated: bool = False


@dataclass(frozen=True)
class Found:
    """A file on this machine."""

    path: Path
    sha256: str

    def __str__(self) -> str:
        return f"{self.path.name}, sha256 {self.sha256}"

    def rows(self) -> list[dict[str, Any]]:
        """What a list in JSON, lines of JSON or a table in CSV holds; ConfigError where it is none."""
        try:
            if self.path.suffix == ".csv":
                with self.path.open(encoding="utf-8", newline="") as file:
                    return list(csv.DictReader(file))
            text = self.path.read_text(encoding="utf-8")
            if self.path.suffix == ".jsonl":
                return [json.loads(line) for line in text.splitlines() if line.strip()]
            rows = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{self.path}: cannot be read as {self.path.suffix[1:]}: {error}") from error
        return list(rows) if isinstance(rows, list) else [rows]


def find(published: Published, folder: Path | None, download: bool = True) -> Found:
    """The file under `folder` (`--data`), else from the hub; ConfigError says what to get, and where to put it.

    download  ask the hub for what is not in its cache on this machine
    """
    path = None if folder is None else folder / published.path
    if path is None or not path.is_file():
        path = _from_hub(published, download)
    digest = sha256_of(path)
    if published.sha256 and digest not in published.sha256:
        raise ConfigError(
            f"{path}: its sha256 is {digest}, wanted {' or '.join(published.sha256)}; it is damaged or another "
            f"version: get it anew from {published.where}"
        )
    return Found(path, digest)


def has(published: Published, folder: Path | None) -> bool:
    """Whether the file is on this machine."""
    from pariskv.integrations.dataset_files import cached_file

    in_folder = folder is not None and (folder / published.path).is_file()
    return in_folder or (published.hub is not None and cached_file(*published.hub) is not None)


def _from_hub(published: Published, download: bool) -> Path:
    from pariskv.integrations.dataset_files import GatedError, cached_file, download_file

    reason = "the hub has no file of it"
    if published.hub is not None:
        if (path := cached_file(*published.hub)) is not None:
            return path
        reason = "it is not in the hub's cache on this machine"
        if download:
            try:
                return download_file(*published.hub)
            except GatedError as error:
                reason = f"the hub does not give it away: {error}"
            except Exception as error:  # whatever the hub's HTTP library lets through
                reason = f"the hub cannot serve it: {' '.join(str(error).split())[:160] or type(error).__name__}"
    gated = "It is gated: accept its terms there, then run `hf auth login` or download by hand. " * published.is_gated
    raise ConfigError(
        f"{published.path} is not on this machine ({reason}). {gated}Get it from {published.where}, put it at "
        f"DIR/{published.path} and give --data DIR"
    )


def sha256_of(path: Path) -> str:
    """The digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def need_fields(found: Found, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Raise ConfigError where a file has no row, or a row lacks a field."""
    if not rows:
        raise ConfigError(f"{found.path}: holds no items")
    for index, row in enumerate(rows):
        if missing := [name for name in names if name not in row]:
            raise ConfigError(
                f"{found.path}: item {index} has no {', '.join(map(repr, missing))}; is it the right file?"
            )
