"""ShadowKV's outlier chunks: those whose landmark stands for them worst keep their keys on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from pariskv.types import LayerInfo
from pariskv_plugins.shadowkv.vectors import Vectors


class ExactChunks:
    """The keys of each row's outlier chunks as they came, in device memory.

    keys    [B, H, outliers x chunk, D]
    starts  [B, H, M] int32, where in `keys` a chunk's are; -1 of the others
    """

    def __init__(self, layer: LayerInfo, capacity: int, chunk: int, outliers: int) -> None:
        self.chunk, self.outliers = chunk, outliers
        rows = (layer.batch, layer.kv_heads)
        self.keys = torch.zeros(*rows, outliers * chunk, layer.head_dim, dtype=layer.dtype, device=layer.device)
        self.starts = torch.full((*rows, -(-capacity // chunk)), -1, dtype=torch.int32, device=layer.device)

    def keep(self, row: int, cosines: Tensor, keys: Vectors) -> None:
        """Take the keys of a row's chunks with the lowest cosines [H, M]."""
        chunks = cosines.topk(min(self.outliers, cosines.shape[-1]), largest=False).indices
        places = torch.arange(0, chunks.shape[-1] * self.chunk, self.chunk, dtype=torch.int32, device=chunks.device)
        self.starts[row].scatter_(-1, chunks, places.expand_as(chunks))
        tokens = (chunks.unsqueeze(-1) * self.chunk + torch.arange(self.chunk, device=chunks.device)).flatten(1)
        indices = tokens.new_full((len(self.keys), *tokens.shape), -1, dtype=torch.int32)
        indices[row] = tokens
        self.keys[row, :, : tokens.shape[-1]] = keys.fetch(indices)[row]

    def put(self, indices: Tensor, keys: Tensor) -> Tensor:
        """The keys [B, H, K, D] at the indices [B, H, K], those of outlier chunks as they came."""
        if not self.outliers:
            return keys
        tokens = indices.clamp(min=0).long()
        starts = self.starts.gather(-1, tokens // self.chunk)
        places = (starts + tokens % self.chunk).clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
        return self.keys.gather(2, places).where(starts.unsqueeze(-1) >= 0, keys.to(self.keys.dtype))

    def crop(self, row: int, tokens: int) -> None:
        """Forget where the keys of a row's chunks from `tokens` on are, a multiple of the chunk."""
        self.starts[row, :, tokens // self.chunk :] = -1

    def take_row(self, row: int, source: ExactChunks, source_row: int, tokens: int) -> None:
        """Make a row hold what a row of others of the same size does, up to `tokens` tokens."""
        self.keys[row] = source.keys[source_row]
        chunks = -(-tokens // self.chunk)
        self.starts[row] = -1
        self.starts[row, :, :chunks] = source.starts[source_row, :, :chunks]

    def grow(self, capacity: int) -> None:
        self.starts = pad(self.starts, (0, -(-capacity // self.chunk) - self.starts.shape[-1]), value=-1)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.starts.nbytes
