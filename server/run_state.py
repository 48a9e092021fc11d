"""What a run is made of, as values: its plan, its tasks, its state, and the things that are to be done about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from atoll.aggregation.schedule import Joined, Schedule
from atoll.server.round import Metrics, Round
from atoll.wire.errors import BadUpdate, RemoteError, Stale, TooFewSites, Unavailable


class Phase(StrEnum):
    WAITING = "queued"
    RUNNING = "running"
    FINISHING = "finishing"
    ENDED = "ended"


class Outcome(StrEnum):
    NONE = ""
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What stays the same for the whole run."""

    schedule: Schedule[Any]
    num_rounds: int
    seed: int
    evaluate_every: int
    evaluate_at_sites: bool
    evaluate_at_server: bool
    wait_share: float = 1.0  # of the job's wait for sites; less in a region, for whose answer the upper server waits
    delegated: bool = False  # an upper server asks for rounds and evaluations, and commits


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing asked of one site. A higher attempt makes the ones before it void."""

    task: str
    attempt: int
    site: str
    kind: Literal["train", "evaluate", "exchange"]
    round: int  # that its update counts in
    base_version: int
    dispatched: int = 0  # round in which it was given, where it was carried over from there

    @property
    def given_in(self) -> int:
        """The round that the site knows it by."""
        return self.dispatched or self.round


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is known of one committed version."""

    round: int
    by_site: Mapping[str, Metrics] = field(default_factory=dict)
    at_server: Metrics = field(default_factory=dict)
    server_pending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """Of gossip: the newest model that a site has trained and holds for its neighbours."""

    task: str
    attempt: int
    round: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    phase: Phase
    outcome: Outcome = Outcome.NONE
    reason: str = ""
    our_fault: bool = False  # it failed since the server could not go on, not for want of sites
    bad_updates: bool = False  # it failed since no version could be made of its updates
    schedule: Any
    members: Mapping[str, Joined] = field(default_factory=dict)  # present ones, by site
    former: Mapping[str, Joined] = field(default_factory=dict)  # those that left and may come back
    tasks: Mapping[str, Task] = field(default_factory=dict)  # open ones, by task id
    rounds: Mapping[int, Round] = field(default_factory=dict)  # open and closing ones
    committed: Round | None = None  # the last one
    kept: Mapping[str, KeptModel] = field(default_factory=dict)  # of gossip, by site
    abandoned: Round | None = None  # the last one that this region has no part in, with `abandoned_reason`
    abandoned_reason: str = ""
    version: int = 0
    timers: Mapping[str, float] = field(default_factory=dict)  # name -> seconds, as set
    evaluations: Mapping[int, Evaluation] = field(default_factory=dict)  # by version; the newest two

    def round_of(self, task: str, attempt: int) -> Round | None:
        """The open round that a task's update counts in, or is accepted in."""
        if (open_ := self.tasks.get(task)) is not None and open_.kind == "train":
            return self.rounds.get(open_.round)
        for round_ in self.rounds.values():
            if any((update.task, update.attempt) == (task, attempt) for update in round_.updates.values()):
                return round_
        return None

    def first_closing(self) -> Round | None:
        """The round that is committed next; None where none is being closed."""
        return min((r for r in self.rounds.values() if r.closing), key=lambda r: r.number, default=None)

    def settled_upto(self, site: str) -> int:
        """The last round of which this site's results, and those before it, are not needed any more."""
        done = self.committed.number if self.committed is not None else 0
        if (model := self.kept.get(site)) is not None:  # of gossip: what the site's next task begins with stays
            return model.round - 1
        tasks = [task.given_in for task in self.tasks.values() if task.site == site and task.kind == "train"]
        updates = [
            update.dispatched or round_.number
            for round_ in self.rounds.values()
            if (update := round_.updates.get(site)) is not None
        ]
        return min([done, *(number - 1 for number in (*tasks, *updates))])


# --- what is to be done ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTask:
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawTask:
    task: Task
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    """Get ready to fold updates of this round (or of its larger cohort)."""

    round: Round


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRound:
    """Combine the updates of `round.closing`, make the next version durable, then report Committed."""

    round: Round


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTimer:
    name: str
    after_s: float  # 0 disarms


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateHere:
    """Judge this version on the server's side."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceCommit:
    round: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanging:
    """Of gossip: the round is under way; introduce the pairs that are not settled."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    outcome: Outcome
    reason: str
    our_fault: bool = False
    bad_updates: bool = False

    def error(self, run: str) -> RemoteError:
        """Why the run ended early, in the form that people and sites are told."""
        if self.our_fault:
            return Unavailable(self.reason, run=run)
        if self.bad_updates:
            return BadUpdate(self.reason, run=run)
        kind = TooFewSites if self.outcome is Outcome.FAILED else Stale
        return kind(self.reason, run=run)


RunAction = (
    SendTask | WithdrawTask | OpenRound | CommitRound | ArmTimer | EvaluateHere | AnnounceCommit | Exchanging | EndRun
)
