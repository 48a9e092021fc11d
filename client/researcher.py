"""What a researcher does at the server: submit a job, follow it, stop it, fetch the model.

Each call may be repeated safely: a submission carries an id of its own, transfers resume, the rest only reads or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.client.connection import CALL_TIMEOUT_S, connect
from atoll.client.first_version import FirstVersion, build_first_version
from atoll.client.people import Person
from atoll.transport.credentials import broke_off
from atoll.transport.grpc_carrier import GrpcCarrier
from atoll.transport.reconnect import Backoff
from atoll.transport.transfer import download, upload
from atoll.wire import model_file, runs_pb2, runs_pb2_grpc
from atoll.wire.errors import ConfigError, Incompatible, LocalError, Malformed, Unavailable, Unknown
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest
from atoll.wire.names import check_run_id

ENDED = frozenset({"finished", "failed", "stopped"})
LATEST = "latest"
PATIENCE_S = 600.0  # a server that is restarted between rounds is back in seconds; a reboot takes minutes
COPY_BYTES = 1 << 20

Notice = Callable[[str], None]


def _silent(_: str) -> None:
    """A notice that nobody reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel:
    """A model version that now lies in a file."""

    run: str
    version: int
    path: Path
    num_tensors: int
    num_bytes: int  # of the tensors


async def submit(person: Person, job: Job, *, notice: Notice = _silent, patience_s: float = PATIENCE_S) -> str:
    """Builds version 0 on this machine, hands job and model to the server, and returns the run's id.

    Of a job that continues a run the model is only looked at: the server has the values.

    Args:
        notice: hears what is done, one short text a step.
        patience_s: how long a server that goes away in the middle is waited for; one that never answers is not.

    Raises:
        ConfigError, AppFailed, BadManifest: as `build_first_version`.
        RemoteError: the server refuses the job, or stays away.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-submit-") as folder:
        notice("building the first model")
        first = await asyncio.to_thread(build_first_version, person, job, Path(folder))
        request = runs_pb2.SubmitRequest(
            job=job.canonical(),
            manifest=first.manifest,
            app_hash=first.app_hash,
            crc32=0 if job.job.continues else first.crc32,
            request=uuid.uuid4().hex,
        )
        notice("handing it to the server")
        return await _hand_over(person, request, first, _Patience(patience_s, notice))


async def _hand_over(person: Person, request: runs_pb2.SubmitRequest, first: FirstVersion, patience: _Patience) -> str:
    """The run's id, once the server holds all bytes. Who was never there is not waited for; who went away is."""
    met = False
    while True:
        try:
            async with connect(person) as channel:
                stub = runs_pb2_grpc.RunsStub(channel)
                reply: runs_pb2.SubmitReply = await stub.Submit(request, timeout=CALL_TIMEOUT_S)
                met = True
                if reply.HasField("upload"):
                    await upload(GrpcCarrier(channel), reply.upload, first.path)
                return reply.run
        except Unavailable as error:
            met = met or broke_off(error)  # it may have taken the request: asked again, it gives the same run
            if not met:
                raise
            await patience.wait(error)


async def watch(
    person: Person, run: str, *, notice: Notice = _silent, patience_s: float = PATIENCE_S
) -> AsyncGenerator[runs_pb2.RunSnapshot]:
    """The run's present state, then each change, to its end. Goes on when the server was restarted meanwhile.

    Raises:
        Unknown: no such run.
        RemoteError: the server refuses, or stays away longer than `patience_s`.
    """
    patience = _Patience(patience_s, notice)
    while True:
        try:
            async with connect(person) as channel:
                async for snapshot in runs_pb2_grpc.RunsStub(channel).Watch(runs_pb2.WatchRequest(run=run)):
                    patience.reset()
                    yield snapshot
                    if snapshot.status in ENDED:
                        return
                raise Unavailable(f"the server ended the view of run {run} before the run ended", run=run)
        except Unavailable as error:
            await patience.wait(error)


