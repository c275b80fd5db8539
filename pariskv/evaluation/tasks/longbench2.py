"""LongBench-v2 (arXiv 2412.15204): 503 questions about long texts, four choices each, answered in words.

The prompts are the paper's: `longbench2` answers at once, `longbench2_cot` thinks first, and is then asked for the
answer by a second request, which holds the thoughts and no text. Scores by length and difficulty are the paper's, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pariskv.evaluation.tasks.answers import last_letter
from pariskv.evaluation.tasks.choices import with_letters
from pariskv.evaluation.tasks.data import Published, find, need_fields
from pariskv.evaluation.tasks.item import Item, Second, Source

DATA = Published(
    "longbench2/data.json",
    "huggingface.co/datasets/zai-org/LongBench-v2 (data.json, 465 MB)",
    ("zai-org/LongBench-v2", "data.json"),
)
CONTEXT = "Please read the following text and answer the question{s} below.\n\n<text>\n{context}\n</text>\n\n"
QUESTION = "What is the correct answer to this question: {question}\nChoices:\n{choices}\n\n"
FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'
THINK = "Let’s think step by step:"
WITHOUT_TEXT = (
    "Please read the following text and answer the questions below.\n\nThe text is too long and omitted here.\n\n"
)
CONCLUDE = f"\n\nBased on the above, what is the single, most likely answer choice? {FORMAT}"
ANSWER_TOKENS, THOUGHT_TOKENS = 128, 1024
FIELDS = ("_id", "context", "question", "answer", "difficulty", "length", *(f"choice_{one}" for one in "ABCD"))


class LongBench2:
    """The questions; `thinks` before it answers, or not."""

    samples = 1
    pass_at: Sequence[int] = ()

    def __init__(self, folder: Path | None, thinks: bool = False):
        self.thinks = thinks
        self.name = self.suite = "longbench2_cot" if thinks else "longbench2"
        self.max_new_tokens = THOUGHT_TOKENS if thinks else ANSWER_TOKENS
        found = find(DATA, folder)
        self.rows = found.rows()
        need_fields(found, self.rows, FIELDS)
        first = CONTEXT.replace("{s}", "s" * thinks) + QUESTION
        prompt = (
            f"{first}{THINK}\n\n{WITHOUT_TEXT}{QUESTION}{THINK} {{thoughts}}{CONCLUDE}" if thinks else first + FORMAT
        )
        self.source = Source("LongBench-v2", "arXiv 2412.15204", "Apache-2.0", str(found), prompt)

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int) -> Item:
        row = self.rows[index]
        choices = with_letters([row[f"choice_{letter}"] for letter in "ABCD"])
        question = QUESTION.format(question=row["question"].strip(), choices=choices)
        second = Second(f"{WITHOUT_TEXT}{question}{THINK} ", CONCLUDE, ANSWER_TOKENS)
        return Item(
            str(row["_id"]),
            CONTEXT.replace("{s}", "s" * self.thinks).replace("{context}", row["context"].strip()),
            question + (THINK if self.thinks else FORMAT),
            (row["answer"],),
            groups={"length": row["length"], "difficulty": row["difficulty"]},
            second=second if self.thinks else None,
        )

    def score(self, item: Item, answer: str) -> float:
        return float(last_letter(answer, "correct answer is") == item.wanted[0])
