"""Which worker does a run here: one that the agent starts, or the script that an administrator starts beside it."""

from __future__ import annotations

from atoll.client.offers import Admission
from atoll.client.workers import Worker
from atoll.client.workplace import Workplace
from atoll.cluster.script.awaited import AwaitedScript


def new_worker_of(admission: Admission, place: Workplace) -> Worker:
    """A worker for the run, not started yet."""
    run = admission.run
    folder = place.home.run_state(run) / "worker"
    if admission.script is None:
        return place.new_worker(folder, place.home.worker_log(run))
    text = f"waits for its script: atoll site exec {run} -- python {admission.script}"
    return AwaitedScript(folder, on_waiting=lambda: place.board.held_up(run, text))
