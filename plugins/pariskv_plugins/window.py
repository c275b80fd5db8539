"""StreamingLLM (arXiv 2309.17453): the first tokens and the newest ones; what lies between is never looked at again.

The floor of every comparison. Sink and ring, which every layer has, are the whole method: `window: {sink, local}`.
Tokens leave the ring like everybody's, generated ones too, and a step costs what attention to sink and ring costs.

window  selects nothing
evict   a store that keeps nothing: with `store: evict` memory stops growing with the text, as in the paper. Other
        stores keep the rows, which no step reads, for a later turn and for a prompt that is read over the store

Unlike in the paper a token keeps its position; there positions are counted inside the cache, which matters beyond
the context length that the model was trained for. The prompt is read with dense attention, as for every retriever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv.errors import BindingError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import Budget, Codes, LayerInfo, Query, Selected, Selection, Store
from pariskv_plugins.blocks import check_block


class Window(Retriever):
    """Its selections have no slots: nothing is fetched, and attention ends with the ring."""

    graph_safe = True
    combine = "none"

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        return nothing(query)

    @hookimpl
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        return nothing(query)


def nothing(query: Query) -> Selection:
    """A selection without a slot."""
    batch, kv_heads = query.heads.shape[:2]
    return Selection(torch.empty(batch, kv_heads, 0, dtype=torch.int32, device=query.heads.device))


class EvictedRows(Store):
    """Counts the tokens of the zone and holds none of them."""

    def __init__(self, layer: LayerInfo, capacity: int) -> None:
        self.layer = layer
        self.capacity = capacity
        self.length = [0] * layer.batch

    def append(self, keys: Tensor, values: Tensor, rows: list[int]) -> None:
        """Count one block [R, H, n, D] of the given batch rows."""
        check_block("evict", self, self.layer.kv_heads, self.layer.head_dim, keys, values, rows)
        for row in rows:
            self.length[row] += keys.shape[2]

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Nothing is there to be read, so what would have to read it is refused.

        Raises BindingError, always.
        """
        raise BindingError(
            f"evict: layer {self.layer.index} has dropped the tokens {start} to {stop - 1} of row {row}'s zone, which "
            f"a later turn, a prompt read over the store or a retriever's fit asks for; begin a new request, set "
            f"prefill.history=buffer, or choose a store that keeps rows"
        )

    def crop(self, row: int, tokens: int) -> None:
        self.length[row] = min(self.length[row], tokens)

    def grow(self, capacity: int) -> None:
        self.capacity = max(self.capacity, capacity)

    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def device_bytes(self) -> int:
        return 0


class Evict(Retriever):
    """The store for layers that select nothing; another selection is refused at its first step."""

    graph_safe = True

    @hookimpl
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        return EvictedRows(layer, capacity)

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        if num_slots := selection.indices.shape[-1]:
            raise BindingError(
                f"evict: {num_slots} tokens a head were selected, but this store keeps none that could be fetched; "
                f"choose another store, or `retriever: window`"
            )
        return Selected(selection.indices >= 0, selection.bias, selection.extra, selection.partial)

    @hookimpl
    def update(self, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
        if not isinstance(store, EvictedRows):
            raise BindingError(
                f"evict: got a {type(store).__name__}, but update only knows the store of evict's own "
                f"allocate_store; take all three stages from one retriever"
            )
        store.append(keys, values, rows)


@hookimpl
def register_retrievers(register: Register) -> None:
    register("window", Window)
    register("evict", Evict)
