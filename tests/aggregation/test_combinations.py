"""Every cell of the table of combinations, judged at the sites or at the server, runs here or is refused with a reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from contracts.updates import BOUND, SMALL, encoded, random_state
from samples.median import Median
from torch import nn

from atoll.aggregation import combinations, parts
from atoll.aggregation.codecs.casts import Native
from atoll.aggregation.combinations import Combined, refusal
from atoll.aggregation.layout import update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.parts import build
from atoll.aggregation.strategy import (
    Accepted,
    Close,
    Dispatch,
    Joined,
    Ready,
    Strategy,
    require_regions_allowed,
    resolve,
)
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import views, write_state

REQUIRED: dict[tuple[str, str], dict[str, Any]] = {("rule", "fedprox"): {"mu": 0.1}}
MODEL = [entry for entry in SMALL if entry[0] != "head.weight"]
BUFFERS = ("mean", "local", "first")
EVALUATED = {"at-sites": False, "at-server": True}
CELLS = list(itertools.product(*(parts.BUILT_IN[part] for part in parts.BUILT_IN), BUFFERS, EVALUATED))


def cell_with(**changes: str) -> tuple[str, ...]:
    """The first cell of the table, but for these."""
    names = [*parts.BUILT_IN, "buffers", "evaluated"]
    assert changes.keys() <= set(names)
    return tuple(changes.get(name, kind) for name, kind in zip(names, CELLS[0], strict=True))


def job(cell: tuple[str, ...]) -> Job:
    names = zip(parts.BUILT_IN, cell, strict=False)
    strategy = {part: {"kind": kind, **REQUIRED.get((part, kind), {})} for part, kind in names}
    return parse_job(
        {
            "job": {"name": "cell", "app": "cell", "rounds": 1},
            "strategy": {**strategy, "buffers": cell[-2]},
            "evaluation": {"server": EVALUATED[cell[-1]]},
        }
    )


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_cell_runs_a_round_or_is_refused(cell: tuple[str, ...]) -> None:
    *_, buffers, evaluated = cell
    if (buffers, evaluated) == ("local", "at-server"):
        with pytest.raises(ConfigError, match="the server would judge a model that no site uses"):
            resolve(job(cell))
        return
    one, other = one_round(resolve(job(cell))), one_round(resolve(job(cell)))
    assert one == other
    assert len(one) == Manifest.build(MODEL).num_bytes


def one_round(strategy: Strategy) -> bytes:
    """The bytes of version 1, by the way that a server and two sites go."""
    manifest = Manifest.build(MODEL)
    base, data = random_state(manifest, 0), bytearray(manifest.num_bytes)
    write_state(manifest, base, data)
    state = strategy.schedule.init(num_rounds=1, seed=0)
    for site in ("a", "b"):
        state, _ = strategy.schedule.on(state, Joined(site=site, max_weight=3, labels={}))
    state, (dispatch, _) = strategy.schedule.on(state, Ready())
    assert isinstance(dispatch, Dispatch)
    layout = update_layout(manifest, strategy.codec, strategy.buffers)
    total = strategy.reducer.init(
        layout, num_sites=len(dispatch.sites), max_weight=dispatch.max_weight, bound=strategy.bound
    )
    actions: Any = ()
    for seed, site in enumerate(dispatch.sites, start=1):
        use(strategy)
        payload = encoded(layout, base, random_state(manifest, seed), site=site, bound=BOUND)
        total.check(payload, seed)
        state, actions = strategy.schedule.on(state, Accepted(site=site, round=1, base_version=0, weight=seed))
        total.fold(site, payload, seed)
    assert isinstance(actions[-1], Close)
    out = bytearray(manifest.num_bytes)
    before = strategy.optimizer.init(manifest)
    next_model(total, optimizer=strategy.optimizer, state=before, base=data, out=out, manifest=manifest)
    assert all(torch.isfinite(t.float()).all() for t in views(manifest, out, writable=False).values())
    return bytes(out)


def use(strategy: Strategy) -> None:
    model = nn.Linear(2, 2)
    strategy.rule.begin(model)
    model(torch.ones(1, 2)).sum().backward()
    strategy.rule.before_step(model)
    strategy.rule.after_step(model)
    strategy.rule.end(model)


class Sparse(Native):
    """A codec whose values cannot be summed."""

    def __init__(self) -> None:
        super().__init__(Native.Options())
        self.additive = False


MEDIAN = Median(Median.Options())


def combined(**changes: Any) -> Combined:
    parts_: dict[str, Any] = {
        "codec": build("codec", "native", {}),
        "reducer": build("reducer", "mean", {}),
        "buffers": "mean",
        "server_evaluation": False,
    }
    return Combined(**{**parts_, **changes})


def test_a_codec_that_cannot_be_summed_needs_another_reducer() -> None:
    found = refusal(combined(codec=Sparse()))
    assert found is not None
    assert found.keys == ("strategy.codec", "strategy.reducer")
    with pytest.raises(
        ConfigError, match=r"strategy\.codec = 'sparse' with strategy\.reducer = 'mean': .*additive"
    ) as caught:
        combinations.require_allowed(combined(codec=Sparse()), {"strategy.codec": "sparse", "strategy.reducer": "mean"})
    assert (caught.value.key, caught.value.value) == ("strategy.codec", "sparse")


def test_local_buffers_cannot_be_judged_on_the_server() -> None:
    with pytest.raises(
        ConfigError, match=r"strategy\.buffers = 'local' with evaluation\.server = True: .*local buffers"
    ):
        resolve(job(cell_with(buffers="local", evaluated="at-server")))
    resolve(job(cell_with(buffers="mean", evaluated="at-server")))
    resolve(job(cell_with(buffers="local", evaluated="at-sites")))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"regions": True}, False),
        ({"regions": True, "codec": build("codec", "int8", {})}, False),
        ({"regions": True, "buffers": "first"}, False),
        ({"regions": True, "buffers": "local"}, False),
        ({"reducer": MEDIAN}, False),
        ({"codec": Sparse(), "reducer": MEDIAN}, False),
        ({"regions": True, "reducer": MEDIAN}, True),
    ],
)
def test_regions_need_a_reducer_that_sums(changes: dict[str, Any], refused: bool) -> None:
    found = refusal(combined(**changes))
    assert (found is not None) == refused
    assert found is None or found.keys == ("strategy.reducer", "regions")


def test_a_refused_region_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_regions_allowed(job(CELLS[0]), ["north"])
    monkeypatch.setitem(parts.BUILT_IN["reducer"], "mean", Median)
    require_regions_allowed(job(CELLS[0]), [])
    with pytest.raises(ConfigError, match=r"strategy\.reducer = 'median' with regions = 'north, south': .*each update"):
        require_regions_allowed(job(CELLS[0]), ["north", "south"])


REASONS = {
    ("strategy.codec", "strategy.reducer"): (
        combined(codec=Sparse()),
        "sums of this codec's values mean nothing; take an additive codec",
    ),
    ("strategy.buffers", "evaluation.server"): (
        combined(buffers="local", server_evaluation=True),
        "the server would judge a model that no site uses; set evaluation.server = false, or buffers = mean",
    ),
    ("strategy.reducer", "regions"): (
        combined(reducer=MEDIAN, regions=True),
        "this reducer needs each update by itself; take the reducer mean, or name sites of this federation alone",
    ),
}


def test_each_refusal_is_of_two_keys_and_says_why_and_what_to_do() -> None:
    assert [found.keys for found in combinations.REFUSALS] == [*REASONS]
    for keys, (case, words) in REASONS.items():
        found = refusal(case)
        assert found is not None
        assert found.keys == keys
        assert words in found.reason


def test_a_reducer_that_needs_every_update_runs_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts.BUILT_IN["reducer"], "mean", Median)
    strategies = [resolve(job(cell_with(codec=codec))) for codec in parts.BUILT_IN["codec"]]
    assert {strategy.reducer.name for strategy in strategies} == {"median"}
    for strategy in strategies:
        assert one_round(strategy) == one_round(strategy)
