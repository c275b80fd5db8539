"""Tiny made-up samples in the form of the published data sets, as they lie under `--data`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

PROBLEMS: list[dict[str, Any]] = [
    {"problem": "w1 w2 w3", "answer": "\\frac{1}{2}", "level": 1, "subject": "Algebra", "unique_id": "one"},
    {"problem": "w4 w5", "answer": "w7", "level": 5, "subject": "Geometry", "unique_id": "two"},
    {"problem": "w6 w8 w9 w9", "answer": "3", "level": 5, "subject": "Algebra", "unique_id": "three"},
]


def write_all(folder: Path) -> None:
    """Every data set but RULER's."""
    for name in ("longbench2", "gpqa", "math500", "aime25"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _write_lines(folder / "math500/test.jsonl", PROBLEMS)
    _write_lines(folder / "aime25/test.jsonl", [{"problem": "w1 w1", "answer": "70", "id": "0"}])
    texts = [
        {
            "_id": f"id{index}",
            "context": "w1 w2 " * 20,
            "question": "w3 w4?",
            **{f"choice_{letter}": f"w{index} {letter}" for index, letter in enumerate("ABCD")},
            "answer": "B",
            "difficulty": ("easy", "hard")[index % 2],
            "length": ("short", "medium", "long")[index % 3],
        }
        for index in range(4)
    ]
    (folder / "longbench2/data.json").write_text(json.dumps(texts), encoding="utf-8")
    with (folder / "gpqa/gpqa_diamond.csv").open("w", encoding="utf-8", newline="") as file:
        wrong = [f"Incorrect Answer {index}" for index in (1, 2, 3)]
        table = csv.DictWriter(file, ["Record ID", "Question", "Correct Answer", *wrong])
        table.writeheader()
        for index in range(8):
            choices = {"Correct Answer": f"right {index}", **{name: f"{name[-1]} wrong" for name in wrong}}
            table.writerow({"Record ID": f"rec{index}", "Question": f"w{index}, why?", **choices})


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
