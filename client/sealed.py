"""Small files that only this site can read, durable before anything follows from them: AES-256-GCM, key of the home.

Invariant: a file is whole under its name or as it was before, and opens only under the name and in the folder that it
was written with. What is lost or damaged is an error and never an empty value.
Assumption: whoever can read the home's secret can read the files too; removing one leaves its old bytes to the disk.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.transport.durable import disk_errors, private_folder, sync_folder
from atoll.wire.errors import LocalError

_NONCE_BYTES: Final = 12
_LABEL: Final = b"atoll/sealed/1"


class Sealer:
    """Writes and reads sealed files. `secret` is 32 bytes that only this site has."""

    def __init__(self, secret: bytes) -> None:
        self._cipher = AESGCM(HKDF(algorithm=SHA256(), length=32, salt=None, info=_LABEL).derive(secret))

    def write(self, path: Path, data: bytes) -> None:
        """Puts `data` in place of what `path` held; durable when it returns. Raises DiskFull, LocalError."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, data, _place(path))
        draft = private_folder(path.parent) / f"{path.name}.draft"
        with disk_errors(path):
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(sealed)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            sync_folder(path.parent)

    def read(self, path: Path) -> bytes | None:
        """What `path` holds; None where there is no such file.

        Raises:
            LocalError: it cannot be read, or is not what was written there.
        """
        try:
            with disk_errors(path):
                sealed = path.read_bytes() if path.exists() else None
            return None if sealed is None else self._opened(path, sealed)
        except (InvalidTag, ValueError):
            raise LocalError(f"{path} is damaged, or was moved here: this site cannot go on from it") from None

    def _opened(self, path: Path, sealed: bytes) -> bytes:
        return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _place(path))


def erase(path: Path) -> None:
    """Removes a file, durably; one that is not there is fine. Raises LocalError."""
    with disk_errors(path):
        if path.exists():
            path.unlink()
            sync_folder(path.parent)


def _place(path: Path) -> bytes:
    return f"{path.parent.name}/{path.name}".encode()
