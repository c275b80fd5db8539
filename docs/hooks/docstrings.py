"""A griffe extension: the project's docstrings, laid out for readers of the source, as Markdown for the API page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import griffe

_spec = importlib.util.spec_from_file_location("docs_generate", Path(__file__).with_name("generate.py"))
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


class Docstrings(griffe.Extension):
    """Rewrites every docstring once, as it is collected."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = generate.as_markdown(obj.docstring.value)
