"""Evaluation of committed versions on the server's own data, in worker processes that hold no keys.

The server itself never imports an app: a worker does, from the server's own `[apps]`, when the installed code has the
hash that the run was submitted with.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from pathlib import Path

from atoll.cluster.messages import Evaluate, Prepare
from atoll.cluster.nursery_process import Nursery
from atoll.cluster.worker_process import WorkerProcess
from atoll.server.settings import ServerFolder, ServerSettings
from atoll.server.store import Store
from atoll.wire.errors import AppFailed, RemoteError, Unknown
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 600.0  # loading an app and its data from a cold network disk
MAX_WORKERS = 2  # each holds an app with its test data; runs side by side beyond that take turns


class Evaluator:
    """The workers of the runs that were evaluated last, one a run."""

    def __init__(self, *, settings: ServerSettings, folder: ServerFolder, store: Store) -> None:
        self._settings, self._folder, self._store = settings, folder, store
        self._workers: OrderedDict[str, WorkerProcess] = OrderedDict()  # prepared, longest unused first
        self._nursery = Nursery(folder.evaluator / "nursery.log", trains=False)
        self._turn = asyncio.Lock()

    async def evaluate(
        self, run: str, job: Job, manifest: Manifest, version: int, model_path: Path
    ) -> dict[str, tuple[float, float]]:
        """Sum and count of each metric of a version on the server's own test data.

        Raises:
            Unknown: this server's settings have no such app or data.
            NotAllowed: the app installed here is not the code that the run was submitted with.
            AppFailed: the app raised, or took longer than `evaluation.timeout_s`.
            LocalError: the worker died.
        """
        request = Evaluate(key=f"version-{version}", round=version, base_version=version, base_path=str(model_path))
        async with self._turn:
            worker = await self._worker(run, job, manifest)
            try:
                async with asyncio.timeout(self._settings.evaluation.timeout_s):
                    return (await worker.evaluate(request)).metrics
            except TimeoutError:
                await self._end(run)
                raise AppFailed(
                    f"run {run}: the evaluation of version {version} took longer than evaluation.timeout_s = "
                    f"{self._settings.evaluation.timeout_s:g} s of server.toml; raise it, or use a smaller test set",
                    run=run,
                ) from None
            except RemoteError:
                raise  # the app's fault: the worker has answered, and is good for the next version
            except BaseException:
                await self._end(run)  # whatever state it is in, the next evaluation starts afresh
                raise

    async def release(self, run: str) -> None:
        """The run is over: end its worker."""
        async with self._turn:
            await self._end(run)

    async def close(self) -> None:
        """End all workers; an evaluation that runs raises."""
        for worker in self._workers.values():
            worker.kill()
        async with self._turn:
            for run in list(self._workers):
                await self._end(run)
            await self._nursery.close()

    async def _worker(self, run: str, job: Job, manifest: Manifest) -> WorkerProcess:
        if run in self._workers:
            self._workers.move_to_end(run)
            return self._workers[run]
        request = await self._preparation(run, job, manifest)
        while len(self._workers) >= MAX_WORKERS:
            await self._end(next(iter(self._workers)))
        place = self._folder.evaluator / run
        env = {"CUDA_VISIBLE_DEVICES": ""} if request.device == "cpu" else None
        worker = WorkerProcess(place, env=env, nursery=self._nursery)
        self._workers[run] = worker
        try:
            await worker.start()
            await worker.prepare(request, timeout_s=PREPARE_TIMEOUT_S)
        except BaseException:
            await self._end(run)
            raise
        log.info("run %s: evaluated here by a worker with pid %s", run, worker.pid)
        return worker

    async def _preparation(self, run: str, job: Job, manifest: Manifest) -> Prepare:
        app, data = self._settings.apps.get(job.job.code), self._settings.data.get(job.data_name or "")
        for table, name, found in (("apps", job.job.code, app), ("data", job.data_name or "", data)):
            if found is None:
                raise Unknown(
                    f"run {run}: this server has no [{table}.{name}]; add it to server.toml and start the server "
                    "again, or set evaluation.server = false in the job",
                    run=run,
                    field=f"{table}.{name}",
                )
        assert app is not None
        assert data is not None
        row = await asyncio.to_thread(self._store.run, run)
        place = self._folder.evaluator / run
        manifest_path = place / "manifest.bin"
        await asyncio.to_thread(_write, manifest_path, manifest.encode())
        return Prepare(
            run=run,
            site=self._settings.federation,
            app_name=job.job.code,
            distribution=app.distribution,
            entry_point=app.entry_point,
            app_hash=row.app_hash,
            data=data,
            job=job.canonical().decode(),
            manifest_path=str(manifest_path),
            state_folder=str(place / "state"),
            encoded=False,
            device=self._settings.evaluation.device,
            training=False,
        )

    async def _end(self, run: str) -> None:
        worker = self._workers.pop(run, None)
        if worker is not None:
            await worker.close()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(data)
