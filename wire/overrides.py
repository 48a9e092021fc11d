"""Values of a job that change from a round on: which may, and what the job is with them.

A run is planned as a whole: what sites have promised (weights, bytes, tensors), and what reaches over rounds (the
schedule's and the optimizer's state), stays. All else that makes a round may differ from the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

CHANGING: Final = ("work", "rule", "reducer", "optimizer")  # parts of the strategy of which options may change

_FIXED: Final[Mapping[str, str]] = {
    "job": "the sites have agreed to it",
    "evaluation": "it is the same for the whole run",
    "training": "workers are set up once",
    "control": "it is the same for the whole run",
    "strategy.kind": "a run has one strategy; change options of its parts",
    "strategy.schedule": "its state reaches over rounds",
    "strategy.codec": "sites have promised updates of one layout",
    "strategy.download": "sites have promised to read one layout",
    "strategy.buffers": "sites have promised updates of one layout",
    "strategy.local": "it says what stays at a site for the whole run",
    "strategy.sum": "sites have promised updates within one bound",
}


def refuse_fixed(table: Any) -> None:
    """Returns where an entry of `control.override` names only what may change.

    Raises:
        ValueError: names the key and why it stays, and what may change.
    """
    if not isinstance(table, dict):
        return
    strategy = table.get("strategy")
    strategy = strategy if isinstance(strategy, dict) else {}
    kinds = [part for part in CHANGING if isinstance(strategy.get(part), dict) and "kind" in strategy[part]]
    for key in [*(key for key in table if key in _FIXED), *(f"strategy.{key}" for key in strategy)]:
        if key in _FIXED:
            raise ValueError(f"{key} cannot change during a run: {_FIXED[key]}; {_may_change()}")
    for part in kinds:
        raise ValueError(
            f"strategy.{part}.kind cannot change during a run: give options of the kind that the job has; "
            f"{_may_change()}"
        )


def changed(table: dict[str, Any], app: Mapping[str, Any], strategy: Mapping[str, Any]) -> dict[str, Any]:
    """A job as a table, with other values. One unit of work takes the place of the other."""
    parts = dict(table["strategy"])
    for part, options in strategy.items():
        before = parts.get(part, {})
        if part == "work" and isinstance(options, Mapping) and options.keys() & {"epochs", "steps"}:
            before = {name: value for name, value in before.items() if name not in ("epochs", "steps")}
        parts[part] = merged(before, options)
    return {**table, "app": merged(table["app"], app), "strategy": parts}


def merged(before: Any, after: Any) -> Any:
    """`after` over `before`; tables key by key, all else as a whole."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    return {**before, **{key: merged(before.get(key), value) for key, value in after.items()}}


def _may_change() -> str:
    return f"app and {', '.join(f'strategy.{part}' for part in CHANGING)} may"
