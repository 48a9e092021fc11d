"""What a job that names a script cannot ask for: Atoll does not own the script's loop, and never calls it to judge a model."""

from __future__ import annotations

from typing import Any


def with_terms_of_scripts(table: Any) -> Any:
    """A job's table, as parsed; of a script with `evaluation.sites = false`, which it then has where it says nothing.

    Raises:
        ValueError: names the key that goes with apps alone.
    """
    if not isinstance(table, dict) or not isinstance(table.get("job"), dict) or table["job"].get("script") is None:
        return table
    evaluation = table.get("evaluation") or {}
    if not isinstance(evaluation, dict):
        return table  # wrong, which is told elsewhere
    for key in ("sites", "server", "only"):
        if evaluation.get(key):
            raise ValueError(
                f"evaluation.{key} = true with job.script = {table['job']['script']!r}: a script is not asked to judge a "
                "model; leave it out, and have the script report metrics of its own"
            )
    for key, reason in (
        ("statistics", "statistics are made of an app's data"),
        ("parallel", "a script starts its own processes, such as by torchrun"),
    ):
        if table.get(key) is not None:
            raise ValueError(f"[{key}] with job.script = {table['job']['script']!r}: {reason}; remove the table")
    return {**table, "evaluation": {**evaluation, "sites": False}}
