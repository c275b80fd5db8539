"""The file of a saved prefix: safetensors, whole under its name or not there, mapped and checked when it is read.

    write_file   streams the parts into a file beside it, which takes the name once it is on the disk
    PrefixFile   the header, checked before anything else; then the tensors, straight into a live cache

The library's own writer wants all tensors in memory at once, so the file is written here, piece by piece; it is read by
the library. In its metadata:

    format, version   of this page
    header            JSON: what the prefix belongs to and what it holds, and of each tensor dtype, shape and SHA-256
    sha256            of the header, and thereby of everything
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pariskv.errors import PrefixError
from pariskv.prefix.atomic import replacing
from pariskv.prefix.parts import Digests, Mapped, Part, ReadAhead, as_bytes, pieces

FORMAT = "pariskv-prefix"
VERSION = 1

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of the types that it knows."""

TOKENS = "tokens"
"""The tensor of the token ids [B, T]."""

AGAIN = "save the prefix again"


@dataclass(frozen=True)
class Entry:
    """What the header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str


def write_file(path: Path, header: Mapping[str, Any], parts: Sequence[Part]) -> str:
    """Write the parts; returns the header's SHA-256.

    Raises PrefixError where the disk is full or the folder cannot be written to, and leaves the name as it was.
    """
    for part in parts:
        if part.dtype not in DTYPES or not part.shape:
            raise PrefixError(
                f"{part.name}: a tensor {list(part.shape)} of {part.dtype} cannot be saved; wanted at least one axis "
                f"and one of {', '.join(sorted(str(dtype) for dtype in DTYPES))}"
            )
    # Large elements first: so all lie at multiples of their size.
    ordered = sorted(parts, key=lambda part: -part.dtype.itemsize)
    digests = {part.name: "0" * 64 for part in parts}
    start = len(_head(header, ordered, digests)[0])
    with replacing(path, start + sum(part.nbytes for part in parts)) as file, Digests() as running:
        # The head comes last: until then this is no safetensors file.
        file.seek(start)
        for part in ordered:
            for first, stop in pieces(part.shape, part.dtype):
                data = as_bytes(part.read(first, stop).cpu())
                running.add(part.name, data)
                file.write(data)
        digests = {part.name: running.of(part.name) for part in parts}
        head, digest = _head(header, ordered, digests)
        assert len(head) == start
        file.seek(0)
        file.write(head)
    return digest


def _head(header: Mapping[str, Any], parts: Sequence[Part], digests: Mapping[str, str]) -> tuple[bytes, str]:
    """The file's head, and the digest of our header in it."""
    tensors = {part.name: [DTYPES[part.dtype], list(part.shape), digests[part.name]] for part in parts}
    text = json.dumps({**header, "tensors": tensors}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    metadata = {"format": FORMAT, "version": str(VERSION), "header": text, "sha256": digest}
    listed: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for part in parts:
        shape, offsets = list(part.shape), [offset, offset + part.nbytes]
        listed[part.name] = {"dtype": DTYPES[part.dtype], "shape": shape, "data_offsets": offsets}
        offset += part.nbytes
    body = json.dumps(listed).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body, digest


class PrefixFile:
    """A saved prefix, open and its header checked; no tensor has been looked at.

    header   as it was given to `write_file`
    tensors  name -> what the header says of it
    sha256   of the header
    """

    def __init__(self, path: Path, handle: Any):
        self.path, self._handle = path, handle
        metadata = handle.metadata() or {}
        given = f"{metadata.get('format', 'no format')} {metadata.get('version', '')}".strip()
        if metadata.get("format") != FORMAT:
            raise self.refusal("format", f"wanted {FORMAT}, got {given}; give a file that `pariskv prefix save` wrote")
        if metadata.get("version") != str(VERSION):
            raise self.refusal(
                "version", f"this pariskv reads {FORMAT} {VERSION}, got {given}; use the pariskv that wrote it, or "
                f"{AGAIN} by this one"
            )  # fmt: skip
        text = metadata.get("header", "")
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        if metadata.get("sha256") != self.sha256:
            raise self.refusal("header", f"was changed after it was written (other SHA-256); {AGAIN}")
        with self.understood():
            self.header: dict[str, Any] = json.loads(text)
            listed = self.header.pop("tensors")
            kinds = {name: dtype for dtype, name in DTYPES.items()}
            self.tensors = {name: Entry(kinds[kind], tuple(shape), sha) for name, (kind, shape, sha) in listed.items()}
        self._check_tensors()

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[PrefixFile]:
        """Raises PrefixError, which names what is wrong with the file."""
        try:
            handle = safe_open(path, framework="pt")
        except FileNotFoundError as error:
            raise PrefixError(f"{path}: no such file") from error
        except (OSError, SafetensorError) as error:
            raise PrefixError(
                f"{path}: length or head: the file is cut off, or no safetensors file ({error}); copy it again, or "
                f"{AGAIN}"
            ) from error
        with handle as opened:
            yield cls(path, opened)

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Turns what reading the header raises, where it lacks a field or holds something else, into a PrefixError."""
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise self.refusal("header", f"cannot be understood ({type(error).__name__}: {error}); {AGAIN}") from error

    def refusal(self, field: str, what: str) -> PrefixError:
        """The error for one field of the file."""
        return PrefixError(f"{self.path}: {field}: {what}")

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size

    def _check_tensors(self) -> None:
        """The file holds the tensors that the header lists, as it lists them."""
        there = set(self._handle.keys())
        for name in sorted(there ^ set(self.tensors)):
            raise self.refusal(name, f"{'is not in the header' if name in there else 'is missing'}; {AGAIN}")
        for name, entry in self.tensors.items():
            found = self._handle.get_slice(name)
            given = found.get_dtype(), tuple(found.get_shape())
            if given != (DTYPES[entry.dtype], entry.shape):
                wanted = f"{DTYPES[entry.dtype]} {list(entry.shape)}"
                raise self.refusal(name, f"wanted {wanted}, got {given[0]} {list(given[1])}; {AGAIN}")

    def fill(self, prepare: Callable[[], Sequence[Part]]) -> None:
        """Put tensors where they belong, mapped piece by piece, and check what was put.

        prepare  makes room for them, while the first pieces are read; its parts are all tensors but the token ids
        Raises PrefixError for the first tensor that is not what was written: what was filled must not be used then.
        """
        mapped = list(self._mapped())
        with ReadAhead(mapped) as ahead:
            parts = {part.name: part for part in prepare()}
            self._check_places(parts)
            for piece in mapped:
                parts[piece.name].write(piece.first, piece.entries)
                ahead.copied()
            changed = [name for name in parts if ahead.of(name) != self.tensors[name].sha256]
        self._refuse_changed(changed)

    def token_ids(self) -> Tensor:
        """The token ids [B, T], checked."""
        tensor: Tensor = self._handle.get_tensor(TOKENS).clone()
        with Digests() as running:
            for start, stop in pieces(tuple(tensor.shape), tensor.dtype):
                running.add(TOKENS, as_bytes(tensor[start:stop]))
            self._refuse_changed([TOKENS] if running.of(TOKENS) != self.tensors[TOKENS].sha256 else [])
        return tensor

    def _mapped(self) -> Iterator[Mapped]:
        """All pieces but those of the token ids, as they lie in the file; nothing is read yet."""
        tensors = {name: self._handle.get_tensor(name) for name in self.tensors if name != TOKENS}
        for name, tensor in sorted(tensors.items(), key=lambda item: int(item[1].data_ptr())):
            for start, stop in pieces(tuple(tensor.shape), tensor.dtype):
                yield Mapped(name, start, tensor[start:stop])

    def _check_places(self, parts: Mapping[str, Part]) -> None:
        """The cache has a place for every tensor, and wants no other."""
        for name in sorted(parts.keys() ^ (self.tensors.keys() - {TOKENS})):
            what = "is missing" if name in parts else "has no place in the cache here"
            raise self.refusal(name, f"{what}; load it with what it was saved with")
        for name, part in parts.items():
            entry = self.tensors[name]
            if (entry.dtype, entry.shape) != (part.dtype, part.shape):
                saved, here = f"{entry.dtype} {list(entry.shape)}", f"{part.dtype} {list(part.shape)}"
                raise self.refusal(name, f"saved {saved}, here {here}; load it with what it was saved with")

    def _refuse_changed(self, changed: Sequence[str]) -> None:
        if changed:
            more = f", and {len(changed) - 1} tensors more" if len(changed) > 1 else ""
            raise self.refusal(
                changed[0], f"was changed after it was written (other SHA-256){more}; copy it again, or {AGAIN}"
            )
