"""Every cell of the table of combinations, judged at the sites or at the server, runs here or is refused with a reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contracts.updates import BOUND, SMALL, encoded, random_state
from torch import nn

from atoll.aggregation import combinations, parts
from atoll.aggregation.codecs.casts import Native
from atoll.aggregation.combinations import Combined, refusal
from atoll.aggregation.layout import update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.parts import build
from atoll.aggregation.reducers.coordinates import Median
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.schedule import GossipEvent, Met, Trained
from atoll.aggregation.schedules.gossip import Gossip
from atoll.aggregation.strategy import (
    Accepted,
    Close,
    Dispatch,
    Event,
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

REQUIRED: dict[tuple[str, str], dict[str, Any]] = {
    ("rule", "fedprox"): {"mu": 0.1},
    ("schedule", "rounds"): {"min": 3},
    ("schedule", "buffered"): {"min": 3, "k": 3},
    ("schedule", "gossip"): {"min": 3, "zone": "reef"},
    ("reducer", "norm_bound"): {"norm": 5.0},
    ("reducer", "krum"): {"faulty": 0},
    ("reducer", "multi_krum"): {"faulty": 0},
    ("reducer", "bulyan"): {"faulty": 0},
    ("reducer", "centered_clipping"): {"radius": 5.0},
    ("reducer", "bucketing"): {"inner": {"kind": "median"}},
    ("reducer", "fltrust"): {"trusted": "b"},
    ("reducer", "qfedavg"): {"lr": 0.1},
}
SITES = ("a", "b", "c")
MODEL = [entry for entry in SMALL if entry[0] != "head.weight"]
BUFFERS = ("mean", "local", "first")
EVALUATED = {"at-sites": False, "at-server": True}
PARTS = tuple(parts.BUILT_IN)


def cells() -> Iterator[tuple[str, ...]]:
    """Every schedule with every codec, reducer, policy of buffers and place of evaluation.

    Rules and optimizers see no update of another site: each takes its turn.
    """
    free = {part: itertools.cycle(parts.BUILT_IN[part]) for part in ("rule", "optimizer")}
    fixed = [part for part in PARTS if part not in free]
    for kinds in itertools.product(*(parts.BUILT_IN[part] for part in fixed), BUFFERS, EVALUATED):
        named = dict(zip(fixed, kinds, strict=False))
        if named["schedule"] == "gossip":  # whose versions no optimizer moves: see REASONS
            named["optimizer"] = "sgd"
        yield (*(named[part] if part in named else next(free[part]) for part in PARTS), *kinds[-2:])


CELLS = list(cells())


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


def expected_refusal(cell: tuple[str, ...]) -> str | None:
    schedule, reducer, (buffers, evaluated) = cell[PARTS.index("schedule")], cell[PARTS.index("reducer")], cell[-2:]
    if schedule == "buffered" and reducer not in ("mean", "norm_bound"):
        return "which no discount makes comparable"
    if (buffers, evaluated) == ("local", "at-server"):
        return "the server would judge a model that no site uses"
    if schedule == "gossip" and reducer != "mean":
        return "which have mixed without a reducer"
    if (schedule, buffers) == ("gossip", "local"):
        return "local buffers would leave with them"
    return None


def test_every_kind_has_a_cell_that_runs() -> None:
    runs = [cell for cell in CELLS if expected_refusal(cell) is None]
    for place, part in enumerate(PARTS):
        assert {cell[place] for cell in runs} == set(parts.BUILT_IN[part])


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_cell_runs_a_round_or_is_refused(cell: tuple[str, ...]) -> None:
    if (reason := expected_refusal(cell)) is not None:
        with pytest.raises(ConfigError, match=reason):
            resolve(job(cell))
        return
    strategy = resolve(job(cell))
    if cell[-1] == "at-server":  # where a version is judged changes no byte of it: the cell beside this one runs
        return
    one, other = one_round(strategy), one_round(resolve(job(cell)))
    assert one == other
    assert len(one) == Manifest.build(MODEL).num_bytes


def one_round(strategy: Strategy) -> bytes:
    """The bytes of version 1, by the way that a server and its sites go."""
    manifest = Manifest.build(MODEL)
    base, data = random_state(manifest, 0), bytearray(manifest.num_bytes)
    write_state(manifest, base, data)
    state = strategy.schedule.init(num_rounds=1, seed=0)
    for site in SITES:
        state, _ = strategy.schedule.on(state, Joined(site=site, max_weight=3, labels={"zone": "reef"}))
    state, dispatch = dispatched(strategy, state)
    layout = update_layout(manifest, strategy.codec, strategy.buffers)
    terms = RoundTerms(num_sites=len(dispatch.sites), max_weight=dispatch.max_weight, bound=strategy.bound)
    total = strategy.reducer.init(layout, terms)
    actions: Any = ()
    for seed, site in enumerate(dispatch.sites, start=1):
        use(strategy)
        payload = encoded(layout, base, random_state(manifest, seed), site=site, bound=BOUND)
        weight = min(seed, dispatch.max_weight)
        total.check(payload, weight, metrics={"loss": (1.0 * seed, 1.0)})
        state, actions = strategy.schedule.on(state, Accepted(site=site, round=1, base_version=0, weight=weight))
        total.fold(site, payload, weight, {"loss": (1.0 * seed, 1.0)})
    assert any(isinstance(action, Close) for action in actions)
    out = bytearray(manifest.num_bytes)
    before = strategy.optimizer.init(layout)
    next_model(total, optimizer=strategy.optimizer, state=before, base=data, out=out, manifest=manifest)
    assert all(torch.isfinite(t.float()).all() for t in views(manifest, out, writable=False).values())
    return bytes(out)


def dispatched(strategy: Strategy, state: Any) -> tuple[Any, Dispatch]:
    """The state in which updates are awaited; of gossip, when all have trained and met."""
    state, actions = strategy.schedule.on(state, Ready())
    if isinstance(strategy.schedule, Gossip):
        events: list[Event | GossipEvent] = [Trained(site=site, round=1) for site in SITES]
        events += [Met(site=site, peer=peer, round=1, received=True) for site, peer in itertools.permutations(SITES, 2)]
        for event in events:
            state, actions = strategy.schedule.on(state, event)
    return state, next(action for action in actions if isinstance(action, Dispatch))


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
        "schedule": build("schedule", "rounds", {}),
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


def test_a_refused_region_is_named() -> None:
    require_regions_allowed(job(cell_with()), ["north"])
    require_regions_allowed(job(cell_with(reducer="median")), [])
    with pytest.raises(ConfigError, match=r"strategy\.reducer = 'median' with regions = 'north, south': .*each update"):
        require_regions_allowed(job(cell_with(reducer="median")), ["north", "south"])


BUFFERED = build("schedule", "buffered", {"k": 1})
GOSSIP = build("schedule", "gossip", {"zone": "reef"})
REASONS = [
    (
        ("strategy.schedule", "strategy.reducer"),
        combined(reducer=build("reducer", "krum", {"faulty": 1})),
        "with so few updates this reducer promises nothing; raise min and quorum",
    ),
    (
        ("strategy.schedule", "strategy.reducer"),
        combined(schedule=BUFFERED, reducer=MEDIAN),
        "compares updates, which no discount makes comparable; take the reducer mean or norm_bound",
    ),
    (
        ("strategy.schedule", "strategy.reducer"),
        combined(
            schedule=build("schedule", "rounds", {"fraction": 0.5}),
            reducer=build("reducer", "fltrust", {"trusted": "a"}),
        ),
        "the trusted site has to be in every round, and this schedule draws some of the sites; set fraction = 1",
    ),
    (
        ("strategy.codec", "strategy.reducer"),
        combined(codec=Sparse()),
        "sums of this codec's values mean nothing; take an additive codec",
    ),
    (
        ("strategy.buffers", "evaluation.server"),
        combined(buffers="local", server_evaluation=True),
        "the server would judge a model that no site uses; set evaluation.server = false, or buffers = mean",
    ),
    (
        ("strategy.local", "evaluation.server"),
        combined(local=("head.*",), server_evaluation=True),
        "the server would judge a model that no site uses; set evaluation.server = false",
    ),
    (
        ("strategy.reducer", "regions"),
        combined(reducer=MEDIAN, regions=True),
        "this reducer needs each update by itself; take the reducer mean, or name sites of this federation alone",
    ),
    (
        ("strategy.schedule", "regions"),
        combined(schedule=BUFFERED, regions=True),
        "its sites cannot be of several rounds; take the schedule rounds",
    ),
    (
        ("strategy.download", "regions"),
        combined(download=build("codec", "int8", {}), regions=True),
        "a region hands versions on to its sites as it gets them, in full; remove download",
    ),
    (
        ("strategy.schedule", "strategy.reducer"),
        combined(schedule=GOSSIP, reducer=build("reducer", "norm_bound", {"norm": 1.0})),
        "which have mixed without a reducer; take the reducer mean",
    ),
    (
        ("strategy.schedule", "strategy.optimizer"),
        combined(schedule=GOSSIP, optimizer=build("optimizer", "sgd", {"lr": 0.5})),
        "would move a model that no site has; take sgd with lr = 1 and no momentum",
    ),
    (
        ("strategy.schedule", "strategy.buffers"),
        combined(schedule=GOSSIP, buffers="local"),
        "local buffers would leave with them; take mean or first",
    ),
    (
        ("strategy.schedule", "strategy.local"),
        combined(schedule=GOSSIP, local=("head.*",)),
        "what is to stay would leave with them; remove local",
    ),
    (
        ("strategy.schedule", "strategy.download"),
        combined(schedule=GOSSIP, download=build("codec", "int8", {})),
        "less what the codec left out of the version before; remove download",
    ),
    (
        ("strategy.schedule", "regions"),
        combined(schedule=GOSSIP, regions=True),
        "a region has no model of its own that it could mix; name sites of this federation alone",
    ),
]


def test_each_refusal_is_of_two_keys_and_says_why_and_what_to_do() -> None:
    assert [found.keys for found in combinations.REFUSALS] == [keys for keys, _, _ in REASONS]
    for keys, case, words in REASONS:
        found = refusal(case)
        assert found is not None
        assert found.keys == keys
        assert words in found.reason


def test_a_reducer_that_needs_more_than_a_round_may_have_is_refused_with_both_numbers() -> None:
    table = {"schedule": {"kind": "rounds", "min": 8, "quorum": 6}, "reducer": {"kind": "krum", "faulty": 2}}
    job_ = {"job": {"name": "x", "app": "x", "rounds": 1}}
    with pytest.raises(ConfigError, match=r"'rounds of at least 6 updates' with .* 'krum of at least 7 updates'"):
        resolve(parse_job({**job_, "strategy": table}))
    resolve(parse_job({**job_, "strategy": {**table, "schedule": {"kind": "rounds", "min": 8, "quorum": 7}}}))


def test_a_trusted_site_has_to_be_among_those_of_the_job() -> None:
    job_ = {"name": "x", "app": "x", "rounds": 1, "sites": ["a", "b"]}
    table = {"job": job_, "strategy": {"reducer": {"kind": "fltrust", "trusted": "c"}}}
    with pytest.raises(ConfigError, match=r"strategy\.reducer\.trusted = 'c' is not one of job\.sites: a, b"):
        resolve(parse_job(table))
    resolve(parse_job({**table, "job": {**job_, "sites": ["a", "b", "c"]}}))
