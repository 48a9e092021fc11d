"""An error at this site as the server hears it: enough to act on, and nothing of this machine."""

from __future__ import annotations

from atoll.wire import control_pb2 as pb
from atoll.wire.errors import (
    AppFailed,
    AtollError,
    BadUpdate,
    ConfigError,
    DeviceMissing,
    Malformed,
    PolicyRefused,
    RemoteError,
    Unavailable,
)


def as_refusal(error: AtollError, *, site: str, run: str, round_: int = 0) -> RemoteError:
    """What the server hears of an error here. Paths and details of this machine stay in the log."""
    if isinstance(error, RemoteError):
        return error
    if isinstance(error, ConfigError):
        return Malformed(f"site {site} cannot do the job: {error}", site=site, run=run, round=round_, field=error.key)
    what = type(error).__name__
    why = str(error) if isinstance(error, DeviceMissing) else f"{what}: its administrator finds the reason in the log"
    return Unavailable(
        f"site {site} cannot do it now: {why}",
        site=site,
        run=run,
        round=round_,
        value=what,
    )


def without_values(refusal: RemoteError, site: str) -> RemoteError:
    """The same refusal where the server must learn no number of an update, and no word that the app has printed."""
    if not isinstance(refusal, BadUpdate | AppFailed):
        return refusal
    what = "its update is out of bounds" if isinstance(refusal, BadUpdate) else "its app failed"
    text = f"site {site}: {what}; its administrator finds the reason in the log there"
    return type(refusal)(text, site=site, run=refusal.run, round=refusal.round, bound=refusal.bound)


def require_agreed(task: pb.Task, num_rounds: int, *, site: str) -> None:
    """Raises PolicyRefused where a task is of a round that its run does not have."""
    if task.round > num_rounds:
        raise PolicyRefused(
            f"task of round {task.round}, the run that site {site} agreed to has {num_rounds}",
            site=site,
            run=task.key.run,
            round=task.round,
            field="round",
            value=task.round,
            bound=num_rounds,
        )
