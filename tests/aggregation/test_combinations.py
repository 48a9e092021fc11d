"""Every cell of the table of combinations, judged at the sites or at the server, runs here or is refused with a reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.reducer_cases import OPAQUE
from contracts.updates import BOUND, SMALL, encoded, random_state
from torch import Tensor, nn

from atoll.aggregation import combinations, parts
from atoll.aggregation.codecs.casts import Native
from atoll.aggregation.combinations import REFUSALS, Combined, refusal
from atoll.aggregation.fragments import Fragments
from atoll.aggregation.lanes import FACTOR_UNIT, run_manifest
from atoll.aggregation.masking import MASKING
from atoll.aggregation.next_model import next_model
from atoll.aggregation.parts import build
from atoll.aggregation.reducers.coordinates import Median
from atoll.aggregation.reducers.reduction import Mergeable, Reduction, RoundTerms
from atoll.aggregation.rules.rule import Watching
from atoll.aggregation.schedule import Branching, GossipEvent, Met, Trained
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
from atoll.aggregation.table import SAMPLES, combinations_table, refused
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import views, write_state

# Rules with a part at the server: that of feddyn is an optimizer, and all of them need a mean of whole updates.
PAIRED = ("scaffold", "feddyn", "fednova")
FED_BACK = ("top_k", "random_k")  # codecs that carry over what an update leaves out, unless the job says otherwise
HALVES = sorted(
    (
        (rule, optimizer)
        for rule, optimizer in itertools.product(parts.BUILT_IN["rule"], parts.BUILT_IN["optimizer"])
        if (rule == "feddyn") == (optimizer == "feddyn")
    ),
    key=lambda half: half[0] not in PAIRED,
)
SEVERAL = {"krum", "multi_krum", "bulyan", "fltrust"}  # reducers that need more than one update
SITES = {"a": "north", "b": "north", "c": "north", "d": "south", "e": "south", "f": "south"}  # region
MODEL = [entry for entry in SMALL if entry[0] != "head.weight"]
BUFFERS = ("mean", "local", "first")
EVALUATED = {"at-sites": False, "at-server": True}
PLACES = list(itertools.product(BUFFERS, EVALUATED))
PARTS = tuple(parts.BUILT_IN)
# A reducer of opaque payloads goes with no other part: tests/aggregation/reducers/test_append.py has its cells.
KINDS = {part: [kind for kind in kinds if kind not in OPAQUE] for part, kinds in parts.BUILT_IN.items()}


def cells() -> Iterator[tuple[str, ...]]:
    """Every schedule with every reducer and codec; with `rounds` every policy of buffers and place of evaluation too.

    With the other schedules policies take turns, and sites judge. Rules, optimizers and personal models see no update of
    another site: each takes its turn where it may.
    """
    every = itertools.cycle(HALVES)
    plain = itertools.cycle([(rule, optimizer) for rule, optimizer in HALVES if rule not in PAIRED])
    personal, others = itertools.cycle(KINDS["personal"]), itertools.cycle((buffers, "at-sites") for buffers in BUFFERS)
    for schedule, reducer, codec in itertools.product(KINDS["schedule"], KINDS["reducer"], KINDS["codec"]):
        each = schedule == "rounds" or (schedule, reducer) == ("gossip", "mean")
        for buffers, evaluated in PLACES if each else [next(others)]:
            whole = (schedule, reducer) == ("rounds", "mean") and codec not in FED_BACK
            rule, optimizer = next(every if whole else plain)
            named = {"schedule": schedule, "reducer": reducer, "codec": codec, "rule": rule, "optimizer": optimizer}
            named["personal"] = next(personal)
            if schedule == "gossip":  # whose versions no optimizer moves, and no site begins with: see REASONS
                named |= {"optimizer": "sgd", "personal": "none"}
            yield (*(named[part] for part in PARTS), buffers, evaluated)


CELLS = list(cells())


def cell_with(**changes: str) -> tuple[str, ...]:
    """The first cell of the table whose rule has no part at the server, but for these."""
    names = [*parts.BUILT_IN, "buffers", "evaluated"]
    assert changes.keys() <= set(names)
    plain = next(cell for cell in CELLS if cell[PARTS.index("rule")] == "none")
    return tuple(changes.get(name, kind) for name, kind in zip(names, plain, strict=True))


def job(cell: tuple[str, ...]) -> Job:
    names = zip(parts.BUILT_IN, cell, strict=False)
    strategy = {part: {"kind": kind, **SAMPLES.get((part, kind), {})} for part, kind in names}
    schedule = strategy["schedule"]
    if (schedule.get("fragments") or schedule["kind"] == "gossip") and strategy["codec"]["kind"] in FED_BACK:
        strategy["codec"]["error_feedback"] = False
    return parse_job(
        {
            "job": {"name": "cell", "app": "cell", "rounds": 1},
            "strategy": {**strategy, "buffers": cell[-2]},
            "evaluation": {"server": EVALUATED[cell[-1]]},
        }
    )


def expected_refusal(cell: tuple[str, ...]) -> str | None:
    schedule, reducer, (buffers, evaluated) = cell[PARTS.index("schedule")], cell[PARTS.index("reducer")], cell[-2:]
    if schedule == "cyclic" and reducer in SEVERAL:
        return "with so few updates this reducer promises nothing"
    if schedule == "buffered" and reducer not in ("mean", "norm_bound"):
        return "which no discount makes comparable"
    if schedule == "hierarchical" and reducer == "fltrust":
        return "the trusted site has to be in every round"
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
        assert {cell[place] for cell in runs} == set(KINDS[part])
    for schedule in KINDS["schedule"]:
        codecs = {cell[PARTS.index("codec")] for cell in runs if cell[PARTS.index("schedule")] == schedule}
        assert codecs == set(KINDS["codec"])


def test_every_schedule_meets_every_reducer_and_codec() -> None:
    met = {tuple(cell[PARTS.index(part)] for part in ("schedule", "reducer", "codec")) for cell in CELLS}
    assert met == set(itertools.product(KINDS["schedule"], KINDS["reducer"], KINDS["codec"]))


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
    num_versions = 2 if isinstance(strategy.schedule, Branching) else 1
    assert len(one) == num_versions * run_manifest(Manifest.build(MODEL), strategy.lanes).num_bytes


def one_round(strategy: Strategy, num_regions: int = 0) -> bytes:
    """The bytes of version 1, by the way that a server and its sites go; or as many regions with the same sites."""
    manifest = run_manifest(Manifest.build(MODEL), strategy.lanes)
    base, data = random_state(manifest, 0), bytearray(manifest.num_bytes)
    write_state(manifest, base, data)
    state = strategy.schedule.init(num_rounds=1, seed=0)
    grouped = isinstance(strategy.schedule, Branching)
    for site, region in SITES.items():
        if grouped or region == "north":
            joined = Joined(site=site, max_weight=6, labels={"region": region, "zone": "reef"})
            state, _ = strategy.schedule.on(state, joined)
    state, dispatches = dispatched(strategy, state)
    assert [dispatch.branch for dispatch in dispatches] == ([0, 1] if grouped else [None])
    fragments = strategy.fragments(manifest)
    layout = fragments.of_round(1).layout
    terms = RoundTerms(num_sites=len(dispatches[0].sites), max_weight=dispatches[0].max_weight, bound=strategy.bound)
    totals: list[Any] = [strategy.reducer.init(layout, terms) for _ in dispatches]
    regions = [strategy.reducer.init(layout, terms) for _ in range(num_regions)]
    actions: Any = ()
    asked = [(total, site) for total, some in zip(totals, dispatches, strict=True) for site in some.sites]
    for seed, (total, site) in enumerate(asked, start=1):
        use(strategy)
        payload = encoded(layout, base, trained(strategy, manifest, base, seed), site=site, bound=BOUND)
        weight = min(seed, terms.max_weight)
        total.check(payload, weight, metrics={"loss": (1.0 * seed, 1.0)})
        state, actions = strategy.schedule.on(state, Accepted(site=site, round=1, base_version=0, weight=weight))
        held = regions[seed % num_regions] if num_regions else total
        held.fold(site, payload, weight, {"loss": (1.0 * seed, 1.0)})
    assert any(isinstance(action, Close) for action in actions)
    for number, below in enumerate(regions):
        assert isinstance(below, Mergeable)
        partial = bytearray(below.partial_bytes)
        below.write_partial(partial)
        totals[0].check_partial(partial, below.sum_weights, num_sites=below.num_updates)
        totals[0].merge_partial(f"region-{number}", partial)
    return b"".join(version_of(total, strategy, fragments, data) for total in totals)


IN_REGIONS = [
    pytest.param(*cell, id="-".join(cell))
    for cell in itertools.product(("rounds", "every_steps"), ("mean", "norm_bound"), KINDS["codec"])
]


@pytest.mark.parametrize(("schedule", "reducer", "codec"), IN_REGIONS)
def test_every_cell_with_regions_makes_the_version_of_a_flat_federation(
    schedule: str, reducer: str, codec: str
) -> None:
    table = job(cell_with(schedule=schedule, reducer=reducer, codec=codec)).model_dump(mode="json", exclude_none=True)
    if codec in FED_BACK:
        table["strategy"]["codec"]["error_feedback"] = False
    if schedule == "every_steps":
        table["strategy"]["schedule"]["fragments"] = 1
    whole = parse_job(table)
    require_regions_allowed(whole, ["north"])
    assert one_round(resolve(whole), num_regions=2) == one_round(resolve(whole))


def test_every_other_cell_with_regions_is_refused_with_its_reason() -> None:
    """The reason is the one that the page prints; who asks for it here is what a server asks."""
    allowed = set()
    for schedule, reducer, codec in itertools.product(KINDS["schedule"], KINDS["reducer"], KINDS["codec"]):
        cell = cell_with(schedule=schedule, reducer=reducer, codec=codec, optimizer="sgd", personal="none")
        if expected_refusal(cell) is not None:
            continue
        asked, strategy = job(cell), resolve(job(cell))
        number = refused(schedule=strategy.schedule, reducer=strategy.reducer, codec=strategy.codec, regions=True)
        if number is None:
            require_regions_allowed(asked, ["north"])
            allowed.add((schedule, reducer))
            continue
        with pytest.raises(ConfigError) as caught:
            require_regions_allowed(asked, ["north"])
        assert REFUSALS[number - 1].reason in str(caught.value)
    assert allowed == {("rounds", "mean"), ("rounds", "norm_bound")}  # every_steps is here with fragments


def test_the_page_has_the_table_that_the_code_makes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    shown = page.partition("<!-- scripts/combinations -->\n")[2].partition("\n<!-- end of combinations -->")[0]
    assert shown == combinations_table(), "run scripts/combinations"


def version_of(total: Reduction, strategy: Strategy, fragments: Fragments, data: bytearray) -> bytes:
    """The bytes of the version that a round's updates make; of one group, where there are groups."""
    manifest, out = fragments.manifest, bytearray(len(data))
    next_model(
        total,
        optimizer=strategy.optimizer,
        state=fragments.state_of(1, strategy.optimizer.init(fragments.whole), strategy.optimizer),
        base=data,
        out=out,
        manifest=manifest,
        lanes=strategy.lanes,
    )
    assert all(torch.isfinite(t.float()).all() for t in views(manifest, out, writable=False).values())
    return bytes(out)


