"""What a step found of dense attention, by pariskv's own measures (`pariskv.metrics`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from pariskv import Query, Selection, Store, WorkingSet
from pariskv.metrics import Observed, dense_truth, measure
from torch import Tensor


@dataclass(frozen=True)
class StepSeen:
    """One layer's step: what was asked, proposed, fetched, and what attention gave."""

    query: Query
    working: WorkingSet
    candidates: Tensor | None
    selection: Selection
    store: Store
    out: Tensor


def measure_step(seen: StepSeen) -> Iterator[dict[str, float]]:
    """The measures of every row that generates and has a zone, means over the heads."""
    if seen.store.keeps_rows:  # a store that forgets its rows has nothing to compare with
        for row, zone in enumerate(seen.store.length):
            if zone and bool(seen.working.active[row]):
                yield _measure_row(seen, row, zone)


def _measure_row(seen: StepSeen, row: int, zone: int) -> dict[str, float]:
    one, working = slice(row, row + 1), seen.working
    sink, ring = (
        working.rows[row, :, slots] for slots in _used(working.steady[row], working.sink)
    )  # [H, n, 2, D]
    stored = torch.stack(seen.store.read(row, 0, zone), dim=2)
    keys, values = torch.cat((sink, stored, ring), dim=1).unbind(2)
    query = replace(seen.query, heads=seen.query.heads[one], encoded=None, steady=None)
    tokens = keys.shape[1]
    truth = dense_truth(query, keys[None], values[None], [tokens], [zone], sink.shape[1])
    selection = Selection(
        seen.selection.indices[one],
        None if seen.selection.bias is None else seen.selection.bias[one],
        partial=seen.selection.partial,
    )
    candidates = None if seen.candidates is None else seen.candidates[one]
    top_k = selection.indices.shape[-1]
    found = measure(truth, Observed(candidates, selection, seen.out[one]), top_k)
    return {name: float(values.mean()) for name, values in found.items()}


def _used(steady: Tensor, sink: int) -> tuple[Tensor, Tensor]:
    """The slots that hold a token: of the sink, and of the ring behind it."""
    slots = steady.nonzero().squeeze(1)
    return slots[slots < sink], slots[slots >= sink]
