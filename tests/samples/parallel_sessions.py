"""What one process of a site does with a run's requests, for a `World` to run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from atoll.cluster.messages import Evaluate, Evaluated, Prepare, Prepared, Train, Trained
from atoll.cluster.sessions import open_session
from atoll.wire.errors import AtollError, Stale


def play(
    installed: Path, prepare: Prepare, trains: list[Train], evaluate: Evaluate | None
) -> tuple[Prepared, list[Trained], Evaluated | None]:
    """All of a run, in one process of its world."""
    if str(installed) not in sys.path:
        sys.path.insert(0, str(installed))
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        session = open_session(prepare)
        trained, judged = [], None
        for request in trains:  # judged in between, as a run does
            trained.append(session.train(request, ignore))  # type: ignore[union-attr]
            judged = session.evaluate(evaluate, ignore) if evaluate is not None else None  # type: ignore[union-attr]
        return session.prepared(), trained, judged
    finally:
        torch.use_deterministic_algorithms(deterministic)


def given_up(installed: Path, prepare: Prepare, train: Train) -> tuple[str, int]:
    """What a task ends with that only the last process hears is cancelled, and after how many steps of this process."""
    sys.path.insert(0, str(installed))
    steps = 0

    def on_step(done: int, total: int) -> None:
        nonlocal steps
        steps = done
        if done == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise Stale("nobody wants it")

    session = open_session(prepare)
    try:
        session.train(train, on_step)  # type: ignore[union-attr]
    except AtollError as error:
        return type(error).__name__, steps
    return "", steps


def ignore(done: int, total: int) -> None:
    pass
