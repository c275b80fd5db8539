"""What a prefix's file is made of: tensors that are written and read in pieces along their first axis.

A part does not hold its tensor. It knows how to read a piece of it out of a live cache, and how to put a piece there,
so that neither saving nor loading needs a second copy of a store.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 8 << 20
"""Bytes of a tensor that are written, read and digested at a time, about: whole entries of its first axis."""

AHEAD = 4
"""Pieces that may wait to be digested; so many are mapped and not yet done with."""

THREADS = 4
"""Of the digests; a SHA-256 of one thread is slower than a good disk."""


@dataclass(frozen=True)
class Part:
    """One tensor of the file.

    shape  at least one axis, along which it comes in pieces
    read   (start, stop) -> these entries of the first axis, of any strides, on any device
    write  (start, entries) puts them there; called in order, and with all of them
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    write: Callable[[int, Tensor], None]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_part(name: str, tensor: Tensor) -> Part:
    """A tensor that is there in one piece, such as what `fit` returned."""

    def write(start: int, entries: Tensor) -> None:
        tensor[start : start + len(entries)].copy_(entries)

    return Part(name, tuple(tensor.shape), tensor.dtype, lambda start, stop: tensor[start:stop], write)


def pieces(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """(start, stop) of each piece along the first axis; part of the format, because each is digested alone."""
    entry = math.prod(shape[1:]) * dtype.itemsize
    if not shape[0] or not entry:
        return
    step = max(1, PIECE // entry)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def as_bytes(entries: Tensor) -> memoryview:
    """A CPU tensor's memory, copied only where it is not contiguous."""
    return entries.contiguous().reshape(-1).view(torch.uint8).numpy().data


class Digests:
    """SHA-256 of tensors: of the digests of their pieces, which several threads work on.

    >>> with Digests() as digests:
    ...     digests.add("a", piece)
    >>> digests.of("a")
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "pariskv-digest")
        self._pieces: dict[str, list[Future[bytes]]] = {}
        self._waiting: deque[Future[bytes]] = deque()

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, data: memoryview) -> None:
        """The next piece of a tensor; its memory must stay as it is. Waits where too many are not done yet."""
        if len(self._waiting) >= AHEAD:
            self._waiting.popleft().result()
        future = self._pool.submit(_digest, data)
        self._waiting.append(future)
        self._pieces.setdefault(name, []).append(future)

    def of(self, name: str) -> str:
        """The digest of a tensor whose pieces were all added, as hexadecimal digits."""
        return hashlib.sha256(b"".join(piece.result() for piece in self._pieces.get(name, []))).hexdigest()


def _digest(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()
