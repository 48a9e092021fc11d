"""The strategy of each round of a run, where `control.override` changes it on the way.

What holds for the whole run is looked at here, before it begins: each stage resolves, and what reaches over rounds (the
state of the server optimizer, what a reducer needs) is of one kind in all of them.
"""

from __future__ import annotations

from atoll.aggregation.reducers.append import Append
from atoll.aggregation.strategy import Strategy, resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job


class Strategies:
    """The strategies of a job by round. `first` is that of the first round, and of all where nothing changes.

    Raises:
        ConfigError: as `resolve`, for any stage; or a stage does not go together with those before it.
    """

    def __init__(self, job: Job) -> None:
        self.first = resolve(job)
        self._later: list[tuple[int, Strategy]] = []
        for number, stage in enumerate(job.stages[1:]):
            key = f"control.override.{number}"
            try:
                strategy = resolve(stage.job)
            except ConfigError as error:
                raise ConfigError(
                    f"with {key}, from round {stage.from_round}: {error}", key=key, value=error.value, bound=error.bound
                ) from None
            _require_alike(key, self.first, strategy)
            self._later.append((stage.from_round, strategy))

    def at(self, round_: int) -> Strategy:
        """The strategy of a round."""
        return next((strategy for begin, strategy in reversed(self._later) if begin <= round_), self.first)

    def mixed(self, num_updates: int) -> int:
        """Updates that every value of a version mixes at least, in whichever round, which is made of so many."""
        return min(strategy.reducer.mixed(num_updates) for strategy in (self.first, *(s for _, s in self._later)))


def _require_alike(key: str, first: Strategy, later: Strategy) -> None:
    for part, reason, before, after in (
        ("optimizer", "its state has another precision", _precisions(first), _precisions(later)),
        ("reducer", "it needs other things of the updates", first.reducer.needs, later.reducer.needs),
        ("reducer", "sites have agreed to these bounds", _bounds(first), _bounds(later)),
    ):
        if before != after:
            raise ConfigError(
                f"{key}.strategy.{part}: {reason} ({before} before, {after} then), and cannot go on from the rounds "
                "before; change other options of it",
                key=f"{key}.strategy.{part}",
                value=str(after),
                bound=str(before),
            )


def _precisions(strategy: Strategy) -> str:
    return " and ".join(str(strategy.optimizer.precision(wide=wide)) for wide in (False, True))


def _bounds(strategy: Strategy) -> str:
    return str(strategy.reducer.options) if isinstance(strategy.reducer, Append) else ""
