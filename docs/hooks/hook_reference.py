"""The hook reference: every hook with its exact arguments and its docstring, from `pariskv.hookspecs`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

from pariskv import types
from pariskv.hookspecs import HOOK_API, PluginSpec, Register, StageSpec
from pariskv.stages import STAGES

TYPE = re.compile(r"[A-Z]\w+")


def reference() -> str:
    """A heading, the signature and the meaning of each hook, in the contract's order."""
    hooks = [PluginSpec.register_retrievers, *(getattr(StageSpec, stage) for stage in STAGES)]
    return "\n\n".join(part for hook in hooks for part in _described(hook))


def api() -> str:
    """The version of the contract, and how a plugin states the one that it was written for."""
    return f"The hook API is at version **{HOOK_API}**.\n\n{_code(f'register{_signature(Register.__call__)}')}"


def _described(hook: Callable[..., object]) -> Iterator[str]:
    yield f"### {hook.__name__}"
    yield _code(f"def {hook.__name__}{_signature(hook)}")
    yield inspect.getdoc(hook) or ""
    names = dict.fromkeys(TYPE.findall(_signature(hook)))
    links = [f"[`{name}`](api.md#pariskv.types.{name})" for name in names if hasattr(types, name) and name != "Tensor"]
    if links:
        yield f"Types: {', '.join(links)}."


def _signature(function: Callable[..., object]) -> str:
    """As the source has it: types by the names that it gives them."""
    return str(inspect.signature(function)).replace("'", "")


def _code(text: str) -> str:
    return f"```python\n{text}\n```"
