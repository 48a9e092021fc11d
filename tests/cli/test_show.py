"""What the demo makes of a run that has ended."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cli.demonstration.crew import DemoFailed
from atoll.cli.demonstration.show import accuracies_of


def run(*at_server: dict[str, float | None]) -> dict[str, Any]:
    """A run as `atoll status --json` prints it, whose sites have judged every version."""
    rounds = [
        {"round": number, "server": judged, "evaluate": {"accuracy": 0.5}} for number, judged in enumerate(at_server, 1)
    ]
    return {"run": "run", "num_rounds": len(rounds), "rounds": rounds}


def test_accuracy_is_what_the_server_found() -> None:
    assert accuracies_of(run({"accuracy": 0.7, "loss": 1.0}, {"accuracy": 0.8})) == {1: 0.7, 2: 0.8}


def test_a_busy_server_may_skip_versions_that_the_sites_have_judged() -> None:
    assert accuracies_of(run({}, {"accuracy": None}, {"accuracy": 0.8})) == {1: 0.5, 2: 0.5, 3: 0.8}


def test_what_the_sites_say_is_no_answer_for_the_server() -> None:
    """A server that cannot evaluate would go unnoticed."""
    with pytest.raises(DemoFailed, match="last version at the server"):
        accuracies_of(run({"accuracy": 0.7}, {}))
