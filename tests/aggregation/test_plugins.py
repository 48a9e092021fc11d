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
from collections.abc import Callable

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


class Opaque(Tripled):
    """Options that have no schema."""

    class Options(Strict):
        call: Callable[[int], int]


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

WORKING = '''
import torch
from pydantic import Field
from atoll.aggregation.codecs.casts import BFLOAT16
from atoll.aggregation.schedules.rounds import Rounds
from atoll.aggregation.server_optimizers import initial_state
from atoll.wire.job import Strict


class Clipped:
    """The local step, shortened to a length; as docs/strategies.md has it."""

    class Options(Strict):
        most: float = Field(gt=0)

    def __init__(self, options):
        self.name, self.most = "clipped", options.most

    def begin(self, model):
        pass

    def before_step(self, model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.most)

    def after_step(self, model):
        pass

    def end(self, model):
        pass


class Once:
    """One synchronous round, whatever the job says."""

    class Options(Strict):
        min: int = 1

    def __init__(self, options):
        self._rounds = Rounds(Rounds.Options(min=options.min))
        self.min_sites = self.fewest_updates = options.min

    def init(self, *, num_rounds, seed):
        return self._rounds.init(num_rounds=1, seed=seed)

    def on(self, state, event):
        return self._rounds.on(state, event)


class Signs:
    """Every parameter moves by the same step, in the direction of the difference."""

    class Options(Strict):
        lr: float = 0.5

    def __init__(self, options):
        self.name, self.lr = "signs", options.lr

    def precision(self, *, wide):
        return torch.float64 if wide else torch.float32

    def init(self, layout):
        return initial_state(self, layout)

    def step(self, parameters_P, difference_P, state, num_steps):
        parameters_P.add_(difference_P.sign(), alpha=self.lr)
        return {}


class Halves:
    """Two bytes a value."""

    class Options(Strict):
        pass

    def __init__(self, options):
        self.name, self.additive = "halves", True

    def encoding(self, dtype):
        return BFLOAT16
'''

ENTRY_POINTS = """
[atoll.reducers]
tripled = good_parts:Tripled
mean = good_parts:Tripled
unfinished = good_parts:Unfinished
raises = good_parts:Raises
opaque = good_parts:Opaque

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

LEAVING_POINTS = "[atoll.optimizers]\nleaving = leaving_parts:Anything\n[atoll.strategies]\ngone = leaving_parts:one\n"

WORKING_POINTS = """
[atoll.rules]
clipped = working_parts:Clipped

[atoll.schedules]
once = working_parts:Once

[atoll.optimizers]
signs = working_parts:Signs

[atoll.codecs]
halves = working_parts:Halves
"""

WHOLE = {
    "rule": {"kind": "clipped", "most": 1.0},
    "schedule": {"kind": "once", "min": 2},
    "optimizer": {"kind": "signs", "lr": 0.25},
    "codec": {"kind": "halves"},
}

USE = """
import json, sys
import torch
from atoll.aggregation.encode import encode_update
from atoll.aggregation.layout import update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.round_sum import RoundSum
from atoll.aggregation.rounding import Rounding
from atoll.aggregation.schedule import Accepted, Committed, Joined, Ready
from atoll.aggregation.strategy import resolve
from atoll.wire.job import parse_job
from atoll.wire.tensors import manifest_of, views, write_state

found = resolve(parse_job({"job": {"name": "x", "app": "x", "rounds": 7}, "strategy": json.loads(sys.argv[1])}))
model = torch.nn.Linear(3, 1)
torch.nn.init.zeros_(model.weight)
torch.nn.init.zeros_(model.bias)
manifest = manifest_of(model)
layout = update_layout(manifest, found.codec, found.buffers)
base = {name: tensor.clone() for name, tensor in model.state_dict().items()}

state, actions = found.schedule.init(num_rounds=7, seed=0), []
def tell(event):
    global state
    state, wanted = found.schedule.on(state, event)
    actions.extend(type(action).__name__ for action in wanted if type(action).__name__ != "SetTimer")

for site in ("a", "b"):
    tell(Joined(site=site, max_weight=1, labels={}))
tell(Ready())
total = RoundSum(layout, num_sites=2, max_weight=1, bound=found.bound)
for site in ("a", "b"):
    model.load_state_dict(base)
    model.zero_grad()
    found.rule.begin(model)
    model(torch.tensor([[300.0, -400.0, 0.0]])).sum().backward()
    found.rule.before_step(model)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    found.rule.end(model)
    update = bytearray(layout.num_bytes)
    encode_update(layout, base, model.state_dict(), update, rounding=Rounding(bytes(32)), bound=found.bound)
    total.fold(site, update, 1)
    tell(Accepted(site=site, round=1, base_version=0, weight=1))
old, new = bytearray(manifest.num_bytes), bytearray(manifest.num_bytes)
write_state(manifest, base, old)
before = found.optimizer.init(layout)
after = next_model(total, optimizer=found.optimizer, state=before, base=old, out=new, manifest=manifest)
tell(Committed(round=1, version=1))
moved = views(manifest, new, writable=False)
print(json.dumps({
    "names": [found.rule.name, type(found.schedule).__name__, found.optimizer.name, found.codec.name],
    "norm": norm,
    "bytes a value": [entry.num_bytes / entry.num_values for entry in layout.means],
    "actions": actions,
    "weight": moved["weight"].tolist(),
    "optimizer": [after.optimizer, after.num_steps],
}))
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
    install(site, "leaving-parts", "leaving_parts", "raise SystemExit('no display')\n", LEAVING_POINTS)
    other = "[atoll.optimizers]\nnumber = other_parts:NUMBER\n[atoll.codecs]\ntwice = other_parts:A\n"
    install(site, "other-parts", "other_parts", "NUMBER = 7\n", other)
    return printed(site, SCRIPT, JOBS)


def printed(site: Path, script: str, argument: object) -> dict[str, Any]:
    """What a script prints in a process that has the distributions in `site` on its path."""
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(argument)],
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


def test_plugins_of_every_part_do_a_round_together(tmp_path: Path) -> None:
    install(tmp_path, "working-parts", "working_parts", WORKING, WORKING_POINTS)
    used = printed(tmp_path, USE, WHOLE)
    assert used["names"] == ["clipped", "Once", "signs", "halves"]
    assert used["norm"] == pytest.approx(1.0, rel=1e-4)  # of a gradient of length 500
    assert used["bytes a value"] == [2.0, 2.0]
    assert used["actions"] == ["Dispatch", "Close", "Stop"]
    assert used["weight"] == [[-0.25, 0.25, 0.0]]
    assert used["optimizer"] == ["signs", 1]


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
    assert listed[("optimizer", "leaving", "leaving-parts 1.2")] == "SystemExit: no display"
    assert listed[("strategy", "gone", "leaving-parts 1.2")] == "SystemExit: no display"
    assert listed[("reducer", "opaque", "good-parts 1.2")]  # its options cannot be described
    assert listed[("reducer", "tripled", "good-parts 1.2")] == ""
    assert listed[("strategy", "fedthrice", "good-parts 1.2")] == ""
    assert "built-in" in listed[("reducer", "mean", "good-parts 1.2")]
    assert "no class" in listed[("optimizer", "number", "other-parts 1.2")]
    assert "no Composition" in listed[("strategy", "wrong", "good-parts 1.2")]
