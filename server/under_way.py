"""Transfers that are under way at a server: the calls, and the work on what they have brought.

Invariant: once `close` was called no call begins, so when nothing is under way any more the slots may go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from atoll.transport.grants import Grant
from atoll.transport.transfer import Withdrawal
from atoll.wire.errors import RemoteError, Unavailable


class UnderWay:
    """Calls by their grant, and work by whose object it is on. Used on one event loop."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[str, Withdrawal]] = {}
        self._work: dict[asyncio.Task[None], str] = {}
        self._ended = asyncio.Event()
        self.closed = False

    def close(self) -> None:
        """No call begins from now on; those under way go on."""
        self.closed = True

    @asynccontextmanager
    async def call(self, grant: Grant) -> AsyncIterator[None]:
        """A block that counts as under way, and that `withdraw` ends.

        Raises:
            Unavailable: the server goes down.
        """
        if self.closed:
            raise going_down(grant.ask.subject.run)
        async with Withdrawal() as withdrawal:
            self._calls[grant.id] = grant.ask.site, withdrawal
            try:
                yield
            finally:
                del self._calls[grant.id]
                self._ended.set()

    def work(self, site: str, work: Coroutine[Any, Any, None]) -> None:
        """Do what follows a call of `site`, in a task of its own that counts as under way."""
        task = asyncio.ensure_future(work)
        self._work[task] = site
        task.add_done_callback(self._done)

    def withdraw(self, grant_id: str, reason: RemoteError) -> None:
        """End the call of a grant with `reason`, where it is under way."""
        if grant_id in self._calls:
            self._calls[grant_id][1].withdraw(reason)

    def is_busy(self, site: str | None = None) -> bool:
        """Whether a call or work of `site` is under way; None: anybody's."""
        busy = [name for name, _ in self._calls.values()] + list(self._work.values())
        return bool(busy) if site is None else site in busy

    async def until_idle(self, site: str | None = None) -> None:
        """Returns when nothing of `site` is under way; None: of anybody."""
        while self.is_busy(site):
            self._ended.clear()
            await self._ended.wait()

    async def end_calls(self) -> None:
        """End all calls with Unavailable, and wait until they are out of what they use. Work goes on."""
        while self._calls:
            for grant_id in self._calls:
                self.withdraw(grant_id, going_down())
            self._ended.clear()
            await self._ended.wait()

    def cancel_work(self) -> None:
        """Stop what is left of the work; those whose objects it was on hear nothing, and send them again."""
        for task in self._work:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._work[task]
        self._ended.set()


def going_down(run: str = "") -> Unavailable:
    """For callers that the server has no time for any more."""
    return Unavailable("the server goes down; send it again when the server is back", run=run)
