"""What crosses the boundary between the core and the retrievers.

Letters, project-wide: B batch rows, H key/value heads, G query heads per key/value head,
D head size, n tokens of a block, N tokens of a row's zone, C candidates, K selected.
Indices are int32, relative to the row's zone, and -1 where a slot is empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from pariskv.errors import PluginContractError, ShapeError

Tensors = Mapping[str, Tensor]
"""Named tensors: a block's codes, a fitted state, an encoded query."""

TOKENS = -1
"""Stands for the token axis in `CodeField.shape`."""

RECENT_QUERIES = 64
"""How many of the prompt's last queries a format receives that `needs` them."""


@dataclass(frozen=True)
class LayerInfo:
    """What a retriever may know of the attention layer that it serves."""

    index: int
    batch: int  # B
    kv_heads: int  # H
    group: int  # G
    head_dim: int  # D
    dtype: torch.dtype
    device: torch.device
    scaling: float  # the factor on query . key, mostly D ** -0.5
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    model: str = ""


@dataclass(frozen=True)
class CodeField:
    """How one field of a format's codes lies in memory: [B, H, *shape].

    shape             sizes after [B, H], with TOKENS once where the tokens go; without
                      TOKENS the field needs reduce="sum"
    tokens_per_entry  tokens that share one entry of the token axis (a page, a chunk)
    reduce            None: a block's entries are appended. "sum": a block's field is added
    read              what a step reads of it: "all", its "candidates"' entries, or a "part" that only it knows;
                      `pariskv plan --bandwidth` counts by that, nothing else does
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens_per_entry: int = 1
    reduce: Literal["sum"] | None = None
    read: Literal["all", "candidates", "part"] = "all"

    def __post_init__(self) -> None:
        if self.shape.count(TOKENS) != (0 if self.reduce else 1):
            raise ShapeError(
                f"CodeField(shape={self.shape}, reduce={self.reduce!r}): wanted exactly one TOKENS axis "
                f"in an appended field and none in a summed one; correct the field's declaration"
            )

    @property
    def token_axis(self) -> int:
        """The token axis of the whole [B, H, ...] tensor."""
        return 2 + self.shape.index(TOKENS)

    def size(self, batch: int, kv_heads: int, tokens: int) -> tuple[int, ...]:
        entries = -(-tokens // self.tokens_per_entry)
        return (batch, kv_heads, *(entries if size == TOKENS else size for size in self.shape))


class Codes:
    """The codes of one format in one layer: what `coarse_select` and `rerank` read.

    `codes["name"]` is the field [B, H, ...] over the whole capacity; entries at and past
    `length` (int32 [B], tokens, on the device) are not valid and hold anything.
    Appending, growing, saving and cropping are the core's: a retriever declares and reads.
    """

    def __init__(self, spec: Mapping[str, CodeField], fields: dict[str, Tensor], length: Tensor, capacity: int):
        self.spec = dict(spec)
        self.fields = fields
        self.length = length
        self.capacity = capacity
        self.is_shared = False

    @classmethod
    def empty(cls, layer: LayerInfo, capacity: int, **spec: CodeField) -> Codes:
        """Codes for `capacity` tokens a row, all lengths zero: what `allocate_codes` returns."""
        fields = {
            name: torch.zeros(field.size(layer.batch, layer.kv_heads, capacity), dtype=field.dtype, device=layer.device)
            for name, field in spec.items()
        }
        length = torch.zeros(layer.batch, dtype=torch.int32, device=layer.device)
        return cls(spec, fields, length, capacity)

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self.fields.values())

    def append(self, rows: Sequence[int], starts: Sequence[int], block: Tensors, tokens: int) -> None:
        """Write a block of `tokens` tokens of `rows` at the rows' own `starts`; lengths are published apart.

        block  each field [len(rows), H, ...] as declared
        Raises ShapeError where a field is missing, unknown or of another shape or dtype.
        """
        if set(block) != set(self.spec):
            raise ShapeError(
                f"encode returned the fields {sorted(block)}, but allocate_codes declared {sorted(self.spec)}"
            )
        self._own()
        for name, field in self.spec.items():
            self._append_field(name, field, rows, starts, block[name], tokens)

    def _append_field(
        self, name: str, field: CodeField, rows: Sequence[int], starts: Sequence[int], new: Tensor, tokens: int
    ) -> None:
        whole = self.fields[name]
        wanted = field.size(len(rows), whole.shape[1], tokens)
        if tuple(new.shape) != wanted or new.dtype != field.dtype:
            raise ShapeError(
                f"encode returned {name} as {tuple(new.shape)} {new.dtype}, wanted {wanted} {field.dtype} "
                f"as allocate_codes declared it"
            )
        for source, (row, start) in enumerate(zip(rows, starts, strict=True)):
            if field.reduce == "sum":
                whole[row] += new[source]
            else:
                axis = field.token_axis - 1  # of one row
                entries = new.shape[field.token_axis]
                whole[row].narrow(axis, start // field.tokens_per_entry, entries).copy_(new[source])

    def forget_sums(self, row: int) -> None:
        """Set the summed fields of a row to zero, before its tokens are encoded anew."""
        for name, field in self.spec.items():
            if field.reduce == "sum":
                self.fields[name][row] = 0

    @property
    def has_sums(self) -> bool:
        return any(field.reduce == "sum" for field in self.spec.values())

    def take_row(self, row: int, source: Codes, source_row: int, start: int, stop: int) -> None:
        """Copy the entries of the tokens start .. stop - 1, and the sums, of a row of other codes of this format."""
        self._own()
        for name, field in self.spec.items():
            mine, other = self.fields[name][row], source.fields[name][source_row]
            if field.reduce == "sum":
                mine.copy_(other)
            else:
                first, last = start // field.tokens_per_entry, -(-stop // field.tokens_per_entry)
                axis = field.token_axis - 1  # of one row
                mine.narrow(axis, first, last - first).copy_(other.narrow(axis, first, last - first))

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens a row, keeping what is there."""
        for name, field in self.spec.items():
            if field.reduce is None:
                old = self.fields[name]
                new = old.new_zeros(field.size(old.shape[0], old.shape[1], capacity))
                new.narrow(field.token_axis, 0, old.shape[field.token_axis]).copy_(old)
                self.fields[name] = new
        self.capacity, self.is_shared = capacity, False

    def share(self, length: Tensor) -> Codes:
        """The same codes for another request with lengths of its own: copied by who first writes to them, sums now."""
        fields = {
            name: self.fields[name].clone() if field.reduce else self.fields[name] for name, field in self.spec.items()
        }
        other = Codes(self.spec, fields, length, self.capacity)
        self.is_shared = other.is_shared = True
        return other

    def _own(self) -> None:
        """Have fields that no other request reads, before they are written to."""
        if self.is_shared:
            self.grow(self.capacity)


