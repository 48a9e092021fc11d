"""Memory that the processes of a simulation have in common: files that each of them maps, in a folder of the run.

A file is named by whoever makes it and mapped by the others when they first hear of it; a process that was forked later
finds it all the same. In /dev/shm they are memory and nothing else.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from atoll.wire.errors import DiskFull, LocalError
from atoll.wire.room import NO_ROOM, reserve


def make(path: Path, num_bytes: int) -> mmap.mmap:
    """A new file of so many bytes, mapped; its room is taken.

    Raises:
        DiskFull: there is no room for it.
        LocalError: it cannot be made for another reason.
    """
    try:
        with path.open("w+b") as file:
            reserve(file.fileno(), num_bytes)
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        text = f"{path}: {num_bytes} bytes of a simulation cannot be kept: {error.strerror or error}"
        if error.errno in NO_ROOM:
            raise DiskFull(f"{text}; set TMPDIR to a larger disk, or simulate with fewer --processes") from None
        raise LocalError(text) from None


def attach(path: Path) -> mmap.mmap:
    """The bytes of a file that another process made. Raises LocalError where it is not there."""
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise LocalError(f"{path}: cannot be mapped: {error.strerror or error}") from None
