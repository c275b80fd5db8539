"""Long-context LLM decoding that retrieves the few keys and values that matter.

>>> import pariskv
>>> session = pariskv.Session.load("configs/smollm2.yaml")
>>> print(session.generate(["Why is the sky blue?"])[0])

`ParisCache` is the same behind `model.generate(..., cache=...)`; it is imported at its first use,
so that `import pariskv` does not import transformers. Where to read on: `pariskv.decode`.
"""

from typing import TYPE_CHECKING

from pariskv.config import Config, load_config, parse_config
from pariskv.errors import ParisKVError
from pariskv.hookspecs import HOOK_API, Register, Retriever, hookimpl
from pariskv.session import Session
from pariskv.types import (
    TOKENS,
    Budget,
    CodeField,
    Codes,
    LayerInfo,
    Partial,
    Prefill,
    Query,
    Rows,
    Selected,
    Selection,
    Store,
    WorkingSet,
)

if TYPE_CHECKING:
    from pariskv.integrations.transformers import ParisCache

__version__ = "0.1.0"

__all__ = [
    "HOOK_API",
    "TOKENS",
    "Budget",
    "CodeField",
    "Codes",
    "Config",
    "LayerInfo",
    "ParisCache",
    "ParisKVError",
    "Partial",
    "Prefill",
    "Query",
    "Register",
    "Retriever",
    "Rows",
    "Selected",
    "Selection",
    "Session",
    "Store",
    "WorkingSet",
    "__version__",
    "hookimpl",
    "load_config",
    "parse_config",
]


def __getattr__(name: str) -> object:
    if name == "ParisCache":
        from pariskv.integrations.transformers import ParisCache

        return ParisCache
    raise AttributeError(f"module 'pariskv' has no attribute {name!r}")
