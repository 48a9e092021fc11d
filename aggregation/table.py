"""The table of combinations as text: which parts go together, and why others do not, asked of `combinations.py`.

`scripts/combinations` writes it into docs/strategies.md. Cells stand for parts with the options of `SAMPLES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from atoll.aggregation import parts
from atoll.aggregation.combinations import REFUSALS, Combined, refusal
from atoll.wire.errors import ConfigError
from atoll.wire.job import parse_job
from atoll.wire.privacy_section import SecureAggregationSection

SAMPLES: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = {  # options of kinds that cannot be made without
    ("rule", "fedprox"): {"mu": 0.1},
    ("schedule", "rounds"): {"min": 3},
    ("schedule", "buffered"): {"min": 3, "k": 3},
    ("schedule", "every_steps"): {"min": 3, "steps": 6, "fragments": 3},
    ("schedule", "hierarchical"): {
        "label": "region",
        "groups": ["north", "south"],
        "rounds": 1,
        "inner": {"kind": "rounds", "min": 3},
    },
    ("schedule", "gossip"): {"min": 3, "zone": "reef"},
    ("reducer", "norm_bound"): {"norm": 5.0},
    ("reducer", "krum"): {"faulty": 0},
    ("reducer", "multi_krum"): {"faulty": 0},
    ("reducer", "bulyan"): {"faulty": 0},
    ("reducer", "centered_clipping"): {"radius": 5.0},
    ("reducer", "bucketing"): {"inner": {"kind": "median"}},
    ("reducer", "fltrust"): {"trusted": "b"},
    ("reducer", "qfedavg"): {"lr": 0.1},
    ("personal", "fine_tune"): {"epochs": 1},
}
_WHOLE = {"every_steps": {"min": 3, "steps": 6}}  # schedules that have a row without fragments too
Kinds = Mapping[str, Any]  # title -> part


def combinations_table() -> str:
    """Markdown: schedule by reducer with every codec, without and with regions; schedule by the rest; masked."""
    schedules = _schedules()
    reducers = {kind: _made("reducer", kind) for kind in parts.BUILT_IN["reducer"] if kind != "append"}
    lines = [
        'Schedule by reducer, in a federation without regions. "yes": with every codec; a number is a reason of the list',
        "below; of two, the second is for codecs with error feedback (`top_k` and `random_k` have it unless told otherwise).",
        "",
    ]
    lines += _grid("schedule", schedules, reducers, lambda one, two: _cell(one, two, regions=False))
    lines += ["", "The same with regions in the cohort ([trees](trees.md)).", ""]
    lines += _grid("schedule", schedules, reducers, lambda one, two: _cell(one, two, regions=True))
    lines += ["", "Schedule by rule, personal model and codec of downloads, with the reducer `mean`.", ""]
    lines += _grid("schedule", schedules, _others(), lambda one, two: _word(refused(schedule=one, **two)))
    lines += [
        "",
        "With `[privacy] secure_aggregation` ([secure aggregation](secure-aggregation.md)): schedule by reducer, in buckets of",
        "three sites.",
        "",
    ]
    masked = {**reducers, "bucketing": _made("reducer", "bucketing", size=3)}
    lines += _grid("schedule", schedules, masked, lambda one, two: _word(_masked(schedule=one, reducer=two)))
    lines += ["", "The same with regions in the cohort, which hold the sessions and send their sums up.", ""]
    lines += _grid(
        "schedule", schedules, masked, lambda one, two: _word(_masked(schedule=one, reducer=two, regions=True))
    )
    lines += ["", "With masks and without regions, schedule by the rest, with the reducer `mean`.", ""]
    codecs = {kind: {"codec": _made("codec", kind)} for kind in parts.BUILT_IN["codec"]}
    lines += _grid("schedule", schedules, {**_others(), **codecs}, lambda one, two: _word(_masked(schedule=one, **two)))
    lines += ["", f"`[privacy] differential_privacy` in a job: {_privacy()}.", "", *_reasons()]
    return "\n".join(lines)


def refused(**changes: Any) -> int | None:
    """The number of the reason why parts do not go together, counted from 1; None where they do."""
    plain = {
        "schedule": _made("schedule", "rounds"),
        "codec": _made("codec", "native"),
        "reducer": _made("reducer", "mean"),
        "buffers": "mean",
        "server_evaluation": False,
    }
    found = refusal(Combined(**(plain | changes)))
    return None if found is None else REFUSALS.index(found) + 1


def _masked(**changes: Any) -> int | None:
    return refused(masked=SecureAggregationSection(fewest_survivors=3), **changes)


def _made(part: str, kind: str, **options: Any) -> Any:
    return parts.build(part, kind, {**SAMPLES.get((part, kind), {}), **options})


def _schedules() -> Kinds:
    rows: dict[str, Any] = {}
    for kind in parts.BUILT_IN["schedule"]:
        if kind in _WHOLE:
            rows[kind] = parts.build("schedule", kind, _WHOLE[kind])
            rows[f"{kind}, fragments"] = _made("schedule", kind)
        else:
            rows[kind] = _made("schedule", kind)
    return rows


def _codecs() -> tuple[list[Any], list[Any]]:
    """Every codec: as it is where it carries nothing over, and with error feedback where it may."""
    plain = [_made("codec", kind) for kind in parts.BUILT_IN["codec"]]
    with_choice = [kind for kind in parts.BUILT_IN["codec"] if "error_feedback" in _options("codec", kind)]
    off = [_made("codec", kind, error_feedback=False) for kind in with_choice]
    on = [_made("codec", kind, error_feedback=True) for kind in with_choice]
    return [codec for codec in plain if codec.name not in with_choice] + off, on


def _options(part: str, kind: str) -> Iterable[str]:
    return parts.options_of(parts.BUILT_IN[part][kind], part).model_fields


def _others() -> dict[str, dict[str, Any]]:
    """Changes to a plain combination, by the name of what they stand for."""
    columns: dict[str, dict[str, Any]] = {}
    for kind in parts.BUILT_IN["rule"]:
        optimizer = {"optimizer": _made("optimizer", "feddyn")} if kind == "feddyn" else {}
        columns[kind] = {"rule": _made("rule", kind), **optimizer}
    for kind in parts.BUILT_IN["personal"]:
        if kind != "none":
            columns[kind] = {"personal": _made("personal", kind)}
    return {**columns, "download": {"download": _made("codec", "bfloat16")}}


def _cell(schedule: Any, reducer: Any, *, regions: bool) -> str:
    """What a schedule and a reducer come to with codecs that carry nothing over, and with those that do if that differs."""
    words = []
    for codecs in _codecs():
        found = {refused(schedule=schedule, reducer=reducer, codec=codec, regions=regions) for codec in codecs}
        words.append(", ".join(sorted(map(_word, found))))
    return words[0] if words[0] == words[1] else " / ".join(words)


def _word(number: int | None) -> str:
    return "yes" if number is None else str(number)


def _grid(corner: str, rows: Kinds, columns: Mapping[str, Any], cell: Any) -> Iterable[str]:
    yield f"| {corner} | " + " | ".join(f"`{column}`" for column in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for title, row in rows.items():
        yield f"| {title} | " + " | ".join(cell(row, column) for column in columns.values()) + " |"


def _privacy() -> str:
    """What a job that asks for privacy is told."""
    try:
        parse_job({"job": {"name": "x", "app": "x", "rounds": 1}, "privacy": {"differential_privacy": {}}})
    except ConfigError as error:
        return str(error).partition("]: ")[2] or str(error)
    return "yes"


def _reasons() -> Iterable[str]:
    yield "| | with | why not |"
    yield "|---|---|---|"
    for number, one in enumerate(REFUSALS, start=1):
        yield f"| {number} | `{one.keys[0]}`, `{one.keys[1]}` | {one.reason} |"