def trained(strategy: Strategy, manifest: Manifest, base: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Random tensors, but for factors: those of `seed` steps."""
    factors = [lane.name for lane in strategy.lanes if lane.kind == "factor"]
    return random_state(manifest, seed) | {name: base[name] + seed * FACTOR_UNIT for name in factors}


def dispatched(strategy: Strategy, state: Any) -> tuple[Any, list[Dispatch]]:
    """The state in which updates are awaited; of gossip, when all have trained and met."""
    state, actions = strategy.schedule.on(state, Ready())
    if isinstance(strategy.schedule, Gossip):
        north = [site for site, region in SITES.items() if region == "north"]
        events: list[Event | GossipEvent] = [Trained(site=site, round=1) for site in north]
        events += [Met(site=site, peer=peer, round=1, received=True) for site, peer in itertools.permutations(north, 2)]
        for event in events:
            state, actions = strategy.schedule.on(state, event)
    return state, [action for action in actions if isinstance(action, Dispatch)]


def use(strategy: Strategy) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if isinstance(strategy.rule, Watching):
        strategy.rule.watch(optimizer)
    strategy.rule.begin(model)
    model(torch.ones(1, 2)).sum().backward()
    strategy.rule.before_step(model)
    optimizer.step()
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
    require_regions_allowed(job(cell_with(codec="native")), ["north"])
    median = job(cell_with(codec="native", reducer="median"))
    require_regions_allowed(median, [])
    with pytest.raises(ConfigError, match=r"strategy\.reducer = 'median' with regions = 'north, south': .*each update"):
        require_regions_allowed(median, ["north", "south"])


DIFFERENCE = {
    "codec": build("codec", "top_k", {"difference": True}),
    "optimizer": build("optimizer", "sgd", {"momentum": 1}),
    "num_named": 2,
}
FRAGMENTED = build("schedule", "every_steps", {"steps": 4, "fragments": 2})
GROUPED = build("schedule", "hierarchical", {"label": "region", "groups": ["north", "south"], "rounds": 1})
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
        combined(schedule=GROUPED, reducer=build("reducer", "append", {})),
        "payloads are appended once a round, for all sites; take the schedule rounds",
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
        ("strategy.codec", "strategy.reducer"),
        combined(**DIFFERENCE | {"reducer": MEDIAN}),
        "the mean of what they mean only under the reducer mean; take that, or error_feedback",
    ),
    (
        ("strategy.codec", "strategy.schedule"),
        combined(**DIFFERENCE | {"num_named": 3}),
        "it must have all of them in every round; name the sites in job.sites, set min to their number",
    ),
    (
        ("strategy.codec", "strategy.optimizer"),
        combined(**DIFFERENCE | {"optimizer": build("optimizer", "adam", {})}),
        'take optimizer = { kind = "sgd", momentum = 1 } with it, and a momentum below 1 without it',
    ),
    (
        ("strategy.codec", "regions"),
        combined(codec=build("codec", "int4", {"error_feedback": True}), regions=True),
        "does not learn whether the region's sum counted; set error_feedback = false",
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
        ("strategy.schedule", "strategy.download"),
        combined(schedule=FRAGMENTED, download=build("codec", "int8", {})),
        "a codec of downloads writes versions whole; remove download, or set fragments = 1",
    ),
    (
        ("strategy.schedule", "regions"),
        combined(schedule=FRAGMENTED, regions=True),
        "its sums are of the whole model; set fragments = 1",
    ),
    (
        ("strategy.schedule", "regions"),
        combined(schedule=GROUPED, regions=True),
        "a region is a group already, and hands one version on to all of its sites; take the schedule rounds",
    ),
    (
        ("strategy.schedule", "regions"),
        combined(schedule=build("schedule", "cyclic", {}), regions=True),
        "a turn is that of one site, and a region sends the sum of several; take the schedule rounds",
    ),
    (
        ("strategy.download", "regions"),
        combined(download=build("codec", "int8", {}), regions=True),
        "a region hands versions on to its sites as it gets them, in full; remove download",
    ),
    (
        ("strategy.schedule", "strategy.rule"),
        combined(schedule=GROUPED, rule=build("rule", "scaffold", {})),
        "one mean over all sites, and here a version is of some of them: of a group, or of one site",
    ),
    (
        ("strategy.schedule", "strategy.rule"),
        combined(schedule=FRAGMENTED, rule=build("rule", "scaffold", {})),
        "here a site trains its own model on; set fragments = 1 and alpha = 1, or take the rule none",
    ),
    (
        ("strategy.schedule", "strategy.rule"),
        combined(schedule=build("schedule", "every_steps", {"steps": 4}), rule=build("rule", "fednova", {})),
        "begins every round with a fresh optimizer, and here its state goes on; take the schedule rounds",
    ),
    (
        ("strategy.schedule", "strategy.codec"),
        combined(schedule=FRAGMENTED, codec=build("codec", "top_k", {})),
        "so it would be sent twice; set fragments = 1 and alpha = 1, or error_feedback = false",
    ),
    (
        ("strategy.schedule", "strategy.codec"),
        combined(**DIFFERENCE | {"schedule": GROUPED}),
        "each group has one of its own; take error_feedback",
    ),
    (
        ("strategy.schedule", "strategy.rule"),
        combined(schedule=BUFFERED, rule=build("rule", "scaffold", {})),
        "must move by all of what the server adds; take the schedule rounds, or the rule none or fedprox",
    ),
    (
        ("strategy.reducer", "strategy.rule"),
        combined(reducer=build("reducer", "norm_bound", {"norm": 1.0}), rule=build("rule", "fednova", {})),
        "this reducer leaves some of that out; take the reducer mean, or the rule none or fedprox",
    ),
    (
        ("strategy.codec", "strategy.rule"),
        combined(codec=build("codec", "top_k", {}), rule=build("rule", "scaffold", {})),
        "a codec with feedback would send it twice: take feedback from the codec, or the rule none or fedprox",
    ),
    (
        ("strategy.rule", "strategy.optimizer"),
        combined(rule=build("rule", "none", {}), optimizer=build("optimizer", "feddyn", {})),
        "take feddyn for both, as strategy.kind = feddyn does, or for none",
    ),
    (
        ("strategy.personal", "evaluation.sites"),
        combined(personal=build("personal", "fine_tune", {"epochs": 1}), site_evaluation=False),
        "is made when a site judges a version, and no site does; set evaluation.sites = true",
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
    (
        ("strategy.schedule", "strategy.rule"),
        combined(schedule=GOSSIP, rule=build("rule", "scaffold", {})),
        "sites of gossip begin with what they have mixed; take the rule none or fedprox",
    ),
    (
        ("strategy.schedule", "strategy.codec"),
        combined(schedule=GOSSIP, codec=build("codec", "top_k", {})),
        "nothing is left to carry over; set error_feedback = false",
    ),
    (
        ("strategy.schedule", "strategy.personal"),
        combined(schedule=GOSSIP, personal=build("personal", "ditto", {})),
        "a personal one is made from versions that no site begins with; remove personal",
    ),
]


def test_each_refusal_is_of_two_keys_and_says_why_and_what_to_do() -> None:
    plain = [found.keys for found in combinations.REFUSALS if MASKING not in found.keys]  # the others: test_masking.py
    assert plain == [keys for keys, _, _ in REASONS]
    for keys, case, words in REASONS:
        found = refusal(case)
        assert found is not None
        assert found.keys == keys
        assert words in found.reason


MIXED = build("schedule", "every_steps", {"steps": 4, "alpha": 0.5})
IN_TURN = build("schedule", "cyclic", {})


@pytest.mark.parametrize(
    ("schedule", "rule", "refused"),
    [
        ("rounds", "scaffold", False),
        (IN_TURN, "feddyn", True),
        (GROUPED, "fednova", True),
        (MIXED, "scaffold", True),
        (IN_TURN, "fedprox", False),
        (build("schedule", "every_steps", {"steps": 4}), "scaffold", False),
    ],
)
def test_rules_with_a_part_at_the_server_need_rounds_of_all(schedule: Any, rule: str, refused: bool) -> None:
    schedule = build("schedule", schedule, {}) if isinstance(schedule, str) else schedule
    optimizer = build("optimizer", "feddyn" if rule == "feddyn" else "sgd", {})
    found = refusal(
        combined(schedule=schedule, rule=build("rule", rule, SAMPLES.get(("rule", rule), {})), optimizer=optimizer)
    )
    assert (found is not None) == refused
    assert found is None or found.keys == ("strategy.schedule", "strategy.rule")


@pytest.mark.parametrize(
    ("schedule", "refused"), [(IN_TURN, False), (GROUPED, False), (MIXED, True), (FRAGMENTED, True)]
)
def test_an_error_that_is_fed_back_needs_a_model_that_versions_replace(schedule: Any, refused: bool) -> None:
    found = refusal(combined(schedule=schedule, codec=build("codec", "top_k", {})))
    assert (found is not None) == refused
    assert found is None or found.keys == ("strategy.schedule", "strategy.codec")
    assert refusal(combined(schedule=schedule, codec=build("codec", "top_k", {"error_feedback": False}))) is None


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, ""),
        ({"num_named": 0}, "strategy.schedule"),  # whoever joins
        ({"schedule": build("schedule", "rounds", {"min": 3, "quorum": 2}), "num_named": 3}, "strategy.schedule"),
        ({"schedule": build("schedule", "rounds", {"min": 3}), "num_named": 3}, ""),
        ({"schedule": BUFFERED, "num_named": 2}, "strategy.schedule"),
        ({"reducer": build("reducer", "norm_bound", {"norm": 1.0})}, "strategy.reducer"),
        ({"optimizer": build("optimizer", "sgd", {"momentum": 0.9})}, "strategy.optimizer"),
        ({"codec": build("codec", "top_k", {})}, "strategy.optimizer"),  # the server would add up what is no change
        ({"regions": True}, "regions"),
    ],
)
def test_difference_coding_needs_every_site_and_a_server_that_adds_up(changes: dict[str, Any], refused: str) -> None:
    found = refusal(combined(**DIFFERENCE | changes))
    assert (found.keys[1] if found else "") == refused


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
