"""A file that takes its name once all of it is on the disk.

Meanwhile it is written beside that under a name of its own, `.NAME.RANDOM.part`, and locked. A process that is killed
leaves this behind, without the lock; the next save to the same name removes it. Linux and macOS.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pariskv.errors import PrefixError

SUFFIX = ".part"


@contextmanager
def replacing(path: Path, size: int, what: str = "the prefix") -> Iterator[BinaryIO]:
    """A new file of `size` bytes that replaces `path` at the end of the block; after an error nothing has changed.

    what  it is, for the errors

    Raises PrefixError for what the file system refuses: no room, no folder, no permission.
    """
    partial: Path | None = None
    try:
        remove_stale(path)
        refuse_full_disk(path, size, what)
        partial, file = _create(path)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
        _sync_folder(path.parent)
    except BaseException as error:
        if partial is not None:
            with suppress(OSError):
                partial.unlink()
        if isinstance(error, OSError):
            left = "the file there is as it was" if path.exists() else "nothing is left of it"
            raise PrefixError(
                f"{path}: {what} cannot be written: {error.strerror or error}; {left}. It takes "
                f"{size / 1e6:,.1f} MB: make room, or choose another folder"
            ) from error
        raise


def refuse_full_disk(path: Path, size: int, what: str = "the prefix") -> None:
    """Raise PrefixError where the disk has no room for so many bytes, before any is written."""
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise PrefixError(
            f"{path}: {what} takes {size / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free there; make room, or choose "
            f"another folder"
        )


def _create(path: Path) -> tuple[Path, BinaryIO]:
    """A new, locked file beside `path`; who cleans up just then may take it away before it is locked: another one."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{SUFFIX}")
        file = open(partial, "xb")  # noqa: SIM115  the caller closes it
        if _lock(file) and partial.exists():
            return partial, file
        file.close()


def _lock(file: BinaryIO) -> bool:
    """Whether the file is now ours; the lock goes with the process, however that ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_stale(path: Path) -> None:
    """Remove what killed processes left beside `path`, and nothing that is being written."""
    for name in glob.glob(f"{glob.escape(str(path.with_name('.' + path.name)))}.*{SUFFIX}"):
        with suppress(OSError), open(name, "rb") as file:
            if _lock(file):
                os.unlink(name)


def _sync_folder(folder: Path) -> None:
    """Have the new name survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
