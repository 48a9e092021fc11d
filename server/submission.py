"""A run on its way in: what a researcher sent is checked, and version 0 of its model is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from atoll.aggregation.lanes import run_manifest
from atoll.aggregation.layout import update_layout
from atoll.aggregation.metrics import MetricRules
from atoll.aggregation.reducers.append import Append
from atoll.aggregation.stages import Strategies
from atoll.aggregation.strategy import Strategy
from atoll.server.masked_sum import require_maskable
from atoll.server.models import RunModels
from atoll.server.records import RunRow
from atoll.server.secure_pipeline import fewest_in_session
from atoll.server.settings import ServerSettings
from atoll.transport.staging import StagingSlot
from atoll.wire import runs_pb2
from atoll.wire.errors import Malformed, TooLarge
from atoll.wire.job import Job, decode_job
from atoll.wire.manifest import Manifest
from atoll.wire.payload_list import is_list


def read_submission(request: runs_pb2.SubmitRequest, settings: ServerSettings) -> tuple[Job, Manifest]:
    """The job and the manifest of a request.

    Raises:
        ConfigError: the job cannot be used; names the key.
        BadManifest: the manifest breaks its rules, or lacks what the job's rule has travel beside the model.
        TooLarge: the model is over this server's limit.
        Malformed: the hash of the app or the name of the request is none.
    """
    if len(request.app_hash) != 64 or not set(request.app_hash) <= set("0123456789abcdef"):
        raise Malformed("app_hash is not a SHA-256 in hex", field="app_hash", value=request.app_hash[:80])
    if not 1 <= len(request.request) <= 64:
        raise Malformed("request wants 1 to 64 characters", field="request", value=request.request[:80])
    job = decode_job(request.job)
    stages = Strategies(job)
    strategy = stages.first
    MetricRules(job)
    if job.evaluation.server and (job.job.code not in settings.apps or job.data_name not in settings.data):
        raise Malformed(
            f"evaluation.server = true needs [apps.{job.job.code}] and [data.{job.data_name}] in the server's own "
            "settings; ask its operator, or set evaluation.server = false",
            field="evaluation.server",
            value="true",
        )
    manifest = Manifest.decode(request.manifest)
    if manifest.num_bytes > settings.limits.max_model_bytes:
        raise TooLarge(
            f"the model has {manifest.num_bytes} bytes, this server takes {settings.limits.max_model_bytes}; "
            "its operator can raise limits.max_model_bytes",
            field="manifest",
            value=manifest.num_bytes,
            bound=settings.limits.max_model_bytes,
        )
    _check_form(job, strategy, manifest, settings)
    if job.statistics is not None:  # of no model
        return job, manifest
    run_manifest(manifest.model, strategy.lanes, strategy.local).require_same(manifest)
    for stage in stages:
        layout = update_layout(manifest, stage.codec, stage.buffers, stage.local)
        if job.secure_aggregation is not None:
            require_maskable(job.secure_aggregation, fewest_in_session(job.secure_aggregation, stage), layout)
    return job, manifest


def _check_form(job: Job, strategy: Strategy, manifest: Manifest, settings: ServerSettings) -> None:
    """Returns where version 0 is of the kind that the job wants: a list of payloads, or tensors.

    Raises:
        Malformed: it is of the other kind.
        TooLarge: a later version could be over this server's limit.
    """
    appends = isinstance(strategy.reducer, Append)
    if (appends or job.asks == "statistics") != is_list(manifest):
        wanted = "an empty list of payloads" if appends or job.asks == "statistics" else "tensors"
        raise Malformed(f"version 0 of this job has to be {wanted}; update the sender", field="manifest", bound=wanted)
    most = settings.limits.max_model_bytes
    if isinstance(strategy.reducer, Append) and strategy.reducer.options.max_version_bytes > most:
        value = strategy.reducer.options.max_version_bytes
        raise TooLarge(
            f"strategy.reducer.max_version_bytes = {value}: this server takes models of {most} bytes; lower it, or its "
            "operator can raise limits.max_model_bytes",
            field="strategy.reducer.max_version_bytes",
            value=value,
            bound=most,
        )


class Submission:
    """Takes the bytes of version 0. `queue` is called once they are durable."""

    def __init__(
        self,
        *,
        row: RunRow,
        manifest: Manifest,
        models: RunModels,
        staging: Path,
        queue: Callable[[], Awaitable[None]],
    ) -> None:
        self.row = row
        self.manifest = manifest
        self._models = models
        self._queue = queue
        self.slot = StagingSlot(staging / f"model-{row.run}")
        self.slot.begin(manifest.num_bytes, row.crc32, f"version 0 of run {row.run}")

    async def complete(self) -> None:
        """Keep the model and queue the run."""
        await asyncio.to_thread(self._keep)
        self.close()
        await self._queue()

    def close(self) -> None:
        self.slot.close()

    def _keep(self) -> None:
        self._models.prepare()
        with self._models.create(0, {}) as out:
            out[:] = self.slot.view
