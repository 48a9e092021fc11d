"""Room on the disk, taken before it is needed."""

from __future__ import annotations

import errno
import os
from typing import Final

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of the system's errors that mean a full disk, to whoever has to make room.

EFBIG: a limit on the size of one file (ulimit -f), which to the owner of the folder is the same trouble.
"""


def reserve(descriptor: int, num_bytes: int) -> None:
    """Makes a file at least `num_bytes` long with all its blocks taken, so that writing to a mapping of it cannot fail.

    Where the system cannot take blocks beforehand (macOS), only the length is set.

    Raises:
        OSError: one of NO_ROOM where there is none.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    elif os.fstat(descriptor).st_size < num_bytes:
        os.ftruncate(descriptor, num_bytes)
