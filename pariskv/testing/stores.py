"""Checks of where rows live and how they are attended to: allocate_store, update, fetch, attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pariskv.errors import CapacityError, ParisKVError
from pariskv.testing.case import Case, same_bits
from pariskv.types import Query, Rows, Selected, Selection, Store, WorkingSet

GUARD = 3
"""Rows before the slots in the working set, which fetch must leave alone."""


def check_store(case: Case) -> None:
    """What was appended comes back, the store counts it, grows, and refuses more than it holds."""
    store = filled(case)
    keeps_rows = store.host_bytes + store.device_bytes > 0
    check_rows = _check_read if keeps_rows else _check_refusals
    check_rows(case, store)
    _check_full(case, store)
    store.grow(2 * store.capacity)
    if store.capacity < 2 * max(case.lengths):
        raise case.wrong("allocate_store", f"grow left the store's capacity at {store.capacity}")
    check_rows(case, store)
    if "fetch" in case.stages and keeps_rows:
        _check_fetch(case, store)


def filled(case: Case) -> Store:
    """A store that is full to the longest row, appended in two blocks: rows of one length together."""
    store: Store = case.call("allocate_store", case.layer, max(case.lengths))
    if not isinstance(store, Store) or list(store.length) != [0] * case.layer.batch:
        raise case.wrong("allocate_store", f"return a pariskv.types.Store whose length is [0] * {case.layer.batch}")
    if "update" not in case.stages:
        raise case.wrong("update", "is missing; a store that nothing is appended to has nothing to fetch")
    for length in sorted(set(case.lengths) - {0}):
        rows = [row for row in case.rows if case.lengths[row] == length]
        for start, stop in ((0, length // 3), (length // 3, length)):
            case.call("update", case.keys[rows, :, start:stop], case.values[rows, :, start:stop], store, rows)
    if list(store.length) != case.lengths:
        raise case.wrong(
            "update", f"store.length is {list(store.length)}, wanted {case.lengths}; count what is appended"
        )
    return store


def _check_read(case: Case, store: Store) -> None:
    for row in case.rows:
        start, stop = case.lengths[row] // 4, case.lengths[row]
        for name, got, source in zip(
            ("keys", "values"), store.read(row, start, stop), (case.keys, case.values), strict=True
        ):
            if not same_bits(got, source[row, :, start:stop]):
                raise case.wrong("update", f"store.read({row}, {start}, {stop}) gives other {name} than were appended")


def _check_refusals(case: Case, store: Store) -> None:
    """A store that holds no bytes has no rows to give: it must say so, and not give anything instead."""
    selection = _some_tokens(case)
    slots = case.keys.new_zeros(*selection.indices.shape, 2, case.layer.head_dim)
    with _refusal(case, "allocate_store", "read"):
        store.read(0, 0, 1)
    if "fetch" in case.stages:
        with _refusal(case, "fetch", "fetch"):
            case.stages["fetch"](selection, store, slots)


@contextmanager
def _refusal(case: Case, stage: str, what: str) -> Iterator[None]:
    try:
        yield
    except ParisKVError:
        return
    raise case.wrong(stage, f"the store holds no bytes, but {what} gave rows; raise a BindingError that says why not")


def _check_full(case: Case, store: Store) -> None:
    """One token too many is a CapacityError, and changes nothing."""
    row, before = max(case.rows, key=lambda row: case.lengths[row]), list(store.length)
    too_many = store.capacity - case.lengths[row] + 1
    block = case.keys.new_zeros(1, case.layer.kv_heads, too_many, case.layer.head_dim)
    try:
        case.stages["update"](block, block, store, [row])
    except CapacityError:
        if list(store.length) != before:
            raise case.wrong("update", "raised CapacityError, but had counted the tokens") from None
        return
    except Exception as error:
        raise case.wrong("update", f"a full store raised {type(error).__name__}; raise CapacityError") from error
    raise case.wrong("update", f"took {too_many} tokens more than the store has room for; raise CapacityError")


def _check_fetch(case: Case, store: Store) -> None:
    """Each selected row is in one slot, with its bias; nothing else of the working set changes."""
    layer = case.layer
    selection = _some_tokens(case)
    width = selection.indices.shape[-1]
    buffer = case.keys.new_full((layer.batch, layer.kv_heads, GUARD + width, 2, layer.head_dim), float("nan"))
    slots = buffer[:, :, GUARD:]
    case.call("fetch", selection, store, slots)
    selected: Selected = case.call_again("fetch", selection, store, slots)
    if not bool(buffer[:, :, :GUARD].isnan().all()):
        raise case.wrong("fetch", "writes to rows in front of its slots; write to slots[:, :, k] only")
    if tuple(selected.valid.shape) != (layer.batch, layer.kv_heads, width) or selected.valid.dtype != torch.bool:
        raise case.wrong(
            "fetch", f"valid is {list(selected.valid.shape)} {selected.valid.dtype}, wanted bool [B, H, K]"
        )
    if selected.extra is not selection.extra or selected.partial is not selection.partial:
        raise case.wrong("fetch", "drops the selection's extra or partial; pass them on")
    if selected.bias is None:
        raise case.wrong("fetch", "drops the selection's bias; pass it on in the slots' order")
    for row, head in ((row, head) for row in case.rows for head in range(layer.kv_heads)):
        _check_slots(case, selection, selected, slots[row, head], row, head)
    if store.can_fork and not torch.equal(selected.valid, selection.indices >= 0):
        raise case.wrong(
            "fetch", "puts rows into other slots than those of their places in the selection; can_fork must be False"
        )


def _some_tokens(case: Case) -> Selection:
    """Some tokens of every row in no order, with empty slots between them, a bias and an extra row."""
    layer = case.layer
    shape = (layer.batch, layer.kv_heads, 2 * case.top_k)
    indices = torch.full(shape, -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    for row, head in ((row, head) for row in case.rows for head in range(layer.kv_heads)):
        tokens = torch.randperm(case.lengths[row], generator=generator)[: case.top_k]
        indices[row, head, 1 : 2 * len(tokens) : 2] = tokens.int()
    bias = torch.randn((*shape[:2], layer.group, shape[2]), generator=generator).to(layer.device)
    one = case.heads[:, :, :1]
    extra = Rows(one, one, bias[..., :1])
    return Selection(indices.to(layer.device), bias, extra)


def _check_slots(case: Case, selection: Selection, selected: Selected, slots: Tensor, row: int, head: int) -> None:
    """The valid slots [K, 2, D] of one head hold the chosen rows, each once."""
    assert selection.bias is not None
    assert selected.bias is not None
    used = selection.indices[row, head] >= 0
    tokens = selection.indices[row, head][used].long()
    wanted = torch.stack((case.keys[row, head, tokens], case.values[row, head, tokens]), dim=1)
    valid = selected.valid[row, head]
    if int(valid.sum()) != len(tokens):
        raise case.wrong(
            "fetch", f"row {row}: {int(valid.sum())} slots are valid, wanted {len(tokens)}; -1 is no token"
        )
    if not len(tokens):
        return
    same = (slots[valid].unsqueeze(1) == wanted.unsqueeze(0)).flatten(2).all(-1)  # [slot, token]
    if not bool((same.sum(0) == 1).all()):
        raise case.wrong("fetch", f"row {row}: the valid slots do not hold the selected tokens' rows, each once")
    order = same.int().argmax(1)
    if not same_bits(selected.bias[row, head][:, valid], selection.bias[row, head][:, used][:, order]):
        raise case.wrong("fetch", f"row {row}: bias is not in the slots' order; permute it with them")


def check_attend(case: Case) -> None:
    """The result is one softmax over the valid rows; NaN in the others does not get through."""
    layer = case.layer
    steady, slots = 5, case.top_k
    rows = case.keys.new_empty(layer.batch, layer.kv_heads, steady + slots, 2, layer.head_dim).copy_(
        torch.randn(
            layer.batch, layer.kv_heads, steady + slots, 2, layer.head_dim, generator=torch.Generator().manual_seed(2)
        )
    )
    used = torch.arange(steady + slots, device=layer.device) % 3 != 1
    rows[:, :, ~used] = float("nan")
    valid = used[steady:].expand(layer.batch, layer.kv_heads, -1)
    bias = rows.new_zeros(layer.batch, layer.kv_heads, layer.group, slots, dtype=torch.float32)
    bias[:, :, 0, ::2] = -torch.inf
    working = working_set(rows, used[:steady].expand(layer.batch, -1))
    query = Query(case.heads, None, layer.scaling, layer.softcap)
    case.call("attend", query, working, Selected(valid, bias))
    out, lse = case.call_again("attend", query, working, Selected(valid, bias))

    keys, values = rows[:, :, used].float().unbind(3)
    scores = case.heads.float() @ keys.mT * layer.scaling
    scores[..., int(used[:steady].sum()) :] += bias[..., used[steady:]]
    wanted = scores.softmax(-1) @ values
    tolerance = 1e-4 if layer.dtype == torch.float32 else 2e-2
    if tuple(out.shape) != tuple(wanted.shape) or not torch.allclose(out.float(), wanted, atol=tolerance):
        raise case.wrong(
            "attend", "out is not the softmax over sink, ring and selected rows; mask the unused with where"
        )
    if tuple(lse.shape) != tuple(wanted.shape[:3]) or not torch.allclose(
        lse.float(), scores.logsumexp(-1), atol=tolerance
    ):
        raise case.wrong("attend", "lse is not the log-sum-exp of the scores that out is weighted by")


def check_append(case: Case) -> None:
    """The step's token goes to the slot of its position, in the sink or around the ring, in active rows only."""
    layer, sink, ring = case.layer, 2, 5
    keys, values = torch.randn(
        2, layer.batch, layer.kv_heads, 1, layer.head_dim, generator=torch.Generator().manual_seed(3)
    ).to(layer.device, layer.dtype)
    for length in (0, sink - 1, sink, sink + ring - 1, sink + ring, 100):
        rows = keys.new_full((layer.batch, layer.kv_heads, sink + ring + 1, 2, layer.head_dim), 7)
        working = working_set(rows, torch.zeros(layer.batch, sink + ring, dtype=torch.bool), sink)
        working.length.fill_(length)
        working.active[1:] = False
        (case.call_again if length else case.call)("append", keys, values, working)
        slot = length if length < sink else sink + (length - sink) % ring
        if not torch.equal(rows[0, :, slot], torch.stack((keys, values), dim=3)[0, :, 0]):
            raise case.wrong("append", f"the token at position {length} is not in slot {slot}")
        others = [other for other in range(rows.shape[2]) if other != slot]
        if not bool((rows[:, :, others] == 7).all()):
            raise case.wrong("append", f"the token at position {length} also changed other slots than {slot}")
        if working.length.tolist() != [length + 1] + [length] * (layer.batch - 1):
            raise case.wrong("append", "length: wanted one more in active rows, and no more in the others")
        if working.steady.nonzero().tolist() != [[0, slot]]:
            raise case.wrong("append", "steady: wanted the new slot marked in active rows, and in no others")


def working_set(rows: Tensor, steady: Tensor, sink: int = 0) -> WorkingSet:
    """A working set whose rows all generate; of their tokens no more is known than `steady` says."""
    length = steady.sum(dim=-1)
    return WorkingSet(rows, steady, length, torch.ones_like(length, dtype=torch.bool), sink)