async def snapshot_of(person: Person, run: str) -> runs_pb2.RunSnapshot:
    """The run's present state. Raises as `watch` does, without waiting for a server that is away."""
    async with contextlib.aclosing(watch(person, run, patience_s=0.0)) as snapshots:
        async for snapshot in snapshots:
            return snapshot
    raise Unknown(f"the server says nothing about run {run}", run=run)


async def runs(person: Person) -> list[runs_pb2.RunSnapshot]:
    """All runs, newest first, without their rounds. Raises RemoteError where the server refuses or is away."""
    async with connect(person) as channel:
        stub = runs_pb2_grpc.RunsStub(channel)
        reply: runs_pb2.ListReply = await stub.List(runs_pb2.ListRequest(), timeout=CALL_TIMEOUT_S)
    return list(reply.runs)


async def find_run(person: Person, text: str) -> str:
    """The run that a person means by `text`: an id, or "latest".

    Raises:
        ConfigError: it is neither.
        Unknown: there is no run yet.
    """
    if text != LATEST:
        try:
            return check_run_id(text.upper())
        except Malformed:
            raise ConfigError(
                f"{text!r} is no run id: wanted 26 characters as `atoll runs` prints them, or {LATEST!r}",
                key="RUN",
                value=text,
            ) from None
    found = await runs(person)
    if not found:
        raise Unknown("there is no run yet; submit one with: atoll run JOB")
    return found[0].run


async def stop(person: Person, run: str) -> None:
    """Ends the run; its committed versions stay. Raises RemoteError: unknown, ended already, somebody else's."""
    async with connect(person) as channel:
        await runs_pb2_grpc.RunsStub(channel).Stop(runs_pb2.StopRequest(run=run), timeout=CALL_TIMEOUT_S)


async def fetch_model(
    person: Person, run: str, out: Path, *, version: int | None = None, best: bool = False
) -> FetchedModel:
    """Writes a model version as safetensors to `out`: the newest where `version` is None, or the `best`.

    Raises:
        Unknown: no such run or version (the server keeps the newest few), or no best one.
        Incompatible: the server is older than the best versions.
        DiskFull, LocalError: `out` cannot be written.
        BadManifest, BadFrame: the bytes on the way were not what they claimed to be.
    """
    request = runs_pb2.ModelRequest(run=run, version=version or 0, newest=version is None and not best, best=best)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"{out.parent} cannot be made: {error.strerror}") from None
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        raw = Path(folder) / "data"
        async with connect(person) as channel:
            stub = runs_pb2_grpc.RunsStub(channel)
            reply: runs_pb2.ModelReply = await stub.Model(request, timeout=CALL_TIMEOUT_S)
            if best and not reply.best:
                raise Incompatible("the server is too old to tell which version is the best; upgrade it", run=run)
            await download(GrpcCarrier(channel), reply.download, raw)
        manifest = Manifest.decode(reply.manifest)
        _write_model(out, manifest, raw, {"atoll.run": run, "atoll.version": str(reply.version)})
    return FetchedModel(
        run=run, version=reply.version, path=out, num_tensors=len(manifest.model), num_bytes=manifest.model.num_bytes
    )


def _write_model(out: Path, manifest: Manifest, raw: Path, metadata: dict[str, str]) -> None:
    """The model's own tensors of a version whose bytes are in `raw`."""
    with raw.open("rb") as source, model_file.create(out, manifest.model, metadata) as data:
        for spec in manifest.model:
            source.seek(manifest[spec.name].offset)
            position, end = spec.offset, spec.offset + spec.num_bytes
            while num_read := source.readinto(data[position : min(position + COPY_BYTES, end)]):
                position += num_read


class _Patience:
    """Waits for a server that is away, with jittered backoff, up to a bound that counts from its last word."""

    def __init__(self, bound_s: float, notice: Notice) -> None:
        self._bound_s, self._notice = bound_s, notice
        self._backoff = Backoff(most_s=10.0)
        self._since_s: float | None = None

    def reset(self) -> None:
        self._since_s = None
        self._backoff.reset()

    async def wait(self, error: Unavailable) -> None:
        """Returns when it is time to try again. Raises `error` where the bound is reached."""
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s >= self._bound_s:
            raise error
        self._notice("the server is away, trying again")
        await asyncio.sleep(self._backoff.next_s())
