"""What this site has let out in the sessions of a run, kept after the run too: a session begins once, and all sums over
one base version are of the same sites.

**Rule.** Once this site has revealed its shares for the sum over some sites from a base version, it takes part in no
session over that version but with exactly those sites, and confirms no other survivors. So any two sums that get out
have all their honest sites in common or none: no combination of sums is of fewer (docs/decisions/0013). A version is
known by the SHA-256 of its data, whatever number the server gives it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from atoll.client.sealed import Sealer
from atoll.wire.errors import NotAllowed, Stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Revealed:
    """The record of one run."""

    newest: tuple[int, int] = (0, 0)  # round and session that this site has begun last
    sums: tuple[tuple[str, frozenset[str]], ...] = ()  # digest of the base, and sites, of each sum that it helped out

    def begun(self, round_: int, session: int) -> Self:
        """With a session that begins now.

        Raises:
            Stale: it, or a later one, has begun before.
        """
        if (round_, session) <= self.newest:
            raise Stale(
                f"session {session} of round {round_} is not newer than session {self.newest[1]} of round "
                f"{self.newest[0]}, which this site has begun",
                round=round_,
                field="session",
                value=f"{round_}.{session}",
                bound=f"> {self.newest[0]}.{self.newest[1]}",
            )
        return replace(self, newest=(round_, session))

    def require_newest(self, round_: int, session: int) -> None:
        """Returns where no later session has begun. Raises NotAllowed."""
        if (round_, session) != self.newest:
            raise NotAllowed(
                f"this site has begun session {self.newest[1]} of round {self.newest[0]} since, and reveals nothing in "
                "earlier ones",
                round=round_,
                field="session",
                value=f"{round_}.{session}",
                bound=f"{self.newest[0]}.{self.newest[1]}",
            )

    def require_same(self, base: str, sites: frozenset[str], what: str) -> None:
        """Returns where a sum over these sites adds nothing to those that are out already.

        Raises:
            NotAllowed: another sum over the base version is out; names who differs.
        """
        for digest, known in self.sums:
            if digest == base and known != sites:
                differ = ", ".join(sorted(known ^ sites)[:5])
                raise NotAllowed(
                    f"{what} differs in {differ} from the sites of a sum over the same version that is out: the difference of "
                    "both would show them; begin from another model (job.seed)",
                    field="sites",
                    value=", ".join(sorted(sites)),
                    bound=", ".join(sorted(known)),
                )

    def let_out(self, base: str, sites: frozenset[str]) -> Self:
        """With a sum that this site is about to help out."""
        one = (base, sites)
        return self if one in self.sums else replace(self, sums=(*self.sums, one))

    def encode(self) -> bytes:
        sums = [[base, sorted(sites)] for base, sites in self.sums]
        return json.dumps({"newest": self.newest, "sums": sums}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        table = json.loads(data)
        newest = (int(table["newest"][0]), int(table["newest"][1]))
        return cls(newest=newest, sums=tuple((str(base), frozenset(sites)) for base, sites in table["sums"]))


class RevealedBook:
    """The records of all runs of a site, sealed in `folder`. Blocks."""

    def __init__(self, folder: Path, sealer: Sealer) -> None:
        self._folder, self._sealer = folder, sealer

    def of(self, run: str) -> Revealed:
        """Raises LocalError where the record is damaged: the site then takes part in no session of the run."""
        data = self._sealer.read(self._folder / run)
        return Revealed() if data is None else Revealed.decode(data)

    def keep(self, run: str, revealed: Revealed) -> None:
        """Durable when it returns. Raises DiskFull, LocalError."""
        self._sealer.write(self._folder / run, revealed.encode())

    def all_sums(self) -> Revealed:
        """The sums of all runs together."""
        runs = sorted(path.name for path in self._folder.glob("*") if not path.name.endswith(".draft"))
        return Revealed(sums=tuple(one for run in runs for one in self.of(run).sums))
