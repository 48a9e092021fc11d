"""A run whose updates are masked: between the closing of a round and its commit stand its sessions."""

from __future__ import annotations

from typing import Any, cast

from atoll.server.driver import RunDriver
from atoll.server.events import RunEvent
from atoll.server.run_state import CommitRound, RunAction
from atoll.server.secure_held import Upload
from atoll.server.secure_pipeline import SecurePipeline
from atoll.server.secure_rounds import SecureRounds


class SecureDriver(RunDriver):
    """`RunDriver` with the sessions of secure aggregation."""

    def __init__(self, *, upload: Upload, **terms: Any) -> None:
        """`terms` are those of `RunDriver`; `upload` queues the upload of a payload."""
        super().__init__(**terms)
        self.masked = cast(SecurePipeline, self.pipeline)
        self.secure = SecureRounds(self, self.masked, upload, self._store, self._around, app_hash=self._row.app_hash)

    def resend_tasks(self, site: str) -> None:
        super().resend_tasks(site)
        self.secure.resend(site)

    def site_gone(self, site: str, reason: str) -> None:
        super().site_gone(site, reason)
        self.secure.gone(site, reason)

    async def _go_on(self) -> None:
        await super()._go_on()
        self._spawn(self.secure.run())

    async def _act(self, action: RunAction) -> None:
        if isinstance(action, CommitRound):
            self.secure.wake()
        await super()._act(action)

    async def _after(self, event: RunEvent | None) -> None:
        await super()._after(event)
        self.secure.look()

    async def _commit_if_whole(self) -> None:
        if self.plan.delegated:
            return  # the upper server commits
        while (round_ := self.state.first_closing()) is not None and self.masked.is_whole(round_):
            await self._commit(round_)

    def _announce(self) -> None:
        super()._announce()
        self.secure.committed(self.state.version)
