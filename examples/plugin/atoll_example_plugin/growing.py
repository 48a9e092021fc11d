"""Rounds of more and more sites: the first versions come cheap, the last ones from everybody."""

from collections.abc import Sequence

from pydantic import Field

from atoll.aggregation.schedule import Action, Event
from atoll.aggregation.schedules.rounds import Rounds, RoundsState
from atoll.wire.job import Strict


class Growing:
    """Synchronous rounds over a share of the sites that is `growth` times as large in each round as in the one before."""

    class Options(Strict):
        first: float = Field(default=0.25, gt=0, le=1)  # share of the members in round 1
        growth: float = Field(default=2.0, ge=1, le=10)
        min: int = Field(default=2, ge=1, le=1_000_000)  # members without which no round starts

    def __init__(self, options: Options) -> None:
        self.name = "growing"
        self.options = options
        self.min_sites = self.fewest_updates = options.min

    def init(self, *, num_rounds: int, seed: int) -> RoundsState:
        return self._rounds(0).init(num_rounds=num_rounds, seed=seed)

    def on(self, state: RoundsState, event: Event) -> tuple[RoundsState, Sequence[Action]]:
        return self._rounds(state.round).on(state, event)  # a function of the state alone, so a journal replays it

    def _rounds(self, num_done: int) -> Rounds:
        share = min(1.0, self.options.first * self.options.growth ** min(num_done, 1000))
        return Rounds(Rounds.Options(fraction=share, min=self.options.min))
