"""A server that is a site of another: a tree makes the bytes of a flat federation, whatever dies on the way."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from integration.federation import Federation
from integration.trial import REPRODUCIBLE, trial_job

from atoll.client.steps import Step as SiteStep
from atoll.server.steps import Step as ServerStep

PROGRAM = Path(__file__).parents[1] / "samples" / "killed_process.py"

REGIONS = {"north": ("site-1", "site-3"), "south": ("site-2", "site-4")}
LEAVES = tuple(sorted(site for sites in REGIONS.values() for site in sites))
POLICY = 'allowed_apps = [{ name = "trial", hash = "any-installed" }]\nresearchers = ["ada"]\nmin_cohort = 1\n'
LIMITS = "heartbeat_s = 1\nlease_s = 60"


def job(strategy: str, num_members: int = 2) -> str:
    """A job of two rounds with all of the top's members."""
    schedule = f"min = {num_members}"
    if strategy == "int8":
        return trial_job(schedule=schedule, strategy='kind = "fedavg"\ncodec = { kind = "int8" }')
    if strategy == "buffers":
        text = 'kind = "fedadam"\nbuffers = "first"'
        return trial_job(schedule=schedule, strategy=text, values="batch_norm = true")
    return trial_job(schedule=schedule)


@dataclass
class Tree:
    """A top server and its regions, each a federation of its own."""

    root: Path
    top: Federation = field(init=False)
    regions: dict[str, Federation] = field(default_factory=dict)

    def make(self, regions: Iterable[str] = REGIONS, settings: str = "") -> None:
        self.top = Federation(self.root / "top", limits=LIMITS)
        self.top.root.mkdir()
        self.top.make()
        install_reducer(self.top.root / "installed")
        self.top.start_server()
        self.top.enrol_researcher()
        for name in regions:
            self.add_region(name, settings=settings)
        self.top.sign()

    def add_region(self, name: str, upper: Federation | None = None, settings: str = "") -> Federation:
        """A federation whose server is a site of `upper`; nothing of it runs yet."""
        upper = upper or self.top
        region = self.regions[name] = Federation(self.root / name, limits=LIMITS)
        region.root.mkdir()
        region.make()
        token = upper.atoll("site", "add", name, "--organisation", name, "--home", upper.operator).out.strip()
        home = region.server_folder / "upstream"
        region.atoll("site", "join", token, "--home", home)
        (home / "policy.toml").write_text(POLICY)
        region.add_settings(region.server_folder / "server.toml", f'[upstream]\nhome = "upstream"\n{settings}\n')
        return region

    def start(self, name: str, *sites: str) -> None:
        region = self.regions[name]
        region.start_server()
        start_sites(region, *sites)

    def close(self) -> None:
        for region in self.regions.values():
            region.close()
        self.top.close()

    def logs(self) -> str:
        return "\n".join(f"=== {one.root.name}\n{one.logs()}" for one in (self.top, *self.regions.values()))


def install_reducer(folder: Path) -> None:
    """A plugin whose reducer, as it says, looks at each update by itself."""
    (folder / "trial_parts.py").write_text(
        "from atoll.aggregation.reducers.mean import Mean\n\n"
        "class Chooses(Mean):\n"
        "    def __init__(self, options: Mean.Options) -> None:\n"
        "        super().__init__(options)\n"
        '        self.name, self.needs = "chooses", "all"\n'
    )
    info = folder / "trial_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trial-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[atoll.reducers]\nchooses = trial_parts:Chooses\n")


def start_sites(federation: Federation, *names: str) -> None:
    for name in names:
        federation.enrol_site(name)
        federation.add_settings(federation.home(name) / "site.toml", REPRODUCIBLE)
    federation.sign()
    for name in names:
        federation.start_site(name)


