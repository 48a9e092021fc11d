"""Sites that are asked and bring nothing: they drop out of rounds, by chance."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.simulations.clock import require, require_known


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropouts:
    """How likely a task comes to nothing: its site fails it when its update would be there.

    Every site drops out with the chance `share`, each time that it is asked; `by_site` says it of single sites instead.
    Draws follow from seed, site, round and attempt, so that they are the same whoever else takes part.
    """

    share: float = 0.0
    seed: int = 0
    by_site: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require("dropouts.share", self.share, 0.0, 1.0)
        for site, share in self.by_site.items():
            require(f"dropouts.by_site.{site}", share, 0.0, 1.0)

    def require_sites(self, sites: Sequence[str]) -> None:
        """Returns where `by_site` names sites that are there. Raises ConfigError for the first that is not."""
        require_known("dropouts.by_site", self.by_site, sites)

    def hits(self, site: str, round_: int, attempt: int) -> bool:
        """Whether this task comes to nothing."""
        draw = hashlib.sha256(f"atoll/dropout/1\n{self.seed}\n{site}\n{round_}\n{attempt}".encode()).digest()
        return int.from_bytes(draw[:8], "big") / 2.0**64 < self.by_site.get(site, self.share)
