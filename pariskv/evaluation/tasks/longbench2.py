"""LongBench-v2 (arXiv 2412.15204): 503 questions about long texts, four choices each, answered in words.

The prompt is the paper's, without chain of thought. Scores by length and difficulty class are the paper's, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pariskv.evaluation.tasks.answers import last_letter
from pariskv.evaluation.tasks.choices import with_letters
from pariskv.evaluation.tasks.data import Published, find, need_fields
from pariskv.evaluation.tasks.item import Item, Source

DATA = Published(
    "longbench2/data.json",
    "huggingface.co/datasets/zai-org/LongBench-v2 (data.json, 465 MB)",
    ("zai-org/LongBench-v2", "data.json"),
)
CONTEXT = "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
QUESTION = (
    "What is the correct answer to this question: {question}\nChoices:\n{choices}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)
FIELDS = ("_id", "context", "question", "answer", "difficulty", "length", *(f"choice_{one}" for one in "ABCD"))


class LongBench2:
    name = suite = "longbench2"
    max_new_tokens = 128
    samples = 1
    pass_at: Sequence[int] = ()

    def __init__(self, folder: Path | None):
        found = find(DATA, folder)
        self.rows = found.rows()
        need_fields(found, self.rows, FIELDS)
        self.source = Source("LongBench-v2", "arXiv 2412.15204", "Apache-2.0", str(found), CONTEXT + QUESTION)

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int) -> Item:
        row = self.rows[index]
        choices = with_letters([row[f"choice_{letter}"] for letter in "ABCD"])
        return Item(
            str(row["_id"]),
            CONTEXT.replace("{context}", row["context"].strip()),
            QUESTION.format(question=row["question"].strip(), choices=choices),
            (row["answer"],),
            groups={"length": row["length"], "difficulty": row["difficulty"]},
        )

    def score(self, item: Item, answer: str) -> float:
        return float(last_letter(answer, "correct answer is") == item.wanted[0])
