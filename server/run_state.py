"""What a run is made of, as values: its plan, its tasks, its state, and the things that are to be done about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from atoll.aggregation.schedule import Accepted, Branching, Committed, Failed, Joined, Ready, Schedule
from atoll.server.events import WaitEnded
from atoll.server.round import Metrics, Round
from atoll.wire import errors_pb2
from atoll.wire.errors import BadUpdate, RemoteError, Stale, TooFewSites, Unavailable, to_detail
from atoll.wire.job import Asks

if TYPE_CHECKING:
    from atoll.server.judgement import Judge


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
class Change:
    """What is different in a plan from a round on."""

    from_round: int
    schedule: Schedule[Any]
    evaluate_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does, as its job has it."""

    schedule: Schedule[Any]  # of its first round; later ones have the same state
    num_rounds: int
    seed: int
    evaluate_every: int
    evaluate_at_sites: bool
    evaluate_at_server: bool
    wait_share: float = 1.0  # of the job's wait for sites; less in a region, for whose answer the upper server waits
    delegated: bool = False  # an upper server asks for rounds and evaluations, and commits
    judge: Judge | None = None  # which version is the best, and when the run ends early
    done_rounds: int = 0  # of the run that this one goes on from: its rounds are numbered on
    first_version: int = 0  # what it begins with
    asks: Asks = "train"  # what a round's tasks ask of their sites; else than training, they bring no payload
    changes: tuple[Change, ...] = ()  # by rising round
    masked: bool = False  # updates stay at their sites until a session of secure aggregation has them masked

    def schedule_of(self, round_: int) -> Schedule[Any]:
        """By whose options a round goes."""
        return next((c.schedule for c in reversed(self.changes) if c.from_round <= round_), self.schedule)

    @property
    def fewest_updates(self) -> int:
        """Updates that a round combines at least, in whichever round."""
        return min(schedule.fewest_updates for schedule in (self.schedule, *(c.schedule for c in self.changes)))

    def evaluates(self, round_: int) -> bool:
        """Whether the version that a round makes is judged."""
        every = next((c.evaluate_every for c in reversed(self.changes) if c.from_round <= round_), self.evaluate_every)
        return round_ % every == 0 or round_ == self.num_rounds

    @property
    def brings_payloads(self) -> bool:
        """Whether the result of a round's task has one."""
        return self.asks == "train" and not self.masked


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing asked of one site. A higher attempt makes the ones before it void."""

    task: str
    attempt: int
    site: str
    kind: Literal["train", "evaluate", "exchange"]  # "train": a task of a round, which asks what the plan says
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
    judged: bool = False  # it has counted for or against


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How far the versions have come by the metric that the job names (judgement.py)."""

    version: int = 0  # the best one; 0 before the first
    round: int = 0  # that made it
    value: float = 0.0
    reference: float | None = None  # the last value that was an improvement by more than `min_delta`
    without: int = 0  # evaluations since


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
    judgement: Judgement = Judgement()
    counted: Mapping[str, int] = field(default_factory=dict)  # by site, the last round whose version holds its update
    in_doubt: Mapping[str, int] = field(default_factory=dict)  # of a region: the same of sums that went up since
    all_weights: int = 0  # of all members at the last version

    def round_of(self, task: str, attempt: int) -> Round | None:
        """The open round that a task's update counts in, or is accepted in."""
        if (open_ := self.tasks.get(task)) is not None and open_.kind == "train":
            return self.rounds.get(open_.round)
        for round_ in self.rounds.values():
            if any((update.task, update.attempt) == (task, attempt) for update in round_.updates.values()):
                return round_
        return None

    def concerns(self, plan: Plan, event: object) -> int:
        """The round that an event is about: its own, the one that a commit makes room for, or the newest."""
        match event:
            case Committed(round=number):
                return number + 1
            case Accepted(round=number) | Failed(round=number):
                return number
        done = self.committed.number if self.committed is not None else plan.done_rounds
        return max(self.rounds, default=done + 1)

    def may_begin(self, plan: Plan) -> bool:
        """Whether the members so far are enough for a first round; in every group, where there are groups."""
        schedule = plan.schedule
        whole = not isinstance(schedule, Branching) or schedule.is_complete(self.schedule)
        return whole and len(self.members) >= schedule.min_sites

    def wait_over(self, plan: Plan, shortfall: str) -> Ready | WaitEnded:
        """The event of a wait for sites that is over. Which group lacks some of them its schedule says."""
        groups = isinstance(plan.schedule, Branching) and len(self.members) >= plan.schedule.min_sites
        return Ready() if groups else WaitEnded(reason=shortfall)

    def branch_of(self, plan: Plan, site: str, version: int) -> int | None:
        """The group whose form of a version a site gets; None where it is that of all."""
        # Asked for each task, and `isinstance` takes 50 us to look at a protocol.
        branch: Callable[[Any, str, int], int | None] | None = getattr(plan.schedule, "branch", None)
        return None if branch is None else branch(self.schedule, site, version)

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

    def detail(self, run: str) -> errors_pb2.ErrorDetail | None:
        """The same as it is kept and sent; one that finished has a reason and no error. None where nothing is to say."""
        if not self.reason:
            return None
        if self.outcome is Outcome.FINISHED:
            return errors_pb2.ErrorDetail(message=self.reason, run=run)
        return to_detail(self.error(run))


RunAction = (
    SendTask | WithdrawTask | OpenRound | CommitRound | ArmTimer | EvaluateHere | AnnounceCommit | Exchanging | EndRun
)
