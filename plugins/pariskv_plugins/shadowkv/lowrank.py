"""ShadowKV's store: of a key before RoPE, `rank` coefficients on the device; of its value, a row in host memory.

The keys of all heads side by side, X [n, H D], are U Sigma V^T. Kept are the first `rank` columns of U Sigma (the
coefficients, one row a token for all heads) and of V (the basis, H blocks). A selected key is a product of the two, put
back into the rotary embedding at its position. Section 4 of the paper.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pariskv.errors import BindingError, ConfigError
from pariskv.types import LayerInfo, Prefill, Rotary, Selected, Selection, Store, Tensors
from pariskv_plugins.blocks import check_block
from pariskv_plugins.shadowkv.landmarks import encode_chunks
from pariskv_plugins.shadowkv.outliers import ExactChunks
from pariskv_plugins.shadowkv.vectors import Vectors


class ShadowStore(Store):
    """Keys that are rebuilt, but for the outliers', and values that are fetched.

    basis         [B, H, r, D]  float32 at least, r = min(rank, H D)
    coefficients  [B, N, r]     in the layer's dtype
    exact         the outlier chunks' keys

    `learn` gives a row all three when its prompt is complete; before that, keys are fetched, too.
    """

    def __init__(self, layer: LayerInfo, capacity: int, rank: int, chunk: int, outliers: int, offload: bool) -> None:
        if layer.head_dim % 2:
            raise ConfigError(
                f"shadowkv: layer {layer.index} has heads of {layer.head_dim} coordinates, which RoPE cannot turn in "
                f"pairs; set keys: store"
            )
        self.layer, self.capacity = layer, capacity
        rank = min(rank, layer.kv_heads * layer.head_dim)
        wide = torch.promote_types(layer.dtype, torch.float32)
        basis = (layer.batch, layer.kv_heads, rank, layer.head_dim)
        self.basis = torch.zeros(basis, dtype=wide, device=layer.device)
        self.coefficients = torch.zeros(layer.batch, capacity, rank, dtype=layer.dtype, device=layer.device)
        self.keys, self.values = Vectors(layer, capacity, offload), Vectors(layer, capacity, offload)
        self.exact = ExactChunks(layer, capacity, chunk, outliers)
        self.length = self.values.rows.length
        self.rotary: Rotary | None = None
        self.learnt: set[int] = set()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that cross the bus when it is fetched: the value alone."""
        return self.layer.head_dim * self.layer.dtype.itemsize

    def append(self, keys: Tensor, values: Tensor, rows: list[int]) -> None:
        """Add one block [R, H, n, D] of the given batch rows; of a row with a basis, its coefficients, too."""
        check_block("shadowkv", self, self.layer.kv_heads, self.layer.head_dim, keys, values, rows)
        for source, row in enumerate(rows):
            if row in self.learnt:
                assert self.rotary is not None
                start, block = self.length[row], keys[source : source + 1]
                stop = start + block.shape[2]
                positions = torch.arange(start, stop, device=block.device).unsqueeze(0)
                self._keep(row, start, self.rotary.unrotate(block, positions)[0])
        self.keys.append(keys, rows)
        self.values.append(values, rows)

    def learn(self, row: int, prefill: Prefill) -> None:
        """The basis of a row from its prompt, and the coefficients of the prompt's tokens; a row learns once."""
        if row in self.learnt:
            return
        self.learnt.add(row)
        self.rotary = prefill.rotary
        heads, rank, dim = self.basis.shape[1:]
        basis = principal_directions(map(side_by_side, prefill.pre_rope_blocks(row)), heads * dim, rank)
        self.basis[row] = basis.view(heads, dim, rank).mT
        start = 0
        for keys in prefill.pre_rope_blocks(row):
            self._keep(row, start, keys)
            start += keys.shape[1]
        blocks = [encode_chunks(keys.unsqueeze(0), self.exact.chunk)["cosines"] for keys, _ in prefill.blocks(row)]
        self.exact.keep(row, torch.cat(blocks, -1)[0], self.keys)

    def _keep(self, row: int, start: int, keys: Tensor) -> None:
        """Write the coefficients of keys before RoPE [H, n, D]."""
        basis = self.basis[row].transpose(0, 1).flatten(1)  # [r, H D]
        self.coefficients[row, start : start + keys.shape[1]] = side_by_side(keys).to(basis.dtype) @ basis.mT

    def rebuilt(self, indices: Tensor) -> Tensor:
        """Keys [B, H, K, D] at the indices [B, H, K]; where one is empty, anything."""
        tokens = indices.clamp(min=0).long()
        wanted = tokens.unsqueeze(-1).expand(-1, -1, -1, self.coefficients.shape[-1])
        coefficients = self.coefficients.unsqueeze(1).expand(-1, tokens.shape[1], -1, -1).gather(2, wanted)
        keys = coefficients.to(self.basis.dtype) @ self.basis
        assert self.rotary is not None
        # To the model's function every head is a row of its own, because its tokens are at positions of their own.
        return self.rotary.rotate(keys.flatten(0, 1).unsqueeze(1), tokens.flatten(0, 1)).view_as(keys)

    def fetch(self, selection: Selection, slots: Tensor) -> Selected:
        """Write the rows at the selection's indices into the slots [B, H, K, 2, D], in their order."""
        indices = selection.indices
        slots[..., 0, :] = self.exact.put(indices, self.rebuilt(indices)) if self.learnt else self.keys.fetch(indices)
        slots[..., 1, :] = self.values.fetch(indices)
        return Selected(indices >= 0, selection.bias, selection.extra, selection.partial)

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The keys as they came, not rebuilt."""
        return self.keys.read(row, start, stop), self.values.read(row, start, stop)

    def state(self) -> Tensors:
        """What the rows learnt from their prompts; nothing before that."""
        if not self.learnt:
            return {}
        tokens = max(self.length)
        return {
            "learnt": torch.tensor([row in self.learnt for row in range(self.layer.batch)]),
            "basis": self.basis,
            "coefficients": self.coefficients[:, :tokens],
            "exact_keys": self.exact.keys,
            "exact_starts": self.exact.starts[..., : -(-tokens // self.exact.chunk)],
        }

    def restore(self, state: Tensors, rotary: Rotary | None) -> None:
        self.rotary = rotary
        self.learnt = {row for row, has_learnt in enumerate(state["learnt"].tolist()) if has_learnt}
        self.basis.copy_(state["basis"])
        self.coefficients[:, : state["coefficients"].shape[1]] = state["coefficients"]
        self.exact.keys.copy_(state["exact_keys"])
        self.exact.starts[..., : state["exact_starts"].shape[-1]] = state["exact_starts"]

    def crop(self, row: int, tokens: int) -> None:
        for part in (self.keys.rows, self.values.rows):
            part.crop(row, tokens)
        self.exact.crop(row, tokens)
        if not tokens:
            self.learnt.discard(row)

    def take_row_state(self, row: int, source: Store, source_row: int) -> None:
        other = own(source)
        self.learnt.discard(row)
        if source_row not in other.learnt:
            return
        self.learnt.add(row)
        self.rotary = other.rotary
        tokens = other.length[source_row]
        self.basis[row] = other.basis[source_row]
        self.coefficients[row, :tokens] = other.coefficients[source_row, :tokens]
        self.exact.take_row(row, other.exact, source_row, tokens)

    def grow(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        self.keys.rows.grow(capacity)
        self.values.rows.grow(capacity)
        batch, old, rank = self.coefficients.shape
        coefficients = self.coefficients.new_zeros(batch, capacity, rank)
        coefficients[:, :old] = self.coefficients
        self.coefficients, self.capacity = coefficients, capacity
        self.exact.grow(capacity)

    @property
    def host_bytes(self) -> int:
        return self.keys.rows.host_bytes + self.values.rows.host_bytes

    @property
    def device_bytes(self) -> int:
        rows = self.keys.rows.device_bytes + self.values.rows.device_bytes
        return rows + self.basis.nbytes + self.coefficients.nbytes + self.exact.nbytes


def side_by_side(keys: Tensor) -> Tensor:
    """Keys [H, n, D] with the heads of a token in one row: [n, H D]."""
    return keys.transpose(0, 1).flatten(1)


def principal_directions(blocks: Iterable[Tensor], size: int, rank: int) -> Tensor:
    """The first `rank` right singular vectors of the blocks [n, size], one below the other: float64 [size, rank].

    They are the eigenvectors of X^T X, which is summed block by block: the matrix never has to be in one piece.
    """
    moment: Tensor | None = None
    for block in blocks:
        wide = block.double()
        moment = wide.mT @ wide if moment is None else moment + wide.mT @ wide
    assert moment is not None
    assert moment.shape == (size, size)
    vectors: Tensor = torch.linalg.eigh(moment).eigenvectors  # of ascending eigenvalues
    return vectors.flip(-1)[:, :rank]


def own(store: Store) -> ShadowStore:
    """The store, if `allocate_store` of this module made it."""
    if not isinstance(store, ShadowStore):
        raise BindingError(
            f"shadowkv: got a {type(store).__name__}, but fetch and update only know the store of shadowkv's own "
            f"allocate_store; take all three stages from one retriever"
        )
    return store
