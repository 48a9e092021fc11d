"""The sites that are connected now: one session each, the newest attachment wins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from atoll.wire import control_pb2 as pb
from atoll.wire.errors import RemoteError, Stale, TooLarge

# Control messages are small and sites read them at once; a queue this long means that the site does not read.
MAX_QUEUED = 10_000


class Session:
    """One attached site. Messages are queued and written by the stream's one writer, in order."""

    def __init__(self, site: str, hello: pb.Hello) -> None:
        self.site = site
        self.hello = hello
        self._queue: asyncio.Queue[pb.ServerMessage | RemoteError | None] = asyncio.Queue()
        self.ended = False

    def send(self, **body: object) -> None:
        """Queue one message, named by its field of ServerMessage; after the end of the session it goes nowhere."""
        if self.ended:
            return
        if self._queue.qsize() >= MAX_QUEUED:
            self.end(TooLarge(f"{self.site} does not read its messages: {MAX_QUEUED} are waiting", site=self.site))
            return
        self._queue.put_nowait(pb.ServerMessage(**body))  # type: ignore[arg-type]

    def end(self, reason: RemoteError | None = None) -> None:
        """Close the stream after the messages so far; with an error where there is one."""
        if not self.ended:
            self.ended = True
            self._queue.put_nowait(reason)

    async def next(self) -> pb.ServerMessage | None:
        """The next message to write; None at an orderly end.

        Raises:
            RemoteError: the session was ended with it.
        """
        item = await self._queue.get()
        if isinstance(item, RemoteError):
            raise item
        return item


class Sessions:
    """Sessions by site name."""

    def __init__(self) -> None:
        self._by_site: dict[str, Session] = {}

    def attach(self, session: Session) -> None:
        """Make `session` the site's only one; an older stream is told that it is stale and ended."""
        older = self._by_site.get(session.site)
        if older is not None:
            older.end(Stale(f"{session.site} attached anew: this stream is replaced", site=session.site))
        self._by_site[session.site] = session

    def detach(self, session: Session) -> bool:
        """Forget `session`. False where a newer one has taken its place."""
        session.ended = True
        if self._by_site.get(session.site) is not session:
            return False
        del self._by_site[session.site]
        return True

    def get(self, site: str) -> Session | None:
        return self._by_site.get(site)

    def send(self, site: str, **body: object) -> None:
        """Queue a message for `site` if it is attached. What must not be missed is told again at the next Hello."""
        session = self._by_site.get(site)
        if session is not None:
            session.send(**body)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_site.values()))

    def __len__(self) -> int:
        return len(self._by_site)

    @property
    def by_site(self) -> Mapping[str, Session]:
        return self._by_site
