"""Who may move bytes now. A table without I/O: it takes questions, progress and time, and gives grants.

At most a few transfers run at a time in each direction, since every open stream costs the server buffers (32 uploads
of 100 MB at once: 17 models of memory; four admitted before the call opens: 6, and faster). A grant that moves too
slowly is taken back, so a stalled site never holds a place for long.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from atoll.wire import control_pb2
from atoll.wire.errors import NotAllowed, Stale

WINDOW_S = 30.0  # a rate is judged over this time
MIN_BYTES_PER_S = 64 << 10  # half a megabit a second: a poor line still gets through

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a transfer moves: a payload of a task's result (up), or a version of a run's model (up or down)."""

    direction: Direction
    run: str
    task: str = ""  # up: with attempt and payload
    attempt: int = 0
    payload: str = ""
    version: int = 0
    branch: int | None = None  # down: the group whose form of the version it is
    first_byte: int = 0  # down: where the part of the version begins that is moved
    part_bytes: int = 0  # down: its length; 0: all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One side's wish to move an object."""

    site: str  # name of the caller: a site or a researcher
    subject: Subject
    num_bytes: int  # of the whole object
    offset: int = 0  # first byte wanted
    crc32: int = 0  # down: of the whole object


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Leave to move one object once."""

    id: str
    ask: Ask
    min_bytes_per_s: int

    def to_message(self) -> control_pb2.Grant:
        """The form that travels to the site."""
        ask, subject = self.ask, self.ask.subject
        return control_pb2.Grant(
            grant=self.id,
            direction=control_pb2.UP if subject.direction == "up" else control_pb2.DOWN,
            key=control_pb2.TaskKey(run=subject.run, task=subject.task, attempt=subject.attempt),
            payload=subject.payload,
            version=subject.version,
            first_byte=subject.first_byte,
            offset=ask.offset,
            num_bytes=ask.num_bytes,
            crc32=ask.crc32,
            min_bytes_per_s=self.min_bytes_per_s,
        )


@dataclass(slots=True, kw_only=True)
class _Active:
    """A grant under way, with the point from which its rate is judged."""

    grant: Grant
    position_bytes: int
    mark_s: float
    mark_bytes: int

    def too_slow(self, now_s: float) -> bool:
        """Whether the time since the mark is a window and moved too little; a good window moves the mark."""
        elapsed_s = now_s - self.mark_s
        if elapsed_s < WINDOW_S:
            return False
        moved = self.position_bytes - self.mark_bytes
        left = self.grant.ask.num_bytes - self.mark_bytes
        if moved < min(self.grant.min_bytes_per_s * elapsed_s, left) or left <= 0:
            return True
        self.mark_s, self.mark_bytes = now_s, self.position_bytes
        return False


class GrantTable:
    """Transfers that wait and transfers that are under way.

    Args:
        max_up, max_down: transfers under way at once, in each direction.
        clock: seconds that never go back.
        max_per_site: transfers under way at once of one site, in each direction.
        min_bytes_per_s: slower over `WINDOW_S` and a grant is overdue.
        new_id: unguessable names of grants.
    """

    def __init__(
        self,
        max_up: int,
        max_down: int,
        clock: Callable[[], float],
        *,
        max_per_site: int = 1,
        min_bytes_per_s: int = MIN_BYTES_PER_S,
        new_id: Callable[[], str] = lambda: secrets.token_urlsafe(18),
    ) -> None:
        self._places: dict[Direction, int] = {"up": max_up, "down": max_down}
        self._clock, self._new_id = clock, new_id
        self._max_per_site, self._min_bytes_per_s = max_per_site, min_bytes_per_s
        self._waiting: dict[tuple[str, Subject], Ask] = {}  # in the order of asking
        self._active: dict[str, _Active] = {}
        self._num_grants = 0
        self._served_at: dict[tuple[Direction, str], int] = {}  # by site: number of its newest grant

    def ask(self, ask: Ask) -> None:
        """Queues a wish. The same wish again keeps its place with the newer offset; a grant under way for it ends,
        since its asker has lost it."""
        for active in list(self._active.values()):
            if (active.grant.ask.site, active.grant.ask.subject) == (ask.site, ask.subject):
                del self._active[active.grant.id]
        self._waiting[ask.site, ask.subject] = ask

    def admit(self, up_places: int | None = None) -> list[Grant]:
        """Grants for which there is room now: the site that was served longest ago first, then by order of asking.

        Args:
            up_places: uploads that there is room for besides those under way (free staging slots); None: no such limit.
        """
        granted: list[Grant] = []
        for direction, most in self._places.items():
            free = most - self.num_active(direction)
            if direction == "up" and up_places is not None:
                free = min(free, up_places)
            while free > 0 and (ask := self._next(direction)) is not None:
                granted.append(self._grant(ask))
                free -= 1
        return granted

    def _next(self, direction: Direction) -> Ask | None:
        busy = Counter(a.grant.ask.site for a in self._active.values() if a.grant.ask.subject.direction == direction)
        fit = [
            ask
            for ask in self._waiting.values()
            if ask.subject.direction == direction and busy[ask.site] < self._max_per_site
        ]
        return min(fit, key=lambda ask: (busy[ask.site], self._served_at.get((direction, ask.site), 0)), default=None)

    def _grant(self, ask: Ask) -> Grant:
        del self._waiting[ask.site, ask.subject]
        grant = Grant(id=self._new_id(), ask=ask, min_bytes_per_s=self._min_bytes_per_s)
        self._active[grant.id] = _Active(
            grant=grant, position_bytes=ask.offset, mark_s=self._clock(), mark_bytes=ask.offset
        )
        self._num_grants += 1
        self._served_at[ask.subject.direction, ask.site] = self._num_grants
        return grant

    def find(self, grant_id: str, site: str, direction: Direction) -> Grant:
        """The grant that a transfer names.

        Raises:
            Stale: it is over, withdrawn, or never was.
            NotAllowed: it was given to another site, or for the other direction.
        """
        active = self._active.get(grant_id)
        if active is None:
            raise Stale("this grant is over; ask again and wait for a new one", site=site, field="grant")
        grant = active.grant
        if (grant.ask.site, grant.ask.subject.direction) != (site, direction):
            raise NotAllowed("this grant is for another transfer", site=site, field="grant")
        return grant

    def progress(self, grant_id: str, position_bytes: int) -> None:
        """Notes that the first `position_bytes` bytes of the object are moved; of a grant that is over it does nothing."""
        if (active := self._active.get(grant_id)) is not None:
            active.position_bytes = position_bytes

    def overdue(self) -> list[Grant]:
        """Grants that moved less than their rate over the last window, now over; call it every few seconds."""
        now_s = self._clock()
        slow = [active.grant for active in self._active.values() if active.too_slow(now_s)]
        for grant in slow:
            del self._active[grant.id]
        return slow

    def finish(self, grant_id: str) -> bool:
        """Ends a grant, used or withdrawn; whether it was under way."""
        return self._active.pop(grant_id, None) is not None

    withdraw = finish

    def withdraw_where(self, matches: Callable[[Ask], bool]) -> list[Grant]:
        """Ends all grants and drops all wishes that match (a site is gone, a run has ended); the ended grants."""
        for key in [key for key, ask in self._waiting.items() if matches(ask)]:
            del self._waiting[key]
        ended = [active.grant for active in self._active.values() if matches(active.grant.ask)]
        for grant in ended:
            del self._active[grant.id]
        return ended

    def active(self) -> list[Grant]:
        """Grants under way, oldest first."""
        return [active.grant for active in self._active.values()]

    def num_active(self, direction: Direction) -> int:
        return sum(active.grant.ask.subject.direction == direction for active in self._active.values())

    def num_waiting(self, direction: Direction) -> int:
        return sum(ask.subject.direction == direction for ask in self._waiting.values())
