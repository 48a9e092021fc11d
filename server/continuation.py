"""A run that goes on from another one: a new run, with the last version, the optimizer's state and the numbers of the old.

The old run stays as it ended, and its journal is never written again: a run has one job for ever, the sites are asked
anew, and two runs may go on from the same one. What was taken over is the first event of the new run's journal, in
one transaction with its row; the files follow, and are made again where a server was killed before the run was queued.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.codecs.encoding import feedback_of
from atoll.aggregation.reducers.append import Append
from atoll.aggregation.rules.rule import Paired
from atoll.aggregation.schedule import Branching, Resumable
from atoll.aggregation.strategy import Strategy, resolve
from atoll.server.events import Continued, Delegated, decode_event
from atoll.server.models import RunModels, place_file
from atoll.server.records import OPEN_STATUSES
from atoll.server.security import Caller
from atoll.server.store import Store
from atoll.wire.errors import BadManifest, ConfigError, NotAllowed, Stale, Unknown
from atoll.wire.job import Job, decode_job
from atoll.wire.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a run goes on from."""

    event: Continued
    crc32: int  # of the version's data


def source_of(store: Store, caller: Caller, job: Job, manifest: Manifest) -> Source:
    """The end of the run that a job continues. Blocks.

    Raises:
        Unknown: no such run.
        NotAllowed: it is another researcher's, or an upper server's.
        Stale: it is not over yet.
        BadManifest: its model has another tensor; names it.
        ConfigError: what must stay differs, or no round is left to do; names key, value and what the old run has.
    """
    run = job.job.continues or ""
    row = store.run(run)
    if row.submitted_by != caller.name:
        raise NotAllowed(f"run {run} is {row.submitted_by}'s: only they can go on from it", run=run)
    if row.status in OPEN_STATUSES:
        raise Stale(f"run {run} is {row.status}, and goes on by itself; stop it first: atoll stop {run}", run=run)
    begun = first_event(store, run)
    if isinstance(begun, Delegated):
        raise NotAllowed(f"run {run} is an upper server's: go on from it there", run=run)
    rounds = store.rounds(run)
    if rounds:
        number, version, crc32 = rounds[-1].round, rounds[-1].version, rounds[-1].model_crc32
    elif begun is not None:
        number, version, crc32 = begun.round, begun.version, row.crc32
    else:
        number, version, crc32 = 0, 0, row.crc32
    before = decode_job(row.job)
    _require_combined(run, before, version)
    _require_alike(run, before, job)
    _require_model(run, Manifest.decode(store.manifest(run)), manifest)
    if job.job.rounds <= number:
        raise ConfigError(
            f"job.rounds = {job.job.rounds}: run {run} has done {number} rounds, and this job counts them too; raise it",
            key="job.rounds",
            value=str(job.job.rounds),
            bound=f"> {number}",
        )
    if number and not isinstance(resolve(job).schedule, Resumable):
        name = resolve(job).schedule.__class__.__name__
        raise ConfigError(
            f"strategy.schedule: {name} cannot begin after rounds of another run; choose another schedule, or begin "
            "anew from its model: atoll run --from FILE",
            key="strategy.schedule",
            value=name,
        )
    return Source(event=Continued(run=run, round=number, version=version), crc32=crc32)


def first_event(store: Store, run: str) -> Continued | Delegated | None:
    """What a run's plan was made from, besides its job; None of an ordinary run."""
    events = store.events(run, most=1)
    first = decode_event(events[0]) if events else None
    return first if isinstance(first, Continued | Delegated) else None


def take_over(folder: Path, event: Continued, models: RunModels) -> None:
    """The version, and the optimizer's state where it has one, in the new run's folder; durable. Blocks.

    Raises:
        Unknown: the old run's files are not on the disk any more.
        DiskFull, LocalError: they cannot be copied.
    """
    old = RunModels(folder, event.run, models.manifest)
    models.prepare()
    paths = [(old.path(event.version), models.path(event.version))]
    if event.version:
        paths.append((old.optimizer_path(event.version), models.optimizer_path(event.version)))
    for source, path in paths:
        if not source.exists():
            raise Unknown(
                f"version {event.version} of run {event.run} is not on the server's disk any more: {source.name}",
                run=event.run,
                field="version",
                value=event.version,
            )
        place_file(source, path)


def _require_model(run: str, before: Manifest, now: Manifest) -> None:
    try:
        before.require_same(now)
    except BadManifest as error:
        raise BadManifest(
            f"run {run} cannot go on with this job: {error.message}",
            run=run,
            field=error.field,
            value=error.value,
            bound=error.bound,
        ) from None


def _require_combined(run: str, before: Job, version: int) -> None:
    """Between two versions of all, what a run has learned is in those of its groups, which no other run has."""
    schedule = resolve(before).schedule
    if isinstance(schedule, Branching) and version % schedule.combines_every:
        raise ConfigError(
            f"run {run} ended at version {version}, and its groups are combined every {schedule.combines_every} rounds: "
            "their own versions cannot go on; begin anew from its last one of all: atoll run --from FILE",
            key="job.continues",
            value=str(version),
            bound=f"a multiple of {schedule.combines_every}",
        )


def _require_alike(run: str, before: Job, now: Job) -> None:
    """What reaches over the rounds of a run, at the server and at the sites, must be of one kind."""
    old, new = resolve(before), resolve(now)
    if before.asks != "train" or isinstance(old.reducer, Append) or isinstance(new.reducer, Append):
        raise ConfigError(
            f"job.continues: run {run} and this one have to be trainings of tensors, with rounds that go on; begin anew "
            "from a model: atoll run --from FILE",
            key="job.continues",
            value=run,
        )
    for key, was, is_ in (
        ("job.app", before.job.app or "", now.job.app or ""),
        ("job.script", before.job.script or "", now.job.script or ""),
        ("strategy.optimizer", _optimizer(old), _optimizer(new)),
        ("strategy.rule", type(old.rule).__name__, type(new.rule).__name__),
        ("strategy.buffers", old.buffers, new.buffers),
        ("strategy.local", ", ".join(old.local), ", ".join(new.local)),
        ("strategy.schedule.fragments", str(old.exchange.num_fragments), str(new.exchange.num_fragments)),
    ):
        if was != is_:
            raise ConfigError(
                f"{key} is {is_ or 'empty'}, in run {run} it is {was or 'empty'}: what that keeps from round to round "
                "cannot go on; take the old value, or begin anew from its model: atoll run --from FILE",
                key=key,
                value=is_,
                bound=was,
            )
    _require_nothing_paired(run, new)


def _require_nothing_paired(run: str, strategy: Strategy) -> None:
    """What the sites keep in step with the server goes by the rounds that counted, which the new run does not know."""
    for key, name, paired in (
        ("strategy.rule", strategy.rule.name, isinstance(strategy.rule, Paired)),
        ("strategy.codec", f"{strategy.codec.name} with difference", feedback_of(strategy.codec) == "difference"),
    ):
        if paired:
            raise ConfigError(
                f"{key} = {name}: its sites keep something in step with the server of run {run}, which does not go on in "
                "another run; begin anew from its model: atoll run --from FILE",
                key=key,
                value=name,
            )


def _optimizer(strategy: Strategy) -> str:
    optimizer = strategy.optimizer
    return f"{optimizer.name} in {str(optimizer.precision(wide=False)).removeprefix('torch.')}"
