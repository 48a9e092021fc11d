"""What one process of a site does with a run's requests, for a `World` to run."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

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


def play_on_nodes(
    installed: Path, prepare: Prepare, trains: list[Train], evaluate: Evaluate, per_node: int
) -> tuple[tuple[Prepared, list[Trained], Evaluated | None], int]:
    """As `play`, where only the first `per_node` processes see the files; and the most bytes sent or taken at once."""
    most = 0
    real = {name: getattr(dist, name) for name in ("send", "recv", "broadcast")}

    def counted(name: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            nonlocal most
            most = max(most, tensor.untyped_storage().nbytes() if dist.get_rank() >= per_node else tensor.nbytes)
            return real[name](tensor, *args, **options)

        return call

    if dist.get_rank() >= per_node:
        nowhere = "/nowhere/to/be/seen"
        prepare = replace(prepare, manifest_path=nowhere)
        trains = [replace(one, base_path=nowhere, out_path=nowhere) for one in trains]
        evaluate = replace(evaluate, base_path=nowhere)
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(per_node)),
        mock.patch.multiple(dist, **{name: counted(name) for name in real}),
    ):
        return play(installed, prepare, trains, evaluate), most


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