class Store(ABC):
    """Where a layer's full-precision rows of the retrieval zone live: made by `allocate_store`.

    A row is the key and the value of a token side by side: [2, D]. `length[b]`, host integers,
    is the number of tokens of row b. `update` appends, `fetch` reads.
    """

    capacity: int
    length: list[int]
    can_fork: bool = False
    """`fetch` writes the row of selection k into slot k and leaves no trace in the store: requests can share it."""

    @abstractmethod
    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, stop - start, D] of batch row `row`, on the layer's device."""

    @abstractmethod
    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens a row, keeping what is there."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes held in host memory."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes held in device memory."""

    @property
    def layout(self) -> object:
        """What a captured step has baked in of the store; changes where rows move, or the capacity does."""
        return self.capacity

    @property
    def keeps_rows(self) -> bool:
        """Whether there are rows to be read; a store without bytes counts its tokens only."""
        return self.host_bytes + self.device_bytes > 0

    def crop(self, row: int, tokens: int) -> None:
        """Optional: forget the tokens of a row from `tokens` on; what `update` appends next begins there.

        Without it the row cannot be given to another request, nor go back to an earlier turn.
        """
        raise PluginContractError(
            f"{type(self).__name__}: row {row} is to go back to {tokens} tokens, but the store implements no crop; "
            f"implement it, or use one batch for one request, without rewinding"
        )

    def take_row_state(self, row: int, source: Store, source_row: int) -> None:
        """Optional, beside `state`: take what `source` holds of its row beside rows, which were appended already."""
        if source.state():
            raise PluginContractError(
                f"{type(self).__name__}: row {row} is to take the state of another store's row, but the store "
                f"implements no take_row_state; implement it beside state"
            )

    def state(self) -> Tensors:
        """Optional: what the store holds beside rows, so that a prefix can be saved; tensors of one axis at least."""
        return {}

    def restore(self, state: Tensors, rotary: Rotary | None) -> None:
        """Optional, beside `state`: take that back, once the rows were appended to a new store of as many rows.

        rotary  the model's, by positions in the zone
        """
        if state:
            raise PluginContractError(
                f"{type(self).__name__}: got the state {sorted(state)} of a saved store, but implements no restore; "
                f"implement it beside state"
            )


class Rotary(Protocol):
    """The model's rotary embedding of keys [R, h, n, D] at positions [R, n]; asks the host nothing to rotate."""

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys as the model embeds them, of their own dtype."""
        ...

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Embedded keys as they were before."""
        ...


