r"""MATH500 (arXiv 2305.20050) and AIME25: problems whose answers are in \boxed{}, compared as values by math-verify."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pariskv.evaluation.tasks.answers import is_same_value, last_boxed
from pariskv.evaluation.tasks.data import Published, find, need_fields
from pariskv.evaluation.tasks.item import Item, Source

MATH500_DATA = Published(
    "math500/test.jsonl",
    "huggingface.co/datasets/HuggingFaceH4/MATH-500 (test.jsonl)",
    ("HuggingFaceH4/MATH-500", "test.jsonl"),
)
AIME25_DATA = Published(
    "aime25/test.jsonl", "huggingface.co/datasets/math-ai/aime25 (test.jsonl)", ("math-ai/aime25", "test.jsonl")
)
AIME25_SAMPLES = 8
QUESTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."


class BoxedProblems:
    """Problems with a final answer, of which the last boxed expression counts."""

    max_new_tokens = 32_768

    def __init__(self, name: str, source: Source, rows: Sequence[dict[str, Any]], samples: int, pass_at: Sequence[int]):
        self.name = self.suite = name
        self.source, self.rows = source, rows
        self.samples, self.pass_at = samples, pass_at

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int) -> Item:
        row = self.rows[index]
        groups: dict[str, str] = {name: str(row[name]) for name in ("level", "subject") if name in row}
        name = str(row.get("unique_id", row.get("id", index)))
        return Item(name, row["problem"].strip(), QUESTION, (str(row["answer"]),), groups=groups)

    def score(self, item: Item, answer: str) -> float:
        given = last_boxed(answer)
        return float(given is not None and is_same_value(item.wanted[0], given))


def math500(folder: Path | None) -> BoxedProblems:
    """500 problems of MATH, one answer each."""
    return _problems("math500", "MATH500", "arXiv 2305.20050", "MIT", MATH500_DATA, folder, 1, ())


def aime25(folder: Path | None) -> BoxedProblems:
    """The 30 problems of AIME I and II of 2025, eight answers each, for pass@8."""
    licence = "Apache-2.0 by its card (the problems are the MAA's)"
    return _problems(
        "aime25", "AIME25", "AIME I and II, 2025", licence, AIME25_DATA, folder, AIME25_SAMPLES, (AIME25_SAMPLES,)
    )


def _problems(
    name: str,
    title: str,
    version: str,
    licence: str,
    data: Published,
    folder: Path | None,
    samples: int,
    pass_at: Sequence[int],
) -> BoxedProblems:
    found = find(data, folder)
    rows = found.rows()
    need_fields(found, rows, ("problem", "answer"))
    source = Source(title, version, licence, str(found), "{problem}" + QUESTION)
    return BoxedProblems(name, source, rows, samples, pass_at)
