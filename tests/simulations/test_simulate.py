"""Whole runs in this process: repeatable, by every part that there is, with errors that help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from samples.simulated import Points, points_job

import atoll
from atoll.aggregation import catalogue
from atoll.aggregation.catalogue import Kind
from atoll.simulations.clock import Speeds
from atoll.simulations.dropouts import Dropouts
from atoll.simulations.results import Result
from atoll.simulations.sites import Partition
from atoll.wire.errors import AppFailed, ConfigError

SITES = 6
# Options that a part cannot do without; a new one needs a value here.
VALUES: dict[str, Any] = {
    "k": 3,
    "mu": 0.1,
    "norm": 5.0,
    "radius": 5.0,
    "faulty": 0,
    "inner": {"kind": "median"},
    "trusted": "site-1",
    "steps": 4,
    "label": "region",
    "groups": ["north", "south"],
    "rounds": 2,
}
# What a simulation refuses, and the key that it names.
REFUSED = {
    ("schedule", "gossip"): ("strategy.schedule", {"schedule": {"kind": "gossip", "zone": "reef"}}),
    ("reducer", "append"): ("strategy.reducer", {"kind": "bagging", "work": {}}),
    ("strategy", "bagging"): ("strategy.reducer", {"kind": "bagging", "work": {}}),
}
BUILT_IN = [
    kind for kind in catalogue.describe() if kind.source == "built in" and (kind.part, kind.kind) not in REFUSED
]
# By number of the site: groups of the schedules that have some.
LABELS = {f"site-{number}": {"region": ("north", "south")[number % 2]} for number in range(1, SITES + 1)}


def run(job: dict[str, Any] | None = None, **options: Any) -> Result:
    return atoll.simulate(
        job or points_job(), **{"app": Points, "sites": SITES, "source": {}, "labels": LABELS, **options}
    )


def part_of(kind: Kind) -> dict[str, Any]:
    required = [option.name for option in kind.options if not option.default]
    missing = [name for name in required if name not in VALUES and name not in ("min", "lr")]
    assert not missing, f"{kind.part} {kind.kind} needs {missing}: give VALUES one"
    values = {"lr": 0.1, **VALUES}
    return {"kind": kind.kind, **{name: values[name] for name in required}}


def job_of(kind: Kind) -> dict[str, Any]:
    """A run that uses one part of the catalogue."""
    if kind.part == "strategy":
        replaced: dict[str, Any] = {}
        if kind.kind in ("fedbuff", "fedasync"):
            replaced = {"schedule": {"kind": "buffered", "k": 1 if kind.kind == "fedasync" else 2, "min": SITES}}
        elif kind.kind == "cyclic":
            replaced = {"schedule": {"kind": "cyclic"}}
        elif kind.kind in ("local_sgd", "diloco"):
            replaced = {"schedule": {"kind": "every_steps", "steps": 4, "min": SITES}, "work": {"batch_size": 8}}
        job = points_job(kind=kind.kind, **replaced)
        if kind.kind == "ef21":  # for named sites that all take part
            job["job"]["sites"] = [f"site-{number}" for number in range(1, SITES + 1)]
        return job
    part: Any = part_of(kind)
    if "min" in {option.name for option in kind.options}:
        part["min"] = SITES
    # A kind of two parts, one at the sites and one at the server, is used as a whole.
    halves = [other for other in BUILT_IN if other.kind == kind.kind and other.part in ("rule", "optimizer")]
    changed: dict[str, Any] = {kind.part: part, **{other.part: part_of(other) for other in halves}}
    if kind.kind == "every_steps":  # which counts the steps itself
        changed["work"] = {"batch_size": 8}
    return points_job(**changed)


@pytest.mark.parametrize("kind", BUILT_IN, ids=lambda kind: f"{kind.part}-{kind.kind}")
def test_every_part_of_the_catalogue_runs_and_repeats(kind: Kind) -> None:
    one, other = (run(job_of(kind)) for _ in range(2))
    assert (one.status, one.reason) == ("finished", "")
    assert len(one.rounds) == 2
    assert one.model_bytes == other.model_bytes
    assert all(torch.isfinite(tensor.float()).all() for tensor in one.model.values())
    assert [entry.evaluate for entry in one.rounds] == [entry.evaluate for entry in other.rounds]


@pytest.mark.parametrize(
    ("key", "strategy"), REFUSED.values(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_a_simulation_cannot_do_is_refused_by_key(key: str, strategy: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"run the job in a federation") as caught:
        run(points_job(**strategy))
    assert caught.value.key == key


def test_a_simulated_site_has_one_process() -> None:
    with pytest.raises(ConfigError, match="simulated sites have one process each") as caught:
        run({**points_job(), "parallel": {"dp_replicate": 2}})
    assert caught.value.key == "parallel"


def test_a_round_of_fragments_moves_a_part_of_the_model_each_way() -> None:
    table = {"kind": "every_steps", "steps": 4, "min": SITES}
    whole, parts = (
        run(points_job(rounds=5, schedule={**table, "fragments": fragments}, work={"batch_size": 8}))
        for fragments in (1, 2)
    )
    assert (parts.status, parts.reason) == ("finished", "")
    two_rounds = parts.rounds[-2].bytes_up + parts.rounds[-1].bytes_up
    assert whole.rounds[-1].bytes_up <= two_rounds < 1.2 * whole.rounds[-1].bytes_up
    assert parts.rounds[-1].bytes_down < whole.rounds[-1].bytes_down
    assert parts.model_bytes != whole.model_bytes


def test_values_of_every_part_change_from_a_round_on() -> None:
    """What a round before the change makes is what it makes without; what changes then is seen in bytes and cohorts."""
    table: dict[str, Any] = {
        "rounds": 4,
        "codec": {"kind": "int8"},
        "schedule": {"kind": "rounds", "min": 4, "deadline": 50.0},
    }
    slow = {"speeds": Speeds(step_s=1.0, spread=0.3)}
    override = {
        "from_round": 3,
        "strategy": {
            "codec": {"kind": "float32"},
            "download": {"kind": "bfloat16"},
            "schedule": {"fraction": 0.5},
            "sum": {"bound": 64.0},
        },
        "evaluation": {"every": 2},
    }
    same = run(points_job(**table), **slow)
    changed = run({**points_job(**table), "control": {"override": [override]}}, **slow)
    assert (changed.status, changed.reason) == ("finished", "")
    before, after = changed.rounds[:2], changed.rounds[2:]
    assert [(one.train, one.bytes_up) for one in before] == [(one.train, one.bytes_up) for one in same.rounds[:2]]
    assert before[0].evaluate == same.rounds[0].evaluate
    assert before[1].evaluate != same.rounds[1].evaluate, "sites judge version 2 as round 3 begins with it"
    assert [one.sites for one in changed.rounds] == [SITES, SITES, 4, 4]
    assert [bool(one.evaluate) for one in changed.rounds] == [True, True, False, True]
    each = [entry.bytes_up / entry.sites for entry in (before[-1], after[0])]
    assert each[1] > 1.5 * each[0], "float32 takes more than int8"
    assert after[0].bytes_down < before[-1].bytes_down, "and bfloat16 less than the model as it is"
    job = {**points_job(**table), "control": {"override": [override]}}
    assert run(job, **slow, engine="processes", processes=2).model_bytes == changed.model_bytes


def test_steps_between_exchanges_change_from_a_round_on() -> None:
    table: dict[str, Any] = {"rounds": 4, "work": {"batch_size": 8}}
    table["schedule"] = {"kind": "every_steps", "steps": 4, "min": SITES}
    override = {"from_round": 3, "strategy": {"schedule": {"steps": 8}}}
    changed = run({**points_job(**table), "control": {"override": [override]}})
    weights = [entry.weight for entry in changed.rounds]
    assert weights[1] == weights[0]
    assert weights[2] == weights[3] == 2 * weights[1]


def test_groups_have_versions_of_their_own_between_those_of_all() -> None:
    table = {"kind": "hierarchical", "label": "region", "groups": ["north", "south"], "rounds": 2}
    grouped, again = (run(points_job(rounds=4, schedule=table)) for _ in range(2))
    assert (grouped.status, grouped.reason) == ("finished", "")
    assert [entry.sites for entry in grouped.rounds] == [SITES] * 4
    assert grouped.model_bytes == again.model_bytes
    assert grouped.model_bytes != run(points_job(rounds=4)).model_bytes
    alone = run(points_job(rounds=4, schedule=table), labels={name: {"region": "north"} for name in LABELS})
    assert alone.status == "failed"
    assert "south" in alone.reason


def test_sites_that_the_schedule_does_not_ask_take_no_part() -> None:
    result = run(points_job(schedule={"kind": "rounds", "min": 3, "where": {"region": "north"}}))
    assert (result.status, result.reason) == ("finished", "")
    assert [entry.sites for entry in result.rounds] == [3, 3]
    assert {entry.weight for entry in result.rounds} == {60}


def test_a_site_that_drops_out_often_is_asked_less_where_the_schedule_goes_by_availability() -> None:
    """The same sites drop out in the same rounds; what differs is who is asked."""
    dropouts = Dropouts(by_site={"site-1": 1.0})

    def times_missing(sample: str) -> int:
        schedule = {"kind": "rounds", "min": 3, "fraction": 0.5, "quorum": 2, "sample": sample}
        result = run(points_job(rounds=12, schedule=schedule), dropouts=dropouts)
        assert (result.status, result.reason) == ("finished", "")
        assert {len(entry.missing) for entry in result.rounds} == {0, 1}
        assert {name for entry in result.rounds for name in entry.missing} == {"site-1"}
        return sum(len(entry.missing) for entry in result.rounds)

    assert times_missing("available") < times_missing("uniform")


def test_who_drops_out_follows_from_the_seed_and_a_bad_chance_is_named() -> None:
    schedule = {"kind": "rounds", "min": SITES, "quorum": 1}
    one, again, other = (
        run(points_job(rounds=3, schedule=schedule), dropouts=Dropouts(share=0.4, seed=seed)) for seed in (1, 1, 2)
    )
    assert [entry.missing for entry in one.rounds] == [entry.missing for entry in again.rounds]
    assert [entry.missing for entry in one.rounds] != [entry.missing for entry in other.rounds]
    assert all("dropped out of round" in reason for entry in one.rounds for reason in entry.missing.values())
    with pytest.raises(ConfigError, match=r"dropouts\.share = 1\.5: wanted 0 to 1"):
        Dropouts(share=1.5)
    with pytest.raises(ConfigError, match=r"dropouts\.by_site names harbour"):
        run(dropouts=Dropouts(by_site={"harbour": 0.5}))


def test_a_failure_does_not_leave_its_neighbour_the_update_before() -> None:
    sources: dict[str, dict[str, Any]] = {f"site-{n}": {"num_train": 10 * n} for n in range(1, 7)}
    quorum = {"kind": "rounds", "min": 5, "quorum": 5}
    without = {name: source for name, source in sources.items() if name != "site-2"}
    failing = {**sources, "site-2": {"num_train": 20, "fault": "raise"}}
    some = run(points_job(rounds=1, schedule=quorum), sites=without)
    all_ = run(points_job(rounds=1, schedule={**quorum, "min": SITES}), sites=failing)
    assert list(all_.rounds[0].missing) == ["site-2"]
    assert all(torch.allclose(tensor, all_.model[name], atol=1e-6) for name, tensor in some.model.items())


def test_it_learns() -> None:
    result = run(points_job(rounds=10))
    accuracy = result.metrics("accuracy")
    assert list(accuracy) == list(range(1, 11))
    assert accuracy[10] > 0.6  # guessing gives a third


def test_another_seed_of_rounding_changes_what_is_rounded_at_random_and_nothing_else() -> None:
    rounded = points_job(codec={"kind": "int8"})
    assert run(rounded).model_bytes != run(rounded, rounding_seed=1).model_bytes
    assert run().model_bytes == run(rounding_seed=1).model_bytes


def test_sites_with_sources_of_their_own_need_no_partition() -> None:
    result = run(sites={f"site-{n}": {"num_train": 10 * n} for n in range(1, 7)})
    assert result.rounds[-1].weight == 10 * (1 + 2 + 3 + 4 + 5 + 6)


def test_a_place_for_the_sites_name_gives_each_a_source(tmp_path: Path) -> None:
    result = run(source={"path": "{site}.npz"})
    assert result.rounds[-1].weight == SITES * 120
    assert len(result.sites) == SITES


def test_evaluation_at_the_server_counts_all_test_data() -> None:
    job = points_job() | {"evaluation": {"server": True, "sites": True}}
    last = run(job).rounds[-1]
    assert last.server["accuracy"] == pytest.approx(last.evaluate["accuracy"])
    with pytest.raises(ConfigError, match=r"evaluation\.server = true, and the sites have data of their own"):
        run(job, sites={f"site-{n}": {} for n in range(1, 7)})
    assert run(job, sites={f"site-{n}": {} for n in range(1, 7)}, server_source={}).rounds[-1].server["accuracy"]


def test_tensors_that_stay_at_a_site_are_judged_there_with_its_own() -> None:
    own, shared = run(points_job(local=["3.*"])), run()
    assert own.model_bytes != shared.model_bytes
    assert own.model_bytes == run(points_job(local=["3.*"])).model_bytes
    assert torch.equal(own.model["3.weight"], run(points_job(rounds=1, local=["3.*"])).model["3.weight"])


def test_a_site_that_is_ten_times_slower_holds_up_rounds_and_not_a_buffer() -> None:
    speeds = Speeds(step_s=1.0, by_site={"site-6": 10.0})
    steps = 3  # 20 examples in batches of 8
    waited = run(speeds=speeds)
    assert [entry.simulated_s for entry in waited.rounds] == [10.0 * steps, 20.0 * steps]
    schedule = {"kind": "buffered", "k": 5, "min": SITES}
    buffered = run(points_job(kind="fedbuff", schedule=schedule), speeds=speeds)
    assert [entry.simulated_s for entry in buffered.rounds] == [1.0 * steps, 2.0 * steps]
    assert buffered.rounds[0].missing == {}


def test_a_deadline_that_a_slow_site_misses_closes_the_round_without_it() -> None:
    schedule = {"kind": "rounds", "min": SITES, "quorum": 5, "deadline": "60s"}
    result = run(points_job(schedule=schedule), speeds=Speeds(step_s=1.0, by_site={"site-6": 100.0}))
    assert result.status == "finished"
    assert [entry.sites for entry in result.rounds] == [5, 5]
    assert list(result.rounds[0].missing) == ["site-6"]
    assert [entry.simulated_s for entry in result.rounds] == [60.0, 120.0]


def test_more_sites_a_round_than_there_are_ends_the_run_with_the_numbers() -> None:
    result = run(points_job(min_sites=7))
    assert result.status == "failed"
    assert result.reason.startswith("round 1 needs 7 sites, there are 6: site-1, ")
    assert result.rounds == ()


def test_more_sites_than_examples_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"120 examples cannot be spread over 121 sites") as caught:
        run(sites=121)
    assert (caught.value.key, caught.value.value, caught.value.bound) == ("sites", "121", "1 to 120")


def test_a_site_without_data_is_named() -> None:
    sources: dict[str, dict[str, Any]] = {f"site-{n}": {} for n in range(1, 7)}
    for absent in (None, 0):
        with pytest.raises(AppFailed, match=r"site-4: data\(\"train\"\) is (None|empty)") as caught:
            run(sites={**sources, "site-4": {"num_train": absent}})
        assert caught.value.site == "site-4"
    with pytest.raises(AppFailed, match=r"there is nothing to spread over sites"):
        run(source={"num_train": None})


def test_an_app_that_raises_at_one_site_is_lost_there_as_in_a_deployment() -> None:
    sources: dict[str, dict[str, Any]] = {f"site-{n}": {} for n in range(1, 7)}
    sources["site-2"] = {"fault": "raise"}
    failed = run(sites=sources)
    assert failed.status == "failed"
    assert "app failed to train at site-2, round 1: RuntimeError: this batch cannot be learnt" in failed.reason
    quorum = {"kind": "rounds", "min": SITES, "quorum": 5}
    finished = run(points_job(schedule=quorum), sites=sources)
    assert finished.status == "finished"
    assert list(finished.rounds[0].missing) == ["site-2"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"sites": 0}, "sites"),
        ({"sites": {}}, "sites"),
        ({"partition": lambda: Partition(kind="dirichlet", alpha=0.0)}, "partition.alpha"),
        ({"partition": lambda: Partition(kind="stars")}, "partition.kind"),  # type: ignore[arg-type]
        ({"partition": lambda: Partition(kind="shards", shards_each=0)}, "partition.shards_each"),
        ({"partition": lambda: Partition(min_examples=0)}, "partition.min_examples"),
        ({"speeds": lambda: Speeds(step_s=-1.0)}, "speeds.step_s"),
        ({"speeds": lambda: Speeds(stragglers=1.5)}, "speeds.stragglers"),
        ({"speeds": lambda: Speeds(slowdown=0.5)}, "speeds.slowdown"),
        ({"speeds": lambda: Speeds(spread=float("nan"))}, "speeds.spread"),
        ({"speeds": lambda: Speeds(by_site={"nowhere": 1.0})}, "speeds.by_site"),
    ],
)
def test_a_bad_option_is_named_with_its_bound(options: dict[str, Any], key: str) -> None:
    def made() -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in options.items()}

    with pytest.raises(ConfigError) as caught:
        run(**made())
    assert caught.value.key == key


def test_sites_of_the_job_and_another_number_are_refused() -> None:
    job = points_job()
    job["job"]["sites"] = [f"hospital-{n}" for n in range(1, 7)]
    assert run(job, sites=None).sites == tuple(job["job"]["sites"])
    with pytest.raises(ConfigError, match=r"sites = 5, and job\.sites names 6"):
        run(job, sites=5)


def test_rounds_and_model_are_written(tmp_path: Path) -> None:
    result = run(out=tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    assert lines[-1]["evaluate"] == result.rounds[-1].evaluate
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in result.model.items())


def test_an_interruption_leaves_the_rounds_that_were_committed(tmp_path: Path) -> None:
    def interrupt(entry: Any) -> None:
        if entry.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(points_job(rounds=9), out=tmp_path, on_round=interrupt)
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 3
    three = run(points_job(rounds=3))
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in three.model.items())


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """A simulation sets threads and determinism for itself alone."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
