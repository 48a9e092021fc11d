"""The strategy of each round of a run, where `control.override` changes it on the way.

What holds for the whole run is looked at here, before it begins: each stage resolves, and what reaches over rounds (the
state of schedule and server optimizer, what a reducer needs, what sites carry over) is of one kind in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atoll.aggregation.by_round import ByRound
from atoll.aggregation.codecs.encoding import feedback_of
from atoll.aggregation.download import Download
from atoll.aggregation.fragments import Fragments
from atoll.aggregation.reducers.append import Append
from atoll.aggregation.schedule import Asynchronous, Changeable, Schedule
from atoll.aggregation.strategy import Strategy, resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest


class Strategies:
    """The strategies of a job by round. `first` is that of the first round, and of all where nothing changes.

    Raises:
        ConfigError: as `resolve`, for any stage; or a stage does not go together with those before it.
    """

    def __init__(self, job: Job) -> None:
        stages = [(1, resolve(job))]
        for number, stage in enumerate(job.stages[1:]):
            key = f"control.override.{number}"
            try:
                strategy = resolve(stage.job)
            except ConfigError as error:
                raise ConfigError(
                    f"with {key}, from round {stage.from_round}: {error}", key=key, value=error.value, bound=error.bound
                ) from None
            _require_alike(key, stages[0][1], strategy)
            if stage.job.strategy.schedule != job.strategy.schedule:
                _require_same_schedule(key, stages[0][1].schedule, strategy.schedule)
            if stage.job.strategy.codec != job.strategy.codec and isinstance(strategy.schedule, Asynchronous):
                raise _of_one_round(key, stages[0][1], strategy)
            stages.append((stage.from_round, strategy))
        self.by_round = ByRound(tuple(stages))
        self.first = self.by_round.first

    def at(self, round_: int) -> Strategy:
        """The strategy of a round."""
        return self.by_round.at(round_)

    def __iter__(self) -> Iterator[Strategy]:
        return iter(self.by_round)

    def mixed(self, num_updates: int) -> int:
        """Updates that every value of a version mixes at least, in whichever round, which is made of so many."""
        return min(strategy.reducer.mixed(num_updates) for strategy in self)

    def fragments(self, manifest: Manifest) -> ByRound[Fragments]:
        """What rounds exchange, and in which layout. Raises ConfigError as `Fragments` does."""
        return self.by_round.map(lambda strategy: strategy.fragments(manifest))

    def downloads(self, manifest: Manifest, seed: int) -> ByRound[Download | None]:
        """The form in which a round's base version goes to the sites; None where that is as it is."""
        return self.by_round.map(
            lambda strategy: Download(manifest, strategy.download, seed) if strategy.download else None
        )


def _require_alike(key: str, first: Strategy, later: Strategy) -> None:
    for part, reason, before, after in (
        ("optimizer", "its state has another precision", _precisions(first), _precisions(later)),
        ("reducer", "it needs other things of the updates", first.reducer.needs, later.reducer.needs),
        ("reducer", "sites have agreed to these bounds", _bounds(first), _bounds(later)),
        ("codec", "what sites carry over has another meaning", feedback_of(first.codec), feedback_of(later.codec)),
    ):
        if before != after:
            raise _goes_not_on(f"{key}.strategy.{part}", reason, before, after)


def _require_same_schedule(key: str, first: Schedule[Any], later: Schedule[Any]) -> None:
    """Returns where the state of one schedule means the same to the other, which has other options."""
    if not isinstance(first, Changeable) or not isinstance(later, Changeable):
        raise ConfigError(
            f"{key}.strategy.schedule: the state of this schedule belongs to the options that it began with; leave them "
            "as they are",
            key=f"{key}.strategy.schedule",
        )
    for name, value in first.fixed.items():
        if later.fixed[name] != value:
            where = f"{key}.strategy.schedule.{name}"
            raise _goes_not_on(where, "it holds for the whole run", str(value), str(later.fixed[name]))


def _of_one_round(key: str, first: Strategy, later: Strategy) -> ConfigError:
    return ConfigError(
        f"{key}.strategy.codec: with this schedule an update may count in a later round than the one that it was made "
        "for, and the updates of a round are read by one codec; leave it as it is",
        key=f"{key}.strategy.codec",
        value=later.codec.name,
        bound=first.codec.name,
    )


def _goes_not_on(key: str, reason: str, before: str, after: str) -> ConfigError:
    return ConfigError(
        f"{key}: {reason} ({before} before, {after} then), and cannot go on from the rounds before; change other options "
        "of it",
        key=key,
        value=after,
        bound=before,
    )


def _precisions(strategy: Strategy) -> str:
    return " and ".join(str(strategy.optimizer.precision(wide=wide)) for wide in (False, True))


def _bounds(strategy: Strategy) -> str:
    return str(strategy.reducer.options) if isinstance(strategy.reducer, Append) else ""
