"""Files and folders that are either whole or absent after a crash, and a full disk that is told apart.

Assumption: the file system keeps what it has acknowledged to fsync, and renames are atomic (ext4, XFS, APFS, NTFS).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.wire.errors import DiskFull, LocalError
from atoll.wire.room import NO_ROOM

# Leaves out times, which nobody reads; where a file is written over it need not wait for the file system's journal.
_sync_data = getattr(os, "fdatasync", os.fsync)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns the operating system's errors about `path` into ours.

    Raises:
        DiskFull: no space, over a quota, or over the limit on the size of a file.
        LocalError: anything else that the operating system refuses.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise DiskFull(f"{path}: no room on the disk ({error.strerror}); free some, then start again") from error
        raise LocalError(f"{path}: {error.strerror or error}; check the folder and who owns it") from error


def sync_file(path: Path) -> None:
    """Returns when the bytes of the file at `path` are durable."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        _sync_data(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Returns when the names in `folder` are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_folder(folder: Path) -> Path:
    """`folder`, made with mode 0700 (parents too) where it is not there yet."""
    with disk_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def remove_tree(folder: Path) -> None:
    """Removes `folder` and all in it; one that is not there is fine."""
    with disk_errors(folder):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
