"""Base versions of a site's runs: on this disk, or fetched once when a task needs them.

Invariant: a file under its final name is a whole model file, fetched by this process. What an earlier process has
fetched counts as on its way: it was not synced, so it is compared with the server's before it is used, which moves no
bytes. The data lands where it will stay, behind a header that this site makes from the run's own manifest, so nothing
is copied and nothing of the file's form comes from the server. A transfer that breaks goes on where it stopped, after
a restart of the agent too.

::

    models/RUN/VERSION.safetensors                whole
    models/RUN/VERSION.safetensors.part           on its way
    models/RUN/VERSION.safetensors.fragment[...]  the same of the part in which it differs from the version before
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.client.attachment import Mailbox
from atoll.client.version_parts import Part, compose, part_file
from atoll.transport.durable import disk_errors, private_folder, remove_tree
from atoll.transport.reconnect import Backoff
from atoll.transport.transfer import Carrier, download, part_of, partial_bytes
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import AtollError, LocalError, Malformed, RemoteError, Unavailable
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import header_of

_log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True, kw_only=True)
class _Wanted:
    """A version that somebody waits for."""

    run: str
    version: int
    path: Path
    header: bytes
    num_bytes: int  # of the data
    grows: bool  # it has up to `num_bytes`
    here: asyncio.Future[Path]
    part: Part | None = None  # what lacks of it, where the version before is here; the transfer moves that alone
    backoff: Backoff = field(default_factory=Backoff)
    transfer: asyncio.Task[None] | None = None
    grant: str = ""


class BaseModels:
    """The base versions under `folder`."""

    def __init__(self, folder: Path, *, mailbox: Mailbox, spawn: Spawn, carrier: Callable[[], Carrier]) -> None:
        self._folder = folder
        with disk_errors(folder):
            for path in folder.glob("*/*.safetensors"):
                path.rename(part_of(path))
        self._mailbox = mailbox
        self._spawn = spawn
        self._carrier = carrier
        self._wanted: dict[tuple[str, int], _Wanted] = {}

    async def get(
        self,
        run: str,
        version: int,
        manifest: Manifest,
        *,
        encoded_bytes: int = 0,
        most_bytes: int = 0,
        part: Part | None = None,
    ) -> Path:
        """The model file of a version, fetched first where it is not here.

        Args:
            encoded_bytes: length of a version that comes by a codec, which is stored as it comes; 0: none does.
            most_bytes: length of a list of payloads, at most, which is stored as it comes too; 0: it is none.
            part: the bytes of its data in which it differs from the version before; where that one is here, no others
                are fetched.

        Raises:
            LocalError: it cannot be stored here, DiskFull where there is no room.
            RemoteError: the server does not give it, or what it has is no version of this model.
        """
        path = self._path(run, version)
        if await asyncio.to_thread(path.exists):
            return path
        wanted = self._wanted.get((run, version))
        if wanted is None:
            await asyncio.to_thread(private_folder, path.parent)
            about = {"atoll.run": run, "atoll.version": str(version)}
            header = b"" if encoded_bytes or most_bytes else await asyncio.to_thread(header_of, manifest, about)
            num_bytes = most_bytes or encoded_bytes or manifest.num_bytes
            if part is not None and not await asyncio.to_thread(self._path(run, version - 1).exists):
                part = None
            future = asyncio.get_running_loop().create_future()
            wanted = _Wanted(
                run=run,
                version=version,
                path=path,
                header=header,
                num_bytes=part.num_bytes if part else num_bytes,
                grows=bool(most_bytes),
                here=future,
                part=part,
            )
            self._wanted[run, version] = wanted
            self._ask(wanted)
        try:
            return await asyncio.shield(wanted.here)
        except asyncio.CancelledError:  # a run has one task at a time, so nobody else waits
            self._give_up(run, version)
            raise

    def ask_again(self) -> None:
        """Ask for all that is wanted on a new stream; the grants of the old one are void."""
        for wanted in self._wanted.values():
            if wanted.transfer is None:
                self._ask(wanted)

    def granted(self, grant: pb.Grant) -> None:
        """Begin the transfer that the server has room for, or give the room back where nobody wants it any more."""
        wanted = self._wanted.get((grant.key.run, grant.version))
        if wanted is None:
            _log.info("run %s: version %d is not wanted any more", grant.key.run, grant.version)
            self._spawn(self._carrier().give_back(grant))
            return
        first, num_bytes = wanted.part.first_byte if wanted.part else 0, grant.num_bytes
        fits = num_bytes <= wanted.num_bytes if wanted.grows else num_bytes == wanted.num_bytes
        if not fits or grant.first_byte != first:
            self._spawn(self._carrier().give_back(grant))
            self._settle(wanted, _wrong_size(grant, wanted.num_bytes, grows=wanted.grows))
            return
        if wanted.transfer is not None:
            wanted.transfer.cancel()
        wanted.grant = grant.grant
        wanted.transfer = self._spawn(self._fetch(wanted, grant))

    def withdrawn(self, grant: str) -> bool:
        """Stop the transfer of a grant that was taken back and ask again; whether it was one of these."""
        for wanted in self._wanted.values():
            if wanted.grant == grant and wanted.transfer is not None:
                wanted.transfer.cancel()
                wanted.transfer = self._spawn(self._ask_later(wanted))
                return True
        return False

    def refused(self, reason: RemoteError) -> None:
        """The server will not grant what was asked for; the reason names the run."""
        for wanted in list(self._wanted.values()):
            if wanted.transfer is not None or reason.run not in ("", wanted.run):
                continue
            if isinstance(reason, Unavailable):
                wanted.transfer = self._spawn(self._ask_later(wanted))
            else:
                self._settle(wanted, reason)

    def drop_older(self, run: str, version: int, keep: frozenset[int]) -> None:
        """Remove the versions of `run` below `version`, but for those in `keep`. Blocks."""
        for path in self._folder.joinpath(run).glob("*.safetensors*"):
            number = path.name.partition(".")[0]
            if number.isdecimal() and int(number) < version and int(number) not in keep:
                path.unlink(missing_ok=True)

    def drop_run(self, run: str) -> None:
        """Remove all versions of `run`. Blocks."""
        remove_tree(self._folder / run)

    def close(self) -> None:
        """Stop all transfers; what has arrived stays."""
        for run, version in list(self._wanted):
            self._give_up(run, version)

    def _give_up(self, run: str, version: int) -> None:
        wanted = self._wanted.pop((run, version), None)
        if wanted is not None:
            wanted.here.cancel()
            if wanted.transfer is not None:
                wanted.transfer.cancel()

    def _path(self, run: str, version: int) -> Path:
        return self._folder / run / f"{version}.safetensors"

    def _ask(self, wanted: _Wanted) -> None:
        offset = min(partial_bytes(*_place(wanted)), wanted.num_bytes)
        fetch = pb.Fetch(run=wanted.run, version=wanted.version, offset=offset)
        if wanted.part is not None:
            fetch.first_byte, fetch.part_bytes = wanted.part.first_byte, wanted.part.num_bytes
        self._mailbox.post(fetch=fetch)

    async def _ask_later(self, wanted: _Wanted) -> None:
        await asyncio.sleep(wanted.backoff.next_s())
        wanted.transfer = None
        self._ask(wanted)

    async def _fetch(self, wanted: _Wanted, grant: pb.Grant) -> None:
        try:
            path, header = _place(wanted)
            await download(self._carrier(), grant, path, header=header)
            if wanted.part is not None:
                previous = self._path(wanted.run, wanted.version - 1)
                await asyncio.to_thread(compose, previous, path, wanted.part, wanted.path, wanted.header)
        except LocalError as error:
            self._settle(wanted, error)
        except RemoteError as error:
            _log.warning("run %s: version %d did not arrive, asking again: %s", wanted.run, wanted.version, error)
            await self._ask_later(wanted)
        else:
            self._settle(wanted, None)

    def _settle(self, wanted: _Wanted, error: AtollError | None) -> None:
        self._wanted.pop((wanted.run, wanted.version), None)
        if wanted.here.done():
            return
        if error is None:
            wanted.here.set_result(wanted.path)
        else:
            wanted.here.set_exception(error)


def _place(wanted: _Wanted) -> tuple[Path, bytes]:
    """Where what is fetched arrives, and what stands before it there."""
    return (wanted.path, wanted.header) if wanted.part is None else (part_file(wanted.path), b"")


def _wrong_size(grant: pb.Grant, num_bytes: int, *, grows: bool) -> Malformed:
    wanted = f"at most {num_bytes}" if grows else f"{num_bytes}"
    return Malformed(
        f"run {grant.key.run}: the server grants {grant.num_bytes} bytes of version {grant.version}, "
        f"the run's manifest and strategy make {wanted}",
        run=grant.key.run,
        field="num_bytes",
        value=grant.num_bytes,
        bound=wanted,
    )
