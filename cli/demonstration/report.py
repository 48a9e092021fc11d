"""What the demo says at the end."""

from __future__ import annotations

from typing import Any

from atoll.cli.demonstration.chart import draw
from atoll.cli.demonstration.show import Outcome


def record(outcome: Outcome) -> dict[str, Any]:
    """The one line of `atoll demo --json`; its keys are promised to programs."""
    return {
        "sites": len(outcome.cast.sites),
        "rounds": outcome.run["num_rounds"],
        "test_accuracy": outcome.test_accuracy,
        "central_test_accuracy": outcome.central_accuracy,
        "seconds": round(outcome.seconds, 1),
        "model": str(outcome.model),
    }


def lines(outcome: Outcome, *, rounds: bool) -> list[str]:
    """The chart, the comparison, and where everything lies.

    Args:
        rounds: the table of rounds before all that; a terminal has it already, from the live view of the run.
    """
    federated, central = outcome.test_accuracy, outcome.central_accuracy
    told = [
        *(["", *outcome.told] if rounds else []),
        "",
        *draw(list(outcome.accuracies.values()), central),
        "",
        f"test accuracy, {len(outcome.cast.sites)} sites that keep their data   {federated:.1%}",
        f"the same model, all data in one place         {central:.1%}",
        f"everything took {outcome.seconds:.0f} s",
        "",
        f"model  {outcome.model}",
    ]
    if outcome.plot is not None:
        told.append(f"plot   {outcome.plot}")
    return [*told, "", "next: README.md has the same in four terminals, by hand"]
