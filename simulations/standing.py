"""Where a simulated run stands when a round is committed, beside what its events say: as values that JSON can hold.

At that moment nobody is asked for anything but the tasks of the round that is done, which are taken back or void.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from atoll.server.run_state import Task
from atoll.simulations.clock import Clock
from atoll.simulations.waits import Waits


@dataclass(slots=True, kw_only=True)
class Standing:
    """What changes in a run beside its state, its versions and what people see."""

    clock: Clock = field(default_factory=Clock)
    waits: Waits = field(default_factory=Waits)
    timers: dict[str, int] = field(default_factory=dict)  # those that are set, by the number of the setting
    settings: int = 0
    num_bytes: tuple[int, int] = (0, 0)  # up, down
    has: dict[str, int] = field(default_factory=dict)  # version that each site has fetched last
    fetched: dict[str, int] = field(default_factory=dict)  # bytes whose time is not counted yet, by site

    def pack(self) -> dict[str, Any]:
        """All of it."""
        now_s, count, due = self.clock.standing
        return {
            "now_s": now_s,
            "count": count,
            "due": [(at, number, asdict(what) if isinstance(what, Task) else what) for at, number, what in due],
            "waits": self.waits.pack(),
            "timers": self.timers,
            "settings": self.settings,
            "num_bytes": self.num_bytes,
            "has": self.has,
            "fetched": self.fetched,
        }

    @classmethod
    def unpack(cls, values: Mapping[str, Any]) -> Standing:
        """What `pack` gave."""
        up, down = values["num_bytes"]
        standing = cls(
            waits=Waits.unpack(values["waits"]),
            timers=dict(values["timers"]),
            settings=values["settings"],
            num_bytes=(up, down),
            has=dict(values["has"]),
            fetched=dict(values["fetched"]),
        )
        due = [
            (at, number, Task(**what) if isinstance(what, dict) else tuple(what)) for at, number, what in values["due"]
        ]
        standing.clock.restore(values["now_s"], values["count"], due)
        return standing
