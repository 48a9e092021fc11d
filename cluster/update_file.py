"""The file that an update is written into: mapped, so that encoding is the only copy.

The agent makes it durable, while its bytes are already on their way: see transport/outbox.py.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.wire.errors import DiskFull, LocalError
from atoll.wire.room import NO_ROOM, reserve


@contextmanager
def create_update(path: Path, num_bytes: int) -> Iterator[memoryview]:
    """A writable view of a file's bytes, new or to be written over; on an error the file is removed.

    The room is reserved first: writing to a mapping of a full disk would end the process instead of raising.

    Raises:
        DiskFull: there is no room for the file.
        LocalError: it cannot be written for another reason.
    """
    try:
        with _mapped(path, num_bytes) as data:
            yield data
    except OSError as error:
        path.unlink(missing_ok=True)
        kind = DiskFull if error.errno in NO_ROOM else LocalError
        raise kind(f"{path}: the update of {num_bytes} bytes cannot be written: {error.strerror or error}") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def _mapped(path: Path, num_bytes: int) -> Iterator[memoryview]:
    with path.open("r+b" if path.exists() else "w+b") as file:
        if os.fstat(file.fileno()).st_size > num_bytes:
            os.ftruncate(file.fileno(), num_bytes)
        reserve(file.fileno(), num_bytes)
        mapping = mmap.mmap(file.fileno(), num_bytes)
        data = memoryview(mapping)
        yield data
        with suppress(BufferError):  # a tensor over the data may still live; the mapping ends with it
            data.release()
            mapping.close()
