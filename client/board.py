"""What the agent shows of itself: one small file that `atoll site status` reads.

The file is a picture, not state: nothing is read back from it, so it is replaced without fsync, at most once a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.wire.job import Job

FORMAT = 1
WRITE_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True)
class RunPicture:
    """One run, as people see it."""

    run: str
    name: str = ""
    app: str = ""
    state: str = "waiting"  # "preparing", "ready", "training", "evaluating", "masking", "sending", "held up", "failed"
    device: str = ""
    round: int = 0
    num_rounds: int = 0
    done: int = 0  # optimizer steps of the task under way
    total: int = 0
    detail: str = ""  # why it is held up or failed


@dataclass(slots=True, kw_only=True)
class Picture:
    """All of it."""

    format: int = FORMAT
    pid: int = 0
    site: str = ""
    federation: str = ""
    server: str = ""
    connection: str = "connecting"  # "attached", "waiting", "refused"
    connection_since_unix_s: float = 0.0
    trouble: str = ""  # the last error of the connection, empty while attached
    bulk: str = ""  # how models and updates travel, and why not otherwise; empty before it is known
    membership: str = "unknown"  # "pending", "active", "revoked"; "unknown" before the first list
    member_list_version: int = 0
    certificate_expires_unix_s: float = 0.0  # 0 in plain text
    num_held: int = 0  # results that wait in the outbox
    runs: dict[str, RunPicture] = field(default_factory=dict)


class Board:
    """Keeps the picture; `keep_written` puts it on disk."""

    def __init__(
        self,
        path: Path,
        *,
        site: str,
        server: str,
        count_held: Callable[[], int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.picture = Picture(pid=os.getpid(), site=site, server=server)
        self._path = path
        self._count_held = count_held
        self._clock = clock
        self._changed = asyncio.Event()

    def connection(self, state: str, trouble: str = "") -> None:
        """The stream was opened, broken or refused."""
        if state != self.picture.connection:
            self.picture.connection_since_unix_s = self._clock()
        self.picture.connection, self.picture.trouble = state, trouble
        self._changed.set()

    def bulk(self, way: str) -> None:
        """How models and updates travel now."""
        self.show(bulk=way)

    def show(self, **fields: Any) -> None:
        """Set fields of the picture by name."""
        for name, value in fields.items():
            setattr(self.picture, name, value)
        self._changed.set()

    def preparing(self, run: str, job: Job) -> None:
        """The worker of a run is being started."""
        self._set(run, name=job.job.name, app=job.job.code, num_rounds=job.job.rounds, state="preparing", detail="")

    def ready(self, run: str, device: str) -> None:
        """The worker has loaded app, model and data."""
        self._set(run, state="ready", device=device)

    def working(self, run: str, doing: str, round_: int) -> None:
        """A task has begun."""
        self._set(run, state=doing, round=round_, done=0, total=0, detail="")

    def progress(self, run: str, done: int, total: int) -> None:
        """Steps of the task under way."""
        self._set(run, done=done, total=total)

    def sending(self, run: str, round_: int) -> None:
        """A result is in the outbox."""
        self._set(run, state="sending", round=round_, detail="")

    def held_up(self, run: str, why: str) -> None:
        """A task waits for something at this site that a person has to mend."""
        self._set(run, state="held up", detail=why)

    def failed(self, run: str, why: str) -> None:
        """A task came to nothing."""
        self._set(run, state="failed", detail=why)

    def idle(self, run: str) -> None:
        """No task is left to do."""
        if run in self.picture.runs and self.picture.runs[run].state not in ("failed", "sending"):
            self._set(run, state="ready")

    def gone(self, run: str) -> None:
        """The run has ended, or this site takes no part in it."""
        self.picture.runs.pop(run, None)
        self._changed.set()

    async def keep_written(self) -> None:
        """Write the picture whenever it has changed, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await asyncio.to_thread(self.write)
            await asyncio.sleep(WRITE_EVERY_S)

    def write(self) -> None:
        """Put the picture on disk. A disk that takes no more is not worth stopping for."""
        self.picture.num_held = self._count_held()
        text = json.dumps(asdict(self.picture), indent=1)
        draft = self._path.with_suffix(".draft")
        try:
            draft.write_text(text)
            os.replace(draft, self._path)
        except OSError:
            draft.unlink(missing_ok=True)

    def _set(self, run: str, **fields: Any) -> None:
        picture = self.picture.runs.setdefault(run, RunPicture(run=run))
        for name, value in fields.items():
            setattr(picture, name, value)
        self._changed.set()
