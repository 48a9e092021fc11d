"""A version of which only a part is fetched, since the rest is that of the version before it, which is here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.transport.durable import disk_errors
from atoll.wire.errors import LocalError

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of a version's data, without the header of its file."""

    first_byte: int
    num_bytes: int


def part_of_version(fragments: Sequence[tuple[int, int]], version: int) -> Part | None:
    """What differs between `version` and the one before it; None where all does, or there is none before it."""
    if version == 0 or not fragments:
        return None
    start, stop = fragments[(version - 1) % len(fragments)]
    return Part(first_byte=start, num_bytes=stop - start)


def part_file(path: Path) -> Path:
    """Where the part of the version that is to lie at `path` arrives."""
    return path.with_name(path.name + ".fragment")


def compose(previous: Path, arrived: Path, part: Part, path: Path, header: bytes) -> None:
    """Makes the file of a version from the one before it and the part that has arrived, which is removed. Blocks.

    The file is whole under its name, and not synced: what is fetched can be fetched again.

    Args:
        header: of the new file; both files end with the same number of bytes of data.

    Raises:
        DiskFull, LocalError: it cannot be written, or one of the files cannot be read.
    """
    draft = path.with_name(path.name + ".fragment.draft")
    with disk_errors(path):
        with previous.open("rb") as old, draft.open("wb") as new:
            old.seek(_data_offset(previous))
            new.write(header)
            shutil.copyfileobj(old, new, _BLOCK_BYTES)
            new.seek(len(header) + part.first_byte)
            with arrived.open("rb") as fragment:
                shutil.copyfileobj(fragment, new, _BLOCK_BYTES)
            if new.tell() != len(header) + part.first_byte + part.num_bytes:
                raise LocalError(
                    f"{arrived}: is not of the {part.num_bytes} bytes that were fetched; restart the agent"
                )
        os.replace(draft, path)
        arrived.unlink(missing_ok=True)


def _data_offset(path: Path) -> int:
    """Where the data of a model file begins: after the length of its header (8 bytes) and the header."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
