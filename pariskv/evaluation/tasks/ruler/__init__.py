"""RULER (arXiv 2404.06654): thirteen tasks at any length, made here from a seed by the model's own tokenizer.

Prompts are the paper's. Essays, SQuAD and HotpotQA are the published ones where they are on this machine, else texts of
our own stand in, and the task's source says so.
"""

from __future__ import annotations

from pariskv.evaluation.tasks.ruler.base import CountTokens, RulerTask
from pariskv.evaluation.tasks.ruler.counting import CommonWords, FrequentWords
from pariskv.evaluation.tasks.ruler.niah import KINDS, NeedleTask
from pariskv.evaluation.tasks.ruler.published import Material
from pariskv.evaluation.tasks.ruler.questions import Questions
from pariskv.evaluation.tasks.ruler.tracing import VariableTracking

NAMES = (*KINDS, "vt", "cwe", "fwe", "qa_1", "qa_2")
"""The thirteen."""


def max_new_tokens(name: str) -> int:
    """Tokens of an answer of one of the thirteen at most."""
    if name in KINDS:
        return NeedleTask.max_new_tokens
    others = {"vt": VariableTracking, "cwe": CommonWords, "fwe": FrequentWords}
    return others[name].max_new_tokens if name in others else Questions.max_new_tokens


def ruler_task(name: str, length: int, count_tokens: CountTokens, material: Material, seed: int = 0) -> RulerTask:
    """One of the thirteen at one length."""
    if name in KINDS:
        return NeedleTask(name, length, count_tokens, material.hay(), seed)
    if name == "vt":
        return VariableTracking(length, count_tokens, seed)
    if name == "cwe":
        return CommonWords(length, count_tokens, seed)
    if name == "fwe":
        return FrequentWords(length, count_tokens, seed)
    library = material.squad() if name == "qa_1" else material.hotpotqa()
    return Questions(name, length, count_tokens, library, seed)