class Prefill(ABC):
    """The zone as `fit` sees it, once per layer and format when the prefill ends; again where a format `is_stale`.

    Its blocks are those of the zone as it now is, the queries always those of the prompt. What a format does not
    name in `needs` is None. Sums are taken in float64 over zone-aligned
    blocks of each row, so they do not depend on how the prefill was chunked.
    """

    lengths: list[int]  # zone tokens of each row that is to be fitted, 0 of the others
    query_moment: Tensor | None  # [B, H, D, D] float64, the sum of q q^T over the row's tokens and the group
    model_moment: Tensor | None = None  # [H, D, D] float32, its mean over texts that the model was calibrated on
    recent_queries: Tensor | None  # [B, H, G, RECENT_QUERIES, D], zeros in front where the row is shorter
    rotary: Rotary | None  # by zone-relative positions; needs "pre_rope"
    store: Store | None  # the layer's store, for a format that teaches its own; None where a format is tried alone

    @abstractmethod
    def blocks(self, row: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [H, n, D] of one row's zone, block by block, from the store."""

    @abstractmethod
    def dense(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, m, D] of what is in no zone: a row's sink, then its newest tokens."""

    @abstractmethod
    def pre_rope_blocks(self, row: int) -> Iterator[Tensor]:
        """Keys before the rotary embedding [H, n, D], block by block; needs "pre_rope"."""


@dataclass(frozen=True)
class Query:
    """One decode step's queries of one layer.

    heads    [B, H, G, D]
    encoded  what `encode_query` of the format's producer returned, None without one
    scaling  the factor on query . key, mostly D ** -0.5
    softcap  None, or scaled scores become softcap * tanh(score / softcap). `attend` has to apply it. A stage
             that ranks by one head's scores need not, for their order stays; one that sums probabilities should
    steady   [B, H, G] log-sum-exp of each head's scores over sink and ring, None unless the stage
             `reads_steady`: with it a head's probabilities can be normalised over what is attended in any case, too
    """

    heads: Tensor
    encoded: Tensors | None
    scaling: float
    softcap: float | None = None
    steady: Tensor | None = None


@dataclass(frozen=True)
class Budget:
    """How many candidates `coarse_select` returns.

    width  C, the same at every step of a captured graph
    count  int32 [B] on the device, how many of them row b uses; the rest are -1
    """

    width: int
    count: Tensor


@dataclass(frozen=True)
class Rows:
    """Rows that are attended beside the selected ones, though no token has them (a cluster's mean).

    keys, values  [B, H, E, D]
    bias          [B, H, G, E] added to the scaled, soft-capped scores; -inf where unused
    """

    keys: Tensor
    values: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Partial:
    """Attention that was done elsewhere: out [B, H, G, D] and its log-sum-exp [B, H, G]."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Selection:
    """Token positions that a stage chose, the only thing that stages of different retrievers exchange.

    indices  int32 [B, H, K], zone-relative, -1 where empty, no position twice
    bias     [B, H, G, K] added to the scaled, soft-capped scores (a log-weight); -inf where a
             query head did not choose the token
    extra    rows that no token has, attended beside the selected ones
    partial  attention that was done elsewhere, to be merged with the rest
    """

    indices: Tensor
    bias: Tensor | None = None
    extra: Rows | None = None
    partial: Partial | None = None


@dataclass(frozen=True)
class Selected:
    """The selection once `fetch` has written its rows into the working set's slots.

    valid  bool [B, H, K], which slots hold a row; bias follows the slots' order
    """

    valid: Tensor
    bias: Tensor | None = None
    extra: Rows | None = None
    partial: Partial | None = None


@dataclass(frozen=True)
class WorkingSet:
    """The rows that a decode step attends to, in one buffer: sink, then ring, then selected.

    rows    [B, H, sink + ring + K, 2, D]
    steady  bool [B, sink + ring], which of the sink and ring slots hold a token
    length  int64 [B] on the device, tokens of each row
    active  bool [B], rows that still generate
    sink    slots of the sink: a token's slot is its position there, behind it the position modulo the ring
    """

    rows: Tensor
    steady: Tensor
    length: Tensor
    active: Tensor
    sink: int

    @property
    def slots(self) -> Tensor:
        """The selected rows' part [B, H, K, 2, D], which `fetch` fills."""
        return self.rows[:, :, self.steady.shape[1] :]
