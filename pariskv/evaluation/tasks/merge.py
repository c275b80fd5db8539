"""Shards of one run, joined: the folder that an unsharded run would have left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.evaluation import Answered
from pariskv.evaluation.tasks.folder import (
    ANSWERS,
    PROMPTS,
    RunFolder,
    Shard,
    read_answers,
    read_manifest,
)
from pariskv.records import differing, drop_broken_line, read_lines


def merge(folders: Sequence[Path], out: Path) -> RunFolder:
    """A new folder with the answers of every shard, in the order of an unsharded run.

    Raises ConfigError where the folders are not all the shards of one run, once each, or one is not finished.
    """
    manifests = [read_manifest(folder) for folder in folders]
    first = manifests[0]
    for folder, manifest in zip(folders, manifests, strict=True):
        if shown := differing(first["run"], manifest["run"]):
            raise ConfigError(f"{folder}: not of the same run as {folders[0]}; they differ in {shown}")
    _refuse_gaps(folders, [Shard.parse(manifest["shard"]) for manifest in manifests])
    tasks, retrievers = first["run"]["tasks"], first["run"]["settings"]["retrievers"]
    whole = {**first, "shard": str(Shard()), "arguments": {**first["arguments"], "shards": None}}
    joined = RunFolder.open(out, whole)
    for folder in folders:
        for name in (PROMPTS, ANSWERS):
            drop_broken_line(folder / name)
    records = {record.key: record for folder in folders for record in read_answers(folder)}
    prompts = {(row["task"], row["index"]): row["prompt"] for f in folders for row in read_lines(f / PROMPTS)}
    for task in tasks:
        name = task["name"]
        for number in range(task["items"] * task["samples"]):
            index, sample = divmod(number, task["samples"])
            keys = [(name, index, sample, retriever) for retriever in retrievers]
            if any(key not in records for key in keys):
                raise ConfigError(
                    f"{name}: item {index} has no answer by every retriever in these shards; let the one that lacks it "
                    f"go on, by the same command again"
                )
            if joined.lacks(keys):
                joined.add(Answered([records[key] for key in keys], {index: prompts[name, index]}))
    return joined


def _refuse_gaps(folders: Sequence[Path], shards: Sequence[Shard]) -> None:
    counts = {shard.count for shard in shards}
    if len(counts) > 1:
        raise ConfigError(
            f"the folders are shards of {' and '.join(map(str, sorted(counts)))}; wanted those of one split"
        )
    given = [shard.index for shard in shards]
    if twice := sorted({index for index in given if given.count(index) > 1}):
        raise ConfigError(f"shard {twice[0]}/{shards[0].count} is given twice, one of them as {folders[-1]}")
    if missing := sorted(set(range(1, shards[0].count + 1)) - set(given)):
        raise ConfigError(
            f"shard {', '.join(f'{index}/{shards[0].count}' for index in missing)} is missing; run it with --shards, "
            f"then give its folder too"
        )
