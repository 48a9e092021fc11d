"""One site whose app is not like that of the others: it lacks a dependency, or makes a model of another schema.

The researcher and the site's administrator learn what is wrong; the round of the others is what it is without the site.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from integration.federation import Done, Federation
from integration.trial import install_apps, trial_job

SITES = ("site-1", "site-2", "site-3")
ODD = "site-2"
WORK = "steps = 1, batch_size = 32"
QUORUM = "min = 2, quorum = 2, deadline = '60s'"
JOB = trial_job(rounds=1, schedule=QUORUM, work=WORK)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three running sites. Their app imports a module that comes from elsewhere, and each has it in a folder."""
    federation = Federation(tmp_path_factory.mktemp("unlike"))
    try:
        federation.make()
        needing = install_apps(federation.root / "needing", {"trial_apps.py": "\nimport needed_module\n"})
        federation.start_server()
        federation.enrol_researcher()
        for name in SITES:
            federation.enrol_site(name)
        federation.sign()
        for name in (*SITES, "ada"):
            dependency(federation, name).parent.mkdir()
            dependency(federation, name).touch()
        for name in SITES:
            federation.start_site(name, PYTHONPATH=f"{needing}{os.pathsep}{dependency(federation, name).parent}")
        federation.environment["PYTHONPATH"] = f"{needing}{os.pathsep}{dependency(federation, 'ada').parent}"
        yield federation
    finally:
        federation.close()


@pytest.fixture(scope="module")
def bytes_without(federation: Federation) -> Callable[[str], str]:
    """Hash of the model that the others make when the odd one declines ("build"), or fails in the round ("turn")."""
    known: dict[str, str] = {}

    def of(moment: str) -> str:
        if moment not in known and moment == "build":
            alone = trial_job(rounds=1, schedule=QUORUM, work=WORK, sites=[name for name in SITES if name != ODD])
            known[moment] = federation.model_hash(federation.finish(alone)["run"])
        elif moment not in known:
            with fault(federation, "raise"):
                known[moment] = federation.model_hash(federation.finish(JOB)["run"])
        return known[moment]

    return of


def test_a_missing_dependency_is_named_and_the_others_go_on(
    federation: Federation, bytes_without: Callable[[str], str]
) -> None:
    with without_dependency(federation):
        done, log = follow(federation, JOB)
    assert done.code == 0, done.err
    assert f"{ODD} takes no part" in done.err
    for text in (done.err, log):
        for word in (
            "app 'trial' does not import",
            "No module named 'needed_module'",
            "install what it needs",
            "at trial_apps:",
        ):
            assert word in text
    assert federation.model_hash(done.out.strip()) == bytes_without("build")


def test_a_run_that_needs_the_site_ends_with_its_reason(federation: Federation) -> None:
    with without_dependency(federation):
        done, _ = follow(federation, trial_job(rounds=1, schedule="min = 3", work=WORK, wait="5s"))
    assert done.code == 5
    for word in (f"{ODD} declined", "app 'trial' does not import", "'needed_module'", "install what it needs"):
        assert word in done.err[done.err.index("is failed") :]


@pytest.mark.parametrize(
    ("moment", "change", "found"),
    [
        pytest.param("build", "name", "absent", id="name", marks=pytest.mark.chaos),
        pytest.param("build", "shape", "float32 [3]", id="shape"),
        pytest.param("build", "dtype", "float64 [2]", id="dtype", marks=pytest.mark.chaos),
        pytest.param("turn", "name", "absent", id="name while training"),
        pytest.param("turn", "shape", "float32 [3]", id="shape while training", marks=pytest.mark.chaos),
        pytest.param("turn", "dtype", "float64 [2]", id="dtype while training", marks=pytest.mark.chaos),
    ],
)
def test_a_model_of_another_schema_is_told_by_tensor_found_and_wanted(
    federation: Federation, bytes_without: Callable[[str], str], moment: str, change: str, found: str
) -> None:
    with fault(federation, f"{moment} {change}"):
        done, log = follow(federation, JOB)
    assert done.code == 0, done.err
    assert ODD in done.err
    for text in (done.err, log):
        line = next(line for line in text.splitlines() if "2.bias" in line)
        is_found, says = line.index(found), line.index("manifest says")
        assert is_found < says < line.index("float32 [2]", says)
        advice = {"build": "use the same app, version and [app] values", "turn": "build it in model() as it is to stay"}
        assert advice[moment] in line
    assert federation.model_hash(done.out.strip()) == bytes_without(moment)


def follow(federation: Federation, job: str) -> tuple[Done, str]:
    """`atoll run` to the end of the run, and what the odd site has logged meanwhile."""
    path = federation.root / "job.toml"
    path.write_text(job)
    start = len(federation.sites[ODD].text())
    done = federation.atoll("run", path, "--home", federation.researcher, check=False)
    return done, federation.sites[ODD].text()[start:]


def dependency(federation: Federation, name: str) -> Path:
    """The module that the app needs, as `name` has it."""
    return federation.root / f"{name}.modules" / "needed_module.py"


@contextmanager
def without_dependency(federation: Federation) -> Iterator[None]:
    """The odd site lacks the module while the block lasts."""
    dependency(federation, ODD).unlink()
    try:
        yield
    finally:
        dependency(federation, ODD).touch()


@contextmanager
def fault(federation: Federation, text: str) -> Iterator[None]:
    """The app does what the text says at the odd site while the block lasts."""
    federation.fault(ODD).write_text(text)
    try:
        yield
    finally:
        federation.fault(ODD).unlink()
