"""The layer that retrieves nothing: every token stays in the dense part and is attended."""

from __future__ import annotations

from pariskv.hookspecs import Register, Retriever, hookimpl


class Dense(Retriever):
    """No stage at all: tokens never leave the device, so there is nothing to encode, select or fetch."""

    indexes = "none"
    graph_safe = True


@hookimpl
def register_retrievers(register: Register) -> None:
    register("dense", Dense)