def held(region: Federation) -> list[Path]:
    """What the sites of a region keep until it is committed."""
    return [result for site in region.sites for result in (region.home(site) / "outbox").glob("*/result")]


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The hash of the model that a flat federation of the same sites makes by a strategy."""
    federation = Federation(tmp_path_factory.mktemp("flat"))
    try:
        federation.make()
        federation.start_server()
        federation.enrol_researcher()
        start_sites(federation, *LEAVES)
        yield cache(lambda strategy: federation.model_hash(federation.finish(job(strategy, len(LEAVES)))["run"]))
    finally:
        federation.close()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    tree = Tree(tmp_path_factory.mktemp("tree"))
    try:
        tree.make()
        for name, sites in REGIONS.items():
            tree.start(name, *sites)
        yield tree
    finally:
        tree.close()


@pytest.mark.parametrize(
    "strategy",
    ["fedavg", pytest.param("int8", marks=pytest.mark.chaos), pytest.param("buffers", marks=pytest.mark.chaos)],
)
def test_a_tree_makes_the_bytes_of_a_flat_federation(flat: Callable[[str], str], tree: Tree, strategy: str) -> None:
    state = tree.top.wait_for_end(tree.top.submit(job(strategy)))
    assert state["status"] == "finished", f"{state}\n{tree.logs()}"
    assert tree.top.model_hash(state["run"]) == flat(strategy), tree.logs()
    assert state["rounds"][-1]["evaluate"]["accuracy"] > 0.8
    for region in tree.regions.values():
        region.wait_for(lambda region=region: not held(region), "all updates are released")  # type: ignore[misc]


def test_a_region_killed_in_a_round_goes_on_to_the_same_bytes(flat: Callable[[str], str], tree: Tree) -> None:
    north = tree.regions["north"]
    north.fault("site-3").write_text("slow 0.5")
    run = tree.top.submit(job("fedavg"))
    try:
        tree.top.wait_until(run, lambda state: state["status"] == "running")
        north.wait_for(lambda: bool(held(north)), "the update of site-1")
        assert north.server is not None
        north.server.kill()
    finally:
        north.fault("site-3").unlink()
    north.start_server()
    state = tree.top.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{tree.logs()}"
    assert tree.top.model_hash(run) == flat("fedavg")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("kind", "step", "nth"),
    [
        ("server", ServerStep.OFFERED, 1),
        *[("server", ServerStep.JOURNALLED, nth) for nth in range(1, 12)],
        ("server", ServerStep.RECEIVED, 2),
        ("server", ServerStep.FOLDED, 1),
        ("server", ServerStep.FOLDED, 2),
        ("server", ServerStep.ANNOUNCED, 1),
        ("server", ServerStep.ENDED, 1),
        *[("region", step, 1) for step in SiteStep],
        ("region", SiteStep.UPLOADED, 2),
        ("region", SiteStep.JUDGED, 2),
    ],
)
def test_a_region_killed_at_a_step(flat: Callable[[str], str], tree: Tree, kind: str, step: str, nth: int) -> None:
    north = tree.regions["north"]
    assert north.server is not None
    north.server.stop()
    command = [sys.executable, str(PROGRAM), kind, str(north.server_folder), step, str(nth)]
    doomed = north.server = north.start_program("server", command)
    run = tree.top.submit(job("fedavg"))
    north.wait_for(lambda: not doomed.running, f"the region dies at {step}")
    assert doomed.popen.returncode == -signal.SIGKILL
    north.start_server()
    state = tree.top.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{tree.logs()}"
    assert tree.top.model_hash(run) == flat("fedavg")


def test_a_region_whose_round_comes_to_nothing_is_left_out_and_says_why(tree: Tree) -> None:
    tree.regions["south"].fault("site-2").write_text("raise")
    try:
        half = trial_job(rounds=1, schedule="min = 2, quorum = 1, deadline = '60s'")
        state = tree.top.wait_for_end(tree.top.submit(half))
    finally:
        tree.regions["south"].fault("site-2").unlink()
    assert state["status"] == "finished", f"{state}\n{tree.logs()}"
    why = state["rounds"][0]["missing"]["south"]
    assert "region south has no part in round 1" in why
    assert "site-2" in why
    assert "this batch cannot be learnt" in why


def test_a_run_that_is_stopped_above_ends_below_and_the_sites_are_free(tree: Tree) -> None:
    for site in REGIONS["north"]:
        tree.regions["north"].fault(site).write_text("slow 0.5")
    try:
        run = tree.top.submit(trial_job(rounds=50, schedule="min = 2"))
        tree.top.wait_until(run, lambda state: state["status"] == "running")
        tree.top.atoll("stop", run, "--home", tree.top.researcher)
    finally:
        for site in REGIONS["north"]:
            tree.regions["north"].fault(site).unlink()
    assert tree.top.wait_for_end(run)["status"] == "stopped"
    again = tree.top.wait_for_end(tree.top.submit(trial_job(rounds=1, schedule="min = 2")))
    assert again["status"] == "finished", f"{again}\n{tree.logs()}"


def test_a_policy_of_the_region_is_its_own(tree: Tree) -> None:
    policy = tree.regions["south"].server_folder / "upstream" / "policy.toml"
    policy.write_text(POLICY.replace('"ada"', '"grace"'))
    try:
        state = tree.top.wait_for_end(tree.top.submit(trial_job(rounds=1, schedule="min = 2", wait="15s")))
    finally:
        policy.write_text(POLICY)
    assert state["status"] == "failed"
    assert "south declined (policy of site south: runs of 'ada' are not allowed" in state["reason"]["message"]


def test_a_reducer_that_is_no_sum_is_refused_when_it_is_submitted(tree: Tree) -> None:
    path = tree.top.root / "bad.toml"
    path.write_text(trial_job(strategy='kind = "fedavg"\nreducer = { kind = "chooses" }', schedule="min = 2"))
    done = tree.top.atoll("run", path, "--detach", "--home", tree.top.researcher, check=False)
    assert done.code != 0
    assert "strategy.reducer = 'chooses' with regions = 'north, south'" in done.err, done.err
    assert "needs each update by itself" in done.err
    assert "Traceback" not in done.err


@pytest.mark.chaos
def test_a_region_of_a_region_makes_the_same_bytes(flat: Callable[[str], str], tree: Tree) -> None:
    """site-4 moves from south into a region of its own below south: three levels."""
    south = tree.regions["south"]
    south.sites["site-4"].stop()
    south.atoll("site", "revoke", "site-4", "--yes", "--home", south.operator)
    tree.add_region("east", south, "min_sites = 1")
    south.sign()
    tree.start("east", "site-4")
    south.wait_for(lambda: "east attached" in (south.root / "server.log").read_text(), "east attaches")
    state = tree.top.wait_for_end(tree.top.submit(job("int8")))
    assert state["status"] == "finished", f"{state}\n{tree.logs()}"
    assert tree.top.model_hash(state["run"]) == flat("int8"), tree.logs()
