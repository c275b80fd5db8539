"""What a prefix's file is made of: tensors that are written and read in pieces along their first axis.

A part does not hold its tensor. It knows how to read a piece of it out of a live cache, and how to put a piece there,
so that neither saving nor loading needs a second copy of a store.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 8 << 20
"""Bytes of a tensor that are written, read and digested at a time, about: whole entries of its first axis."""

AHEAD = 4
"""Pieces that may wait to be digested while a file is written."""

LEAD = 64
"""Pieces that may be digested, while a file is read, before they are copied."""

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
    """SHA-256 of tensors that are written: of the digests of their pieces, which several threads work on.

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
        return _digest_of(self._pieces.get(name, []))


class Mapped(NamedTuple):
    """A piece of the mapped tensor `name`, and its first entry."""

    name: str
    first: int
    entries: Tensor


class ReadAhead:
    """The same for tensors of a mapped file, begun before anybody wants them: the digests bring them into memory.

    pieces  of all tensors in the order in which they will be copied

    Digests are ahead of the copies by LEAD pieces at most, so that a file larger than the memory is read once.
    """

    def __init__(self, pieces: Iterable[Mapped]):
        self._pool = ThreadPoolExecutor(THREADS, "pariskv-digest")
        self._lead, self._is_over = Semaphore(LEAD), False
        self._pieces: dict[str, list[Future[bytes]]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(self._pool.submit(self._digest, piece))

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._lead.release(THREADS)
        self._pool.shutdown(cancel_futures=True)

    def _digest(self, piece: Mapped) -> bytes:
        if not self._is_over:
            self._lead.acquire()
        return b"" if self._is_over else _digest(as_bytes(piece.entries))

    def copied(self) -> None:
        """One more piece was copied."""
        self._lead.release()

    def of(self, name: str) -> str:
        """As of `Digests`; once all pieces were copied."""
        return _digest_of(self._pieces.get(name, []))


def _digest(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _digest_of(pieces: Iterable[Future[bytes]]) -> str:
    return hashlib.sha256(b"".join(piece.result() for piece in pieces)).hexdigest()
