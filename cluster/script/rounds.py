"""`atoll.connect`: a script takes part in a run round by round, and says itself when it is done with one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from atoll.cluster.messages import Train
from atoll.cluster.script.part import Part, RunEnded, open_part
from atoll.wire.errors import AppFailed, ConfigError, LocalError


def connect() -> Connection:
    """The run of the `atoll site exec` around this script.

    Raises:
        LocalError: there is none.
        NotAllowed: the script is another one than the run's.
    """
    part = open_part()
    if part is None:
        raise LocalError("no run is around this script: start it by `atoll site exec RUN -- python train.py`")
    return Connection(part)


class Connection:
    """A script's part in a run."""

    def __init__(self, part: Part) -> None:
        self._part = part

    @property
    def run(self) -> str:
        """Id of the run."""
        return self._part.request.run

    @property
    def site(self) -> str:
        """Name of the site."""
        return self._part.request.site

    @property
    def values(self) -> Mapping[str, Any]:
        """The job's `[app]` table."""
        return self._part.whole.app

    @property
    def data(self) -> Mapping[str, Any]:
        """The table `[data.NAME]` of this site's settings, where the job names data; else empty."""
        return self._part.request.data

    def rounds(self, *, max_examples: int | None = None) -> Iterator[Round]:
        """The rounds that this site is asked for, to the end of the run.

        Args:
            max_examples: that this process counts in any round; where the job's work is in steps, what those have.

        Raises:
            ConfigError: the run counts the steps itself, or nothing says how many examples a round has.
            AppFailed: a round was left without `load` and `report`.
        """
        part = self._part
        part.ready(self._max_weight(max_examples))
        try:
            while True:
                round_ = Round(part, part.next_round())
                yield round_
                round_._end()
        except RunEnded:
            return
        finally:
            part.channel.leave()

    def _max_weight(self, max_examples: int | None) -> int:
        part, weights = self._part, [max_examples or 0]
        for stage in part.whole.stages:
            strategy = part.strategy(stage.from_round)
            if strategy.exchange.steps is not None:
                name = part.schedule(stage.from_round)
                part.fail(
                    ConfigError(
                        f"strategy.schedule.kind = {name!r}: this schedule counts the steps, so the script joins by "
                        "atoll.join(model, optimizers, examples=...); or take the schedule rounds",
                        key="strategy.schedule.kind",
                        value=name,
                        bound="rounds",
                    )
                )
            if max_examples is None and strategy.work.steps is None:
                text = "max_examples is missing: say in rounds(max_examples=...) how many examples a round has at most"
                part.fail(ConfigError(f"{text}; or set strategy.work.steps in the job", key="max_examples"))
            if max_examples is None and part.channel.rank == 0:
                weights.append((strategy.work.steps or 0) * strategy.work.batch_size)
        return max(weights)


class Round:
    """One round at this site: `load`, train, `report`."""

    def __init__(self, part: Part, task: Train) -> None:
        self._part, self._task = part, task
        self._is_loaded = False
        self._reported: tuple[int, Mapping[str, tuple[float, float]]] | None = None

    @property
    def number(self) -> int:
        """From 1 to the job's rounds; a site may be asked for some of them only."""
        return self._task.round

    def load(self, model: nn.Module) -> None:
        """Puts the round's base version into `model`, which is sent at the round's end.

        Raises:
            BadManifest: it has other tensors than the run's.
        """
        self._part.take(model)
        self._part.load(self._task)
        self._is_loaded = True

    def progress(self, done: int, total: int) -> None:
        """How far the training is, in steps: for people, and for deadlines that wait for whoever moves on."""
        self._part.progress(self._task, done, total)

    def report(self, *, examples: int, metrics: Mapping[str, tuple[float, float]] | None = None) -> None:
        """What the training came to, once a round.

        Args:
            examples: the weight of this process's share.
            metrics: sum and count by name, such as {"loss": (total, count)}; the metric is sum / count.
        """
        if examples < 0:
            raise AppFailed(f"examples = {examples}: wanted 0 or more", field="examples", value=examples)
        self._reported = examples, metrics or {}

    def _end(self) -> None:
        part = self._part
        if not self._is_loaded or self._reported is None:
            missing = "report(examples=...)" if self._is_loaded else "load(model)"
            part.fail(AppFailed(f"round {self.number} ended without round.{missing}", field="round"), self._task.key)
        task = part.arrive(self._task, 0)
        if task is not None:
            part.write(task, weight=self._reported[0], metrics=self._reported[1])
