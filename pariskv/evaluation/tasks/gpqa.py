"""GPQA-Diamond (arXiv 2311.12022): 198 questions of science, choices in an order of their own, chain of thought."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from pariskv.evaluation.tasks.answers import last_letter
from pariskv.evaluation.tasks.choices import LETTERS, with_letters
from pariskv.evaluation.tasks.data import Published, find, need_fields
from pariskv.evaluation.tasks.item import Item, Source

DATA = Published(
    "gpqa/gpqa_diamond.csv",
    "huggingface.co/datasets/Idavidrein/gpqa (gpqa_diamond.csv)",
    ("Idavidrein/gpqa", "gpqa_diamond.csv"),
    is_gated=True,
)
PROMPT = (
    "Answer the following multiple choice question. Think step by step before answering. The last line of your "
    "response must be of the form 'Answer: LETTER', where LETTER is one of A, B, C and D.\n\n"
)
QUESTION = "{question}\n\n{choices}"
RIGHT, WRONG = "Correct Answer", tuple(f"Incorrect Answer {index}" for index in (1, 2, 3))


class GPQADiamond:
    name = suite = "gpqa_diamond"
    max_new_tokens = 32_768
    samples = 1
    pass_at: Sequence[int] = ()

    def __init__(self, folder: Path | None, seed: int = 0):
        found = find(DATA, folder)
        self.rows, self.seed = found.rows(), seed
        need_fields(found, self.rows, ("Question", RIGHT, *WRONG))
        self.source = Source("GPQA-Diamond", "arXiv 2311.12022", "CC BY 4.0", str(found), PROMPT + QUESTION)

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int) -> Item:
        row = self.rows[index]
        order = random.Random(f"{self.seed}/gpqa/{index}").sample((RIGHT, *WRONG), 4)
        choices = with_letters([row[name] for name in order])
        return Item(
            str(row.get("Record ID") or index),
            PROMPT,
            QUESTION.format(question=row["Question"].strip(), choices=choices),
            (LETTERS[order.index(RIGHT)],),
            groups={"domain": row["High-level domain"]} if row.get("High-level domain") else {},
        )

    def score(self, item: Item, answer: str) -> float:
        return float(last_letter(answer, "answer") == item.wanted[0])
