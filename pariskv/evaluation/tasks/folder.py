"""What a run leaves, and goes on from: a folder with its manifest, its prompts and answers as JSON lines, its scores.

manifest.json   what was asked, of what, with what and where      prompts.jsonl   every prompt once
answers.jsonl   every answer of every retriever                   scores.json, report.html   what they say
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pariskv.config import to_dict
from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.evaluation import Answered, Evaluation, Key, Record
from pariskv.records import append_lines, differing, drop_broken_line, read_lines

MANIFEST, PROMPTS, ANSWERS, SCORES, REPORT = (
    "manifest.json",
    "prompts.jsonl",
    "answers.jsonl",
    "scores.json",
    "report.html",
)


@dataclass(frozen=True)
class Shard:
    """The units whose index is `index` - 1 modulo `count`."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/4`: the second of four; ConfigError for anything else."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
            raise ConfigError(f"--shards: got {text!r}, wanted I/N with 1 <= I <= N, such as 1/4")
        return cls(int(index), int(count))

    def has(self, unit: int) -> bool:
        return unit % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def description(evaluation: Evaluation) -> dict[str, Any]:
    """All that answers depend on, as plain values: runs can be joined where this is the same."""
    config = to_dict(evaluation.config)
    del config["evaluation"]  # the settings say what became of it
    tasks = [
        {
            "name": task.name,
            "items": evaluation.items(task),
            "samples": evaluation.samples(task),
            "max_new_tokens": evaluation.new_tokens(task),
            "pass_at": list(task.pass_at),
            "source": asdict(task.source),
        }
        for task in evaluation.tasks
    ]
    found = {"config": config, "settings": evaluation.settings.to_dict(), "tasks": tasks}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


class RunFolder:
    """A folder that one process writes."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]):
        self.path = path
        self.manifest = manifest
        self.records = {record.key: record for record in read_answers(path)}
        self._prompts = {(row["task"], row["index"]) for row in read_lines(path / PROMPTS)}

    @classmethod
    def open(cls, path: Path, manifest: Mapping[str, Any]) -> RunFolder:
        """A new folder, or one of an earlier run of the same, to go on with.

        manifest  its `run` and `shard` must be those of the run that is there
        Raises ConfigError where the folder is another run's, or cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / MANIFEST).is_file():
                _refuse_other(path, read_manifest(path), manifest)
            elif any(path.iterdir()):
                raise ConfigError(f"--out {path}: the folder is not empty and not of a run; give another")
            else:
                write_json(path / MANIFEST, manifest)
        except OSError as error:
            raise ConfigError(f"--out {path}: cannot be written: {error}") from error
        for name in (PROMPTS, ANSWERS):
            drop_broken_line(path / name)
        return cls(path, manifest)

    def lacks(self, keys: Iterable[Key]) -> bool:
        """Whether one of these answers is not there yet."""
        return any(key not in self.records for key in keys)

    def add(self, answered: Answered) -> None:
        """Write answers, all at once, and their prompts where these are not there yet."""
        records, prompts = answered.records, answered.prompts
        task = records[0].task
        new = {index: text for index, text in prompts.items() if (task, index) not in self._prompts}
        self._prompts |= {(task, index) for index in new}
        rows = [{"task": task, "index": index, "prompt": text} for index, text in new.items()]
        append_lines(self.path / PROMPTS, rows)
        append_lines(self.path / ANSWERS, [record.to_dict() for record in records])
        self.records |= {record.key: record for record in records}


def read_manifest(path: Path) -> dict[str, Any]:
    """A run's manifest; ConfigError where the folder has none."""
    try:
        found: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not the folder of a run ({MANIFEST}: {error})") from error
    if "run" not in found or "shard" not in found:
        raise ConfigError(f"{path}: {MANIFEST} is not that of `pariskv eval tasks`")
    return found


def read_answers(path: Path) -> list[Record]:
    """The answers of a run; the last one of each, where a batch was written twice."""
    found = [Record(**row) for row in read_lines(path / ANSWERS)]
    return list({record.key: record for record in found}.values())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A whole file or none."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _refuse_other(path: Path, there: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    saved, asked = ({"shard": one["shard"]} for one in (there, given))
    if shown := differing(there["run"], given["run"]) or differing(saved, asked):
        raise ConfigError(
            f"--out {path}: holds another run, which differs in {shown}; give another folder, or ask for the same again"
        )
