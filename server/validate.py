"""Is a site's result one that the run can take? Checked before a byte of it is granted, and changes nothing."""

from __future__ import annotations

import math
from enum import Enum

from atoll.server.run_state import Phase, RunState
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import BadUpdate, NotAllowed, RemoteError, Stale, TooLarge

MAX_METRICS = 256
MAX_METRIC_NAME = 64  # characters: they stand in tables and records that people read
MAX_WEIGHT = 2**53  # a float64 holds it exactly

_UPDATE_SITE = "install the server's version of Atoll at the site"


class Standing(Enum):
    """What a well-formed result is to the run."""

    NEW = "new"  # its update is wanted
    KNOWN = "known"  # accepted before: a repeated message
    RELEASED = "released"  # committed, or of a run that is over: the site may drop it


def standing_of(
    state: RunState,
    site: str,
    result: pb.Result,
    *,
    run: str,
    update_bytes: int,
    partial_bytes: int,
    grows: bool = False,
    has_payload: bool = True,
) -> Standing:
    """What `result` of `site` is to the run.

    Args:
        update_bytes: length of an encoded update of this run.
        partial_bytes: length of the sum that a region sends in its place.
        grows: an update has 1 to `update_bytes`.
        has_payload: the tasks of a round bring an update; else only metrics or statistics.

    Raises:
        NotAllowed: the site is not in the cohort that was asked.
        Stale: an old round or attempt.
        BadUpdate: weight, metrics or payloads out of bounds.
        TooLarge: more metrics than are taken.
    """
    if state.phase is Phase.ENDED:
        return Standing.RELEASED
    _check_metrics(site, run, result)
    task = state.tasks.get(result.key.task)
    if task is None:
        return _settled(state, site, result, run)
    if task.site != site:
        raise _of(
            NotAllowed,
            site,
            run,
            result,
            f"task {result.key.task} was given to another site",
            "site",
            site,
            task.site,
            "restart the site's agent, and update it if this comes again",
        )
    if task.attempt != result.key.attempt:
        raise _of(
            Stale,
            site,
            run,
            result,
            "another attempt of this task is under way",
            "attempt",
            result.key.attempt,
            task.attempt,
            "nothing is to be done: the result of that one counts",
        )
    if task.kind == "train" and has_payload:
        _check_update(state, site, run, result, update_bytes, partial_bytes, grows)
    elif result.payloads or result.weight:
        raise _of(
            BadUpdate,
            site,
            run,
            result,
            "an answer without an update has no payload and no weight",
            "payloads",
            f"{len(result.payloads)} of weight {result.weight}",
            0,
            _UPDATE_SITE,
        )
    return Standing.NEW


def _settled(state: RunState, site: str, result: pb.Result, run: str) -> Standing:
    """A result whose task is not open: accepted earlier, committed, or never asked for."""
    last = state.committed
    for round_ in (*state.rounds.values(), *((last,) if last else ())):
        update = round_.updates.get(site)
        if update is not None and (update.task, update.attempt) == (result.key.task, result.key.attempt):
            return Standing.RELEASED if round_ is last else Standing.KNOWN
        if result.key.task == f"r{round_.number}.{site}" and site in round_.asked and round_ is not last:
            raise _of(
                Stale,
                site,
                run,
                result,
                "this attempt is not waited for any more",
                "attempt",
                result.key.attempt,
                round_.asked[site],
                "nothing is to be done: the newer one counts",
            )
    if last is not None and 0 < result.round <= last.number:
        raise _of(
            Stale,
            site,
            run,
            result,
            f"round {result.round} is closed",
            "round",
            result.round,
            last.number + 1,
            "if this comes in most rounds, the job's schedule needs a longer deadline",
        )
    raise _of(
        NotAllowed,
        site,
        run,
        result,
        "the site was not asked for this: it is not in the cohort",
        "task",
        result.key.task,
        "a task that was sent to this site",
        "restart the site's agent, and update it if this comes again",
    )


def _check_update(
    state: RunState, site: str, run: str, result: pb.Result, update_bytes: int, partial_bytes: int, grows: bool
) -> None:
    member = state.members.get(site) or state.former.get(site)
    is_region = member is not None and member.num_sites > 0
    most = min((member.sum_weights or member.max_weight) if member else 0, MAX_WEIGHT)
    payload, num_bytes = ("sum", partial_bytes) if is_region else ("update", update_bytes)
    if not 1 <= result.weight <= most:
        raise _of(
            BadUpdate,
            site,
            run,
            result,
            f"weight is {result.weight}",
            "weight",
            result.weight,
            f"1 to {most}, as declared",
            "restart the site's agent, so that it counts its data anew",
        )
    names = [found.name for found in result.payloads]
    if names != [payload]:
        found = ", ".join(names)[:200] or "none"
        raise _of(
            BadUpdate,
            site,
            run,
            result,
            "another payload than this site sends in this run",
            "payloads",
            found,
            payload,
            _UPDATE_SITE,
        )
    if grows and not 1 <= result.payloads[0].num_bytes <= num_bytes:
        raise _of(
            TooLarge,
            site,
            run,
            result,
            "the payload is not within its bound",
            "num_bytes",
            result.payloads[0].num_bytes,
            f"1 to {num_bytes}",
            "raise strategy.reducer.max_bytes, or have the app make it smaller",
        )
    if not grows and result.payloads[0].num_bytes != num_bytes:
        raise _of(
            BadUpdate,
            site,
            run,
            result,
            f"the {payload} has another length than the run's manifest and codec give",
            "num_bytes",
            result.payloads[0].num_bytes,
            num_bytes,
            _UPDATE_SITE,
        )


def _check_metrics(site: str, run: str, result: pb.Result) -> None:
    if len(result.metrics) > MAX_METRICS:
        raise _of(
            TooLarge,
            site,
            run,
            result,
            "too many metrics",
            "metrics",
            len(result.metrics),
            f"at most {MAX_METRICS}",
            "have the app's metrics() return fewer",
        )
    for name, metric in result.metrics.items():
        if not (1 <= len(name) <= MAX_METRIC_NAME and name.isprintable()):
            raise _of(
                BadUpdate,
                site,
                run,
                result,
                "a metric has a name that is none",
                "metrics",
                ascii(name[:MAX_METRIC_NAME]),
                f"1 to {MAX_METRIC_NAME} printable characters",
                "have the app's metrics() return such names",
            )
        if not (math.isfinite(metric.sum) and math.isfinite(metric.count) and metric.count >= 0):
            raise _of(
                BadUpdate,
                site,
                run,
                result,
                f"metric {name!r} is not a finite sum over a count",
                name,
                f"{metric.sum} / {metric.count}",
                "finite, count >= 0",
                "have the app's loss() and metrics() return finite numbers",
            )


def _of(
    kind: type[RemoteError],
    site: str,
    run: str,
    result: pb.Result,
    what: str,
    field: str,
    value: object,
    bound: object,
    advice: str,
) -> RemoteError:
    text = f"{field} from {site}, round {result.round}: {what} ({field} is {value}, wanted {bound}); {advice}"
    return kind(text, site=site, run=run, round=result.round, field=field, value=value, bound=bound)
