"""What an answer says: letters of choices, numbers in boxes, references that occur in it."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Sequence
from typing import Any

from pariskv.errors import ConfigError

END_OF_THOUGHT = "</think>"
SECONDS = 5
"""How long an expression may take to be read, and two to be compared."""

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def spoken(answer: str) -> str:
    """What comes after a reasoning model's thoughts; all of it where no thought ends."""
    return answer.rpartition(END_OF_THOUGHT)[2]


def share_found(wanted: Sequence[str], answer: str) -> float:
    """The share of the references that occur in the answer, in any case: RULER's `string_match_all`."""
    text = answer.lower()
    return sum(one.lower() in text for one in wanted) / len(wanted)


def any_found(wanted: Sequence[str], answer: str) -> float:
    """1 where one of the references occurs in the answer, in any case: RULER's `string_match_part`."""
    text = answer.lower()
    return float(any(one.lower() in text for one in wanted))


def last_letter(answer: str, introduced_by: str) -> str | None:
    """The last letter A to D after the words, bare, in brackets, bold or in a LaTeX box; None without one."""
    opening = r"[\s*_$:]*(?:\\(?:boxed|text|mathrm)\s*\{)*[\s*_$(\[{]*"
    found = re.findall(rf"(?i:{introduced_by}){opening}([A-D])(?![A-Za-z])", spoken(answer))
    return found[-1] if found else None


def last_boxed(answer: str) -> str | None:
    r"""What the last \boxed{...} holds, braces balanced; None where none is closed."""
    text = spoken(answer)
    for opening in reversed(list(BOX.finditer(text))):
        depth = 1
        for index in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[opening.end() : index].strip()
    return None


def is_same_value(wanted: str, given: str) -> bool:
    """Whether two mathematical expressions are the same value in another form, by math-verify."""
    if wanted.strip() == given.strip():
        return True
    checker = _math_verify()
    # Its time limits are signals, which only a process's main thread may set.
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    left, right = (checker.parse(f"\\boxed{{{text}}}", parsing_timeout=seconds) for text in (wanted, given))
    return bool(checker.verify(left, right, timeout_seconds=seconds))


def _math_verify() -> Any:
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError("math500 and aime25 need math-verify: pip install 'pariskv[tasks]'") from error
