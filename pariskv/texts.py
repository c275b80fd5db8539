"""Real texts that every machine has: the documentation and the sources of Python's standard library.

Calibration and evaluation read them where the user gives no text. The names say what they are: prose is the language
reference and the built-in help, source is a module's code.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from pariskv.errors import ConfigError

MODULES = ("argparse", "_pydecimal", "tarfile", "typing", "inspect", "difflib", "subprocess", "pickle")
"""Long modules that every Python of 3.11 and later has as source."""


def prose(part: int = 0, parts: int = 2) -> str:
    """The help topics of the interpreter, one after the other; `part` of `parts` of about the same length."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name].strip() for name in sorted(topics))
    size = len(whole) // parts
    return whole[part * size : (part + 1) * size]


def source(module: str) -> str:
    """The source text of a module of the standard library."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"this Python has no source of the module {module!r}; give a --text-file")
    return Path(spec.origin).read_text(encoding="utf-8")


STANDARD: Mapping[str, Callable[[], str]] = {
    "prose-1": lambda: prose(0),
    "prose-2": lambda: prose(1),
    "source-1": lambda: source(MODULES[0]),
    "source-2": lambda: source(MODULES[1]),
}
"""The texts of `pariskv eval` by name: two of prose, two of source code."""

CALIBRATION: Mapping[str, Callable[[], str]] = {
    "prose": lambda: prose(3, 5),
    "source": lambda: source(MODULES[2]),
}
"""The texts of `pariskv calibrate`: others than those that are evaluated."""


def read_text(path: Path) -> str:
    """A text file's content; ConfigError where it cannot be read or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a text file: {error}") from error
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; give one with some text")
    return text


def sha256(text: str) -> str:
    """What tells a text from others in a manifest."""
    return hashlib.sha256(text.encode()).hexdigest()
