"""The decode step's attention by Numba-CUDA kernels on a GPU; by their definition elsewhere."""

from __future__ import annotations

import functools

import torch
from pariskv_kernels.append import append_token
from pariskv_kernels.attend import attend_rows
from torch import Tensor

from pariskv.attention import merge
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import Partial, Query, Rows, Selected, WorkingSet


class NumbaAttend(Retriever):
    """One pass over sink, ring and selected rows, into which a partial attention is merged; extra rows take another."""

    graph_safe = True

    @hookimpl
    def append(self, keys: Tensor, values: Tensor, working: WorkingSet) -> None:
        append_token(keys, values, working.rows, working.steady, working.length, working.active, working.sink)

    @hookimpl
    def attend(self, query: Query, working: WorkingSet, selected: Selected | None) -> tuple[Tensor, Tensor]:
        valid = bias = other = None
        if selected is not None:
            valid, bias = selected.valid, selected.bias
            if selected.partial is not None:
                other = functools.partial(_in_full, selected.partial, query.heads.dtype)
        how = query.scaling, query.softcap
        out, lse = attend_rows(query.heads, working.rows, working.steady, valid, bias, *how, other)
        if selected is None or selected.extra is None:
            return out, lse
        out, lse = merge(Partial(out, lse), _attend_extra(query, selected.extra))
        return out.to(query.heads.dtype), lse


def _in_full(partial: Partial, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A partial attention in the precision that heads of this dtype are computed in."""
    wide = torch.promote_types(dtype, torch.float32)
    return partial.out.to(wide), partial.lse.to(wide)


def _attend_extra(query: Query, extra: Rows) -> Partial:
    """Attention to the extra rows alone; a row that no query head uses may hold anything."""
    rows = torch.stack((extra.keys, extra.values), dim=3).to(query.heads.dtype)
    steady = rows.new_zeros(rows.shape[0], 0, dtype=torch.bool)
    valid = (extra.bias != -torch.inf).any(dim=2)
    return Partial(*attend_rows(query.heads, rows, steady, valid, extra.bias, query.scaling, query.softcap))


@hookimpl
def register_retrievers(register: Register) -> None:
    register("numba", NumbaAttend)
