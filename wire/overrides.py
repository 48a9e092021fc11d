"""Values of a job that change from a round on: which may, and what the job is with them.

A run is planned as a whole: what sites have agreed to, what a worker is set up with once, and the kind of what reaches
over rounds stay. All else that makes a round may differ from the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Parts of the strategy of which options may change.
CHANGING: Final = ("schedule", "work", "rule", "codec", "download", "reducer", "optimizer", "sum")
_OTHER_KINDS: Final = ("codec", "download")  # nothing that reaches over rounds goes by their kind

_FIXED: Final[Mapping[str, str]] = {
    "job": "the sites have agreed to it",
    "evaluation.sites": "sites load what they judge with once",
    "evaluation.server": "the server's worker is set up once",
    "evaluation.metrics": "versions are compared by them",
    "evaluation.only": "it says what the run is for",
    "evaluation.by_site": "the sites have agreed to it",
    "statistics": "it says what the run is for",
    "training": "workers are set up once",
    "parallel": "workers are set up once",
    "privacy": "the sites have agreed to it",
    "control": "it is the same for the whole run",
    "strategy.kind": "a run has one strategy; change options of its parts",
    "strategy.buffers": "it says what stays at a site for the whole run",
    "strategy.local": "it says what stays at a site for the whole run",
    "strategy.parameters": "all versions of a run have the same tensors",
    "strategy.personal": "the model that a site keeps for itself goes on from round to round",
}


def refuse_fixed(table: Any) -> None:
    """Returns where an entry of `control.override` names only what may change.

    Raises:
        ValueError: names the key and why it stays, and what may change.
    """
    if not isinstance(table, dict):
        return
    strategy, evaluation = (_table(table, name) for name in ("strategy", "evaluation"))
    own = [part for part in CHANGING if part not in _OTHER_KINDS]
    kinds = [part for part in own if isinstance(strategy.get(part), dict) and "kind" in strategy[part]]
    inner = (f"{name}.{key}" for name, part in (("strategy", strategy), ("evaluation", evaluation)) for key in part)
    for key in (*table, *inner):
        if key in _FIXED:
            raise ValueError(f"{key} cannot change during a run: {_FIXED[key]}; {_may_change()}")
    for part in kinds:
        raise ValueError(
            f"strategy.{part}.kind cannot change during a run: give options of the kind that the job has; "
            f"{_may_change()}"
        )


def changed(
    table: dict[str, Any], app: Mapping[str, Any], strategy: Mapping[str, Any], evaluation: Mapping[str, Any]
) -> dict[str, Any]:
    """A job as a table, with other values. One unit of work takes the place of the other, and one codec of another."""
    parts = dict(table["strategy"])
    for part, options in strategy.items():
        before = parts.get(part, {})
        if part == "work" and isinstance(options, Mapping) and options.keys() & {"epochs", "steps"}:
            before = {name: value for name, value in before.items() if name not in ("epochs", "steps")}
        if (
            part in _OTHER_KINDS
            and isinstance(options, Mapping)
            and options.get("kind") not in (None, before.get("kind"))
        ):
            before = {}
        parts[part] = merged(before, options)
    evaluation = merged(table["evaluation"], evaluation)
    return {**table, "app": merged(table["app"], app), "strategy": parts, "evaluation": evaluation}


def merged(before: Any, after: Any) -> Any:
    """`after` over `before`; tables key by key, all else as a whole."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    return {**before, **{key: merged(before.get(key), value) for key, value in after.items()}}


def _table(table: dict[str, Any], name: str) -> dict[str, Any]:
    inner = table.get(name)
    return inner if isinstance(inner, dict) else {}


def _may_change() -> str:
    return f"app, evaluation.every and {', '.join(f'strategy.{part}' for part in CHANGING)} may"
