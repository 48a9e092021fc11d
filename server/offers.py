"""Which site is asked to join which run, and who holds a place where. No I/O.

A site states how many runs it works on side by side. Each free place goes to the oldest run that wants the site, so
runs queue in the order in which they were submitted and cannot wait for each other in a ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A run that takes sites: `only` are the ones that its job names (empty: any), `members` those that joined."""

    run: str
    only: frozenset[str]
    members: frozenset[str]


class Offers:
    """Unanswered and declined offers."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, str], None] = {}  # (run, site), in the order asked
        self._declined: dict[tuple[str, str], str] = {}  # with the reason that the site gave

    def next(self, places: Mapping[str, int], runs: Sequence[Wanted]) -> list[tuple[str, str]]:
        """Offers (run, site) to be made now; they count as pending from here on.

        Args:
            places: connected sites that may be asked, with the runs that each works on side by side.
            runs: open runs, oldest first.
        """
        made: list[tuple[str, str]] = []
        for site in sorted(places):
            held = {wanted.run for wanted in runs if site in wanted.members}
            held |= {run for run, asked in self._pending if asked == site}
            free = places[site] - len(held)
            for wanted in runs:
                if free <= 0:
                    break
                key = (wanted.run, site)
                if wanted.run in held or key in self._declined or (wanted.only and site not in wanted.only):
                    continue
                self._pending[key] = None
                made.append(key)
                free -= 1
        return made

    def is_asked(self, run: str, site: str) -> bool:
        """Whether an answer of this site is awaited."""
        return (run, site) in self._pending

    def settled(self, run: str, site: str) -> None:
        """The site is a member now, or will not be: its offer holds no place any more."""
        self._pending.pop((run, site), None)

    def declined(self, run: str, site: str, reason: str) -> None:
        """Do not ask this site again for this run, unless it attaches anew."""
        self.settled(run, site)
        self._declined[run, site] = reason

    def is_declined(self, run: str, site: str) -> bool:
        """Whether this site is not asked (again) for this run, as far as is known."""
        return (run, site) in self._declined

    def forget_site(self, site: str) -> None:
        """The site detached: its offers are void, and it may be asked again when it is back."""
        for key in [key for key in (*self._pending, *self._declined) if key[1] == site]:
            self._pending.pop(key, None)
            self._declined.pop(key, None)

    def forget_run(self, run: str) -> None:
        for key in [key for key in (*self._pending, *self._declined) if key[0] == run]:
            self._pending.pop(key, None)
            self._declined.pop(key, None)

    def is_pending(self, run: str) -> bool:
        return any(asked == run for asked, _ in self._pending)

    def shortfall(self, wanted: Wanted, *, least: int, connected: Iterable[str], known: Iterable[str]) -> str:
        """Why a run has fewer than `least` members, naming each site that is not one."""
        reasons = []
        connected = set(connected)
        for site in sorted(wanted.only or set(known)):
            if site in wanted.members:
                continue
            if (wanted.run, site) in self._declined:
                reasons.append(f"{site} declined ({self._declined[wanted.run, site]})")
            elif (wanted.run, site) in self._pending:
                reasons.append(f"{site} has not answered")
            elif site in connected:
                reasons.append(f"{site} is busy with other runs")
            else:
                reasons.append(f"{site} is not connected")
        joined = ", ".join(sorted(wanted.members)) or "none"
        missing = "; ".join(reasons) or "the federation has no other active site"
        return (
            f"too few sites: {len(wanted.members)} of at least {least} joined ({joined}). Missing: {missing}. "
            "Start the missing sites, or lower strategy.schedule.min"
        )
