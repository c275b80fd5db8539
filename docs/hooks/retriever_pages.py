"""What the pages of the built-in retrievers have in common: options, bytes and declarations, from the code."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from markup import code, table
from pariskv_plugins.uva import Uva, token_bytes

from pariskv.describe import describe_retriever
from pariskv.registry import Registry
from pariskv.types import LayerInfo

SIZES = (64, 128, 256)
"""Head sizes that the tables of bytes are for."""

BYTES_HEAD = tuple(f"D = {size}, bf16" for size in SIZES)


@cache
def registry() -> Registry:
    return Registry.load(entry_points=False)


def names() -> list[str]:
    return registry().names()


def overview() -> str:
    """A line for each retriever that chooses, or that needs no choice."""
    rows = []
    for name in names():
        one, described = registry().make(name, {}), describe_retriever(name, registry())
        if {"allocate_store", "attend"} & set(described.row.stages) and "coarse_select" not in described.row.stages:
            continue
        index = f"{bytes_per_token(one, 128)} B" if hasattr(one, "allocate_codes") else "none"
        rerank = yes(hasattr(one, "rerank"))
        rows.append((f"[`{name}`]({name}.md)", index, rerank, GENERATED_TOKENS[one.indexes], yes(one.graph_safe)))
    return table(("Retriever", "Index, D = 128", "Own rerank", "Generated tokens", "Steps are captured"), rows)


GENERATED_TOKENS = {"all": "join the index", "prompt": "stay dense", "none": "stay dense"}
"""What becomes of them, by the declaration `indexes`."""


def yes(value: bool) -> str:
    return "yes" if value else "no"


def options(name: str) -> str:
    """Every option with its type, default and meaning."""
    described = describe_retriever(name, registry())
    if not described.options:
        return "None."
    rows = (
        (code(option.name), option.type, "required" if option.default is None else code(option.default), option.help)
        for option in described.options
    )
    return table(("Option", "Type", "Default", "Meaning"), rows)


def cost(name: str) -> str:
    """Bytes of a token and key/value head: of its codes, and of its row where the retriever is a store."""
    one, rows = registry().make(name, {}), []
    if hasattr(one, "allocate_codes"):
        rows.append(("index", *(f"{bytes_per_token(one, size)} B" for size in SIZES)))
    elif hasattr(one, "allocate_store"):
        rows.append(("row in the store", *(f"{row_bytes(one, size)} B" for size in SIZES)))
    if not rows:
        return "No index, and no store of its own."
    rows.append(("for comparison: key and value", *(f"{4 * size} B" for size in SIZES)))
    return table(("Per token and key/value head", *BYTES_HEAD), rows)


def declared(name: str) -> str:
    """What the core reads off the retriever."""
    one, row = registry().make(name, {}), describe_retriever(name, registry()).row
    rows = [("stages", ", ".join(code(stage) for stage in row.stages) or "none")]
    if row.format:
        rows.append(("format of the codes", code(row.format)))
    if "fit" in row.stages:
        needs = ", ".join(code(need) for need in sorted(one.needs))
        rows.append(("learns from the prompt", f"yes; needs {needs}" if needs else "yes"))
    if one.block > 1:
        rows.append(("block", f"{one.block} tokens enter the index at a time"))
    if "coarse_select" in row.stages:
        rows.append(("query heads choose apart", yes(one.selects_per_query_head)))
        rows.append(("generated tokens", GENERATED_TOKENS[one.indexes]))
    rows.append(("captured in a CUDA graph", yes(one.graph_safe)))
    return table(("Declaration", "Value"), rows)


def index_bytes() -> str:
    """The index of every format that ships."""
    instances = [(name, registry().make(name, {})) for name in names()]
    instances.append(("pariskv, subspace_dim 4", registry().make("pariskv", {"subspace_dim": 4})))
    makers = sorted((name, one) for name, one in instances if hasattr(one, "allocate_codes"))
    rows = [(name, code(one.format), *(f"{bytes_per_token(one, size)} B" for size in SIZES)) for name, one in makers]
    return table(("Retriever", "Format", *BYTES_HEAD), [*rows, ("keys and values", "", *(f"{4 * n} B" for n in SIZES))])


def bytes_per_token(retriever: Any, head_dim: int) -> int:
    """Bytes of a format per token and key/value head, from two allocations on a line."""
    one, two = (retriever.allocate_codes(layer(head_dim), tokens).nbytes for tokens in (256, 512))
    return int(two - one) // 256


def row_bytes(retriever: Any, head_dim: int) -> int:
    """Bytes of a token's row; the store `uva`, which a CPU refuses, says what it takes."""
    if isinstance(retriever, Uva):
        return token_bytes(layer(head_dim))
    one, two = (retriever.allocate_store(layer(head_dim), tokens) for tokens in (256, 512))
    return int(two.host_bytes + two.device_bytes - one.host_bytes - one.device_bytes) // 256


def layer(head_dim: int) -> LayerInfo:
    """One row, one key/value head, in bfloat16 on a CPU."""
    return LayerInfo(0, 1, 1, 1, head_dim, torch.bfloat16, torch.device("cpu"), head_dim**-0.5)
