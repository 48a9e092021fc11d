"""The pairs of one gossip round: by which way the two exchange their models, and how far they are. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from atoll.aggregation.graphs import Pair
from atoll.aggregation.schedule import Met


class Way(Enum):
    """How the models of a pair travel; tried in this order."""

    FIRST_CALLS = "the first calls the second"
    SECOND_CALLS = "the second calls the first"
    RELAY = "through the server"


_NEXT = {Way.FIRST_CALLS: Way.SECOND_CALLS, Way.SECOND_CALLS: Way.RELAY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What is known of a pair from this round and earlier ones. `reasons`: why each way before `way` failed."""

    pair: Pair
    way: Way = Way.FIRST_CALLS
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A pair in the round. It is `over` when both hold the other's model, or nothing is left to try."""

    tried: Tried
    holds: tuple[str, ...] = ()  # of the pair: who has said that it holds the other's model
    over: bool = False

    @property
    def pair(self) -> Pair:
        return self.tried.pair

    @property
    def met(self) -> bool:
        """Whether both hold the other's model: then, and only then, the two mix."""
        return len(self.holds) == 2

    @property
    def caller(self) -> str:
        """Who opens the connection; "" where the server relays."""
        first, second = self.pair
        return {Way.FIRST_CALLS: first, Way.SECOND_CALLS: second}.get(self.tried.way, "")

    def heard(self, event: Met) -> Link:
        """The link after a report of one of the two; the same object where it changes nothing."""
        if self.over or event.site not in self.pair:
            return self
        if event.received:
            if event.site in self.holds:
                return self
            holds = tuple(sorted((*self.holds, event.site)))
            return replace(self, holds=holds, over=len(holds) == 2)
        if event.tried != len(self.tried.reasons):
            return self  # of a way that has been given up meanwhile
        if self.tried.way is Way.RELAY:
            return replace(self, over=True)
        if event.site != self.caller:
            return self
        reasons = (*self.tried.reasons, f"{event.site} to {event.peer}: {event.reason}")
        return replace(self, tried=replace(self.tried, way=_NEXT[self.tried.way], reasons=reasons))

    def given_up(self) -> Link:
        """The link that nobody waits for any more."""
        return replace(self, over=True)

    def undone(self) -> Link:
        """The link of which one end has lost its model: the two do not mix."""
        return replace(self, holds=(), over=True)


def links_of(pairs: Iterable[Pair], known: Iterable[Tried]) -> tuple[Link, ...]:
    """The links of a new round, each by the way that worked in the last one."""
    by_pair = {tried.pair: tried for tried in known}
    return tuple(Link(tried=by_pair.get(pair, Tried(pair=pair))) for pair in pairs)
