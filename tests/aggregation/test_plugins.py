"""Plugins as they are in life: distributions installed beside Atoll, found by a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MEDIAN = '''
import torch
from atoll.aggregation.codecs.casts import FLOAT32
from atoll.aggregation.compositions import Composition
from atoll.aggregation.reducers.mean import Mean
from atoll.wire.job import Strict


class Tripled:
    """Every update thrice."""

    class Options(Strict):
        times: int = 3

    def __init__(self, options):
        self.name, self.times = "tripled", options.times
        self.needs, self.fewest_updates = "sum", 1

    def mixed(self, num_updates):
        return num_updates

    def init(self, layout, terms):
        return Mean(Mean.Options()).init(layout, terms)


class Unfinished(Tripled):
    """Lacks what every reducer has."""

    def __init__(self, options):
        self.name = "unfinished"


class Raises(Tripled):
    """Cannot be made."""

    def __init__(self, options):
        raise RuntimeError("no licence here")


class Sparse:
    """Cannot be summed."""

    class Options(Strict):
        pass

    def __init__(self, options):
        self.name, self.additive = "sparse", False

    def encoding(self, dtype):
        return FLOAT32


class Bare:
    pass


fedthrice = Composition(summary="Thrice.", parts={"reducer": {"kind": "tripled", "times": 4}})
'''

ENTRY_POINTS = """
[atoll.reducers]
tripled = good_parts:Tripled
mean = good_parts:Tripled
unfinished = good_parts:Unfinished
raises = good_parts:Raises

[atoll.codecs]
sparse = good_parts:Sparse

[atoll.rules]
bare = good_parts:Bare

[atoll.schedules]
number = good_parts:MISSING

[atoll.strategies]
fedthrice = good_parts:fedthrice
wrong = good_parts:Tripled
"""

SCRIPT = """
import json, sys
from atoll.aggregation.catalogue import describe
from atoll.aggregation.strategy import resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import parse_job

def attempt(strategy):
    job = parse_job({"job": {"name": "x", "app": "x", "rounds": 1}, "strategy": strategy})
    try:
        found = resolve(job)
    except ConfigError as error:
        return {"error": str(error), "key": error.key, "value": error.value}
    return {"reducer": found.reducer.name, "times": getattr(found.reducer, "times", 0)}

attempts = {name: attempt(strategy) for name, strategy in json.loads(sys.argv[1]).items()}
kinds = [[kind.part, kind.kind, kind.source, kind.failure] for kind in describe() if kind.source != "built in" or kind.failure]
print(json.dumps({"attempts": attempts, "kinds": kinds, "broken": "broken_parts" in sys.modules}))
"""

JOBS: dict[str, dict[str, Any]] = {
    "plugin": {"reducer": {"kind": "tripled"}},
    "option": {"reducer": {"kind": "tripled", "times": 5}},
    "bad option": {"reducer": {"kind": "tripled", "time": 5}},
    "composition": {"kind": "fedthrice"},
    "shadow": {"reducer": {"kind": "mean"}},
    "not additive": {"codec": {"kind": "sparse"}},
    "no options": {"rule": {"kind": "bare"}},
    "no such name": {"schedule": {"kind": "number"}},
    "fails to import": {"optimizer": {"kind": "broken"}},
    "not a class": {"optimizer": {"kind": "number"}},
    "not a composition": {"kind": "wrong"},
    "brought twice": {"codec": {"kind": "twice"}},
    "lacks a member": {"reducer": {"kind": "unfinished"}},
    "raises": {"reducer": {"kind": "raises"}},
    "near": {"reducer": {"kind": "triple"}},
}


def install(folder: Path, name: str, module: str, code: str, entry_points: str) -> None:
    """A distribution as an installer leaves it."""
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)
    (info / "RECORD").write_text(f"{module}.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process sees that has three such distributions on its path."""
    site = tmp_path_factory.mktemp("site")
    install(site, "good-parts", "good_parts", MEDIAN, ENTRY_POINTS)
    broken = "raise RuntimeError('needs a newer torch')\n"
    points = "[atoll.optimizers]\nbroken = broken_parts:Anything\n[atoll.codecs]\ntwice = broken_parts:A\n"
    install(site, "broken-parts", "broken_parts", broken, points)
    other = "[atoll.optimizers]\nnumber = other_parts:NUMBER\n[atoll.codecs]\ntwice = other_parts:A\n"
    install(site, "other-parts", "other_parts", "NUMBER = 7\n", other)
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(JOBS)],
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{site}"},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_plugin_is_a_part_like_any_other(seen: dict[str, Any]) -> None:
    assert seen["attempts"]["plugin"] == {"reducer": "tripled", "times": 3}
    assert seen["attempts"]["option"] == {"reducer": "tripled", "times": 5}
    assert seen["attempts"]["composition"] == {"reducer": "tripled", "times": 4}


def test_a_built_in_cannot_be_replaced(seen: dict[str, Any]) -> None:
    assert seen["attempts"]["shadow"] == {"reducer": "mean", "times": 0}


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("bad option", "strategy.reducer.time", ["did you mean 'times'"]),
        ("not additive", "strategy.codec", ["sparse", "mean", "additive"]),
        ("no options", "strategy.rule", ["good_parts.Bare", "Options"]),
        ("no such name", "strategy.schedule.kind", ["good-parts 1.2", "MISSING"]),
        ("fails to import", "strategy.optimizer.kind", ["broken-parts 1.2", "RuntimeError: needs a newer torch"]),
        ("not a class", "strategy.optimizer.kind", ["other-parts 1.2", "no class"]),
        ("not a composition", "strategy.kind", ["good-parts 1.2", "no Composition"]),
        ("brought twice", "strategy.codec.kind", ["broken-parts 1.2 and other-parts 1.2", "remove one"]),
        ("lacks a member", "strategy.reducer.kind", ["good_parts.Unfinished", "lacks needs, fewest_updates"]),
        ("raises", "strategy.reducer.kind", ["good_parts.Raises", "RuntimeError: no licence here"]),
        ("near", "strategy.reducer.kind", ["did you mean 'tripled'"]),
    ],
)
def test_what_cannot_be_used_is_named(seen: dict[str, Any], name: str, key: str, words: list[str]) -> None:
    attempt = seen["attempts"][name]
    assert attempt["key"] == key
    assert all(word in attempt["error"] for word in words), attempt["error"]


def test_a_broken_plugin_is_listed_and_stops_no_other(seen: dict[str, Any]) -> None:
    listed = {(part, kind, source): failure for part, kind, source, failure in seen["kinds"]}
    assert listed[("optimizer", "broken", "broken-parts 1.2")] == "RuntimeError: needs a newer torch"
    assert listed[("reducer", "tripled", "good-parts 1.2")] == ""
    assert listed[("strategy", "fedthrice", "good-parts 1.2")] == ""
    assert "built-in" in listed[("reducer", "mean", "good-parts 1.2")]
    assert "no class" in listed[("optimizer", "number", "other-parts 1.2")]
    assert "no Composition" in listed[("strategy", "wrong", "good-parts 1.2")]
