"""Runs that train nothing: statistics of the sites' data, and a given model judged by the sites and the server."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from integration.federation import Federation
from integration.trial import breast_cancer, trial_job
from numpy.typing import NDArray

SITES = ("site-1", "site-2", "site-3")
STATISTICS = """
[statistics]
quantiles = [0.05, 0.5, 0.9]
min_cell_count = 12
[statistics.histograms.radius]
range = [-2.0, 3.0]
bins = 40
[statistics.histograms.texture]
edges = [-1.0, 0.0, 1.0]
[statistics.histograms.malignant]
edges = [0, 1, 2]
"""


def columns(site: str) -> dict[str, NDArray[np.float64]]:
    """What the trial app names at a site, as float64."""
    x, y = breast_cancer()
    start = int(site[-1]) - 1
    mine = np.arange(450)[start : 450 : 3 + start]
    kept = np.arange(len(mine)) % 5 != 0
    found = {"radius": x[mine, 0], "texture": x[mine, 1][kept], "area": x[mine, 3], "malignant": y[mine]}
    return {name: values.astype(np.float64) for name, values in found.items()}


def statistics_job(more: str = STATISTICS, **changes: Any) -> str:
    return trial_job(rounds=1, more=more, **changes)


def told_of(federation: Federation, job: str) -> dict[str, Any]:
    """The features of the run, as `atoll statistics --json` prints them."""
    path = federation.root / "statistics.toml"
    path.write_text(job)
    done = federation.atoll("statistics", path, "--json", "--home", federation.researcher)
    state: dict[str, Any] = json.loads(done.out)
    assert state["status"] == "finished"
    return state


def test_statistics_of_all_sites_are_those_of_their_data_in_one_place(trio: Federation) -> None:
    [record] = told_of(trio, statistics_job())["rounds"]
    parts = [columns(site) for site in SITES]
    assert set(record["features"]) == {"radius", "texture", "area", "malignant"}
    for name, found in record["features"].items():
        whole = np.concatenate([part[name] for part in parts])
        assert (found["count"], found["sites"], found["withheld"]) == (len(whole), 3, 0)
        assert found["mean"] == pytest.approx(whole.mean(), rel=1e-12, abs=1e-15)
        assert found["variance"] == pytest.approx(whole.var(ddof=1), rel=1e-12)
        for bin_ in found["histogram"]:
            low = -np.inf if bin_["from"] is None else bin_["from"]
            high = np.inf if bin_["to"] is None else bin_["to"]
            count = int(((whole >= low) & (whole < high)).sum())
            assert bin_["low"] <= count <= bin_["high"]
        for quantile in found["quantiles"]:
            true = np.quantile(whole, quantile["q"], method="inverted_cdf")
            assert quantile["lower"] is None or quantile["lower"] <= true
            assert quantile["upper"] is None or true <= quantile["upper"]
    assert record["features"]["area"]["histogram"] == []
    assert len(record["features"]["radius"]["quantiles"]) == 3
    # No bin beyond the labels holds anything, so those of the labels come alone and exactly.
    y = np.concatenate([part["malignant"] for part in parts])
    low = [bin_["low"] for bin_ in record["features"]["malignant"]["histogram"]]
    assert sum(low) == 0  # the empty bins beyond are counted with their neighbours
    high = [bin_["high"] for bin_ in record["features"]["malignant"]["histogram"]]
    assert high == [int((y == 0).sum()), int((y == 0).sum()), int((y == 1).sum()), int((y == 1).sum())]
    assert "by_site" not in record
    assert record["version"] == 0


@pytest.mark.chaos
def test_statistics_are_a_table_on_screen(trio: Federation) -> None:
    run = told_of(trio, statistics_job())["run"]
    text = trio.atoll("status", run, "--home", trio.researcher).out
    assert re.search(r"^feature +count +sites +mean +deviation +q 0.05 +q 0.5 +q 0.9$", text, re.MULTILINE)
    assert re.search(r"^area +\d+ +3/3 +\S+ +\S+ +- +- +-$", text, re.MULTILINE)
    assert re.search(r"^radius +\d+ +3/3 +\S+ +\S+ +\S+ \(\S+ to \S+\)", text, re.MULTILINE)


@pytest.mark.chaos
def test_each_sites_own_numbers_are_shown_where_the_job_says_so(trio: Federation) -> None:
    more = '[statistics]\nfeatures = ["area"]\nby_site = true\nmin_cell_count = 95\n'
    [record] = told_of(trio, statistics_job(more))["rounds"]
    sizes = {site: len(columns(site)["area"]) for site in SITES}
    assert sizes["site-3"] < 95 < sizes["site-2"]  # so the last one withholds the feature
    assert record["features"]["area"]["count"] == 0, "of two sites, where the job wants three"
    assert record["features"]["area"]["withheld"] == 1
    by_site = {site: answer["features"]["area"]["count"] for site, answer in record["by_site"].items()}
    assert by_site == {site: sizes[site] for site in ("site-1", "site-2")} | {"site-3": 0}


@pytest.mark.chaos
def test_a_job_that_names_what_is_not_there_fails_and_says_so(trio: Federation) -> None:
    state = trio.wait_for_end(trio.submit(statistics_job('[statistics]\nfeatures = ["height"]\n')))
    assert state["status"] == "failed"
    assert "does not name height; it names area, malignant, radius, texture" in state["reason"]["message"]


@pytest.mark.chaos
def test_sites_refuse_what_their_policy_does_not_name(federation: Federation) -> None:
    federation.start_server()
    federation.enrol_researcher()
    allowed = 'allowed_apps = [{ name = "trial", hash = "any-installed" }]\nresearchers = ["*"]\n'
    policies = {
        "site-1": allowed + 'min_cohort = 1\ntasks = ["statistics"]\nmin_cell_count = 100',
        "site-2": allowed + "min_cohort = 1",
        "site-3": allowed + 'min_cohort = 3\ntasks = ["statistics"]',
    }
    for site, policy in policies.items():
        federation.enrol_site(site, policy=policy)
    federation.sign()
    for site in policies:
        federation.start_site(site)
    more = '[statistics]\nfeatures = ["area", "radius"]\nby_site = true\n'
    state = federation.finish(statistics_job(more, schedule="min = 1"))
    declined = {site["site"]: site["detail"] for site in state["sites"] if site["state"] == "declined"}
    assert "'statistics', which is not in tasks" in declined["site-2"]
    assert "as few as 1 sites, min_cohort is 3" in declined["site-3"]
    [record] = state["rounds"]
    assert record["features"]["area"]["count"] == 150
    # The site's own minimum of 100 stands, though the job asks for none.
    more = '[statistics]\nfeatures = ["radius"]\n[statistics.histograms.radius]\nedges = [-1, 0, 1]\n'
    [record] = federation.finish(statistics_job(more, schedule="min = 1"))["rounds"]
    bins = record["features"]["radius"]["histogram"]
    assert [(bin_["low"], bin_["high"]) for bin_ in bins] == [(0, 150)] * 4
    failed = federation.wait_for_end(federation.submit(trial_job(schedule="min = 1", wait="8s", sites=["site-1"])))
    assert failed["status"] == "failed"
    assert "'train', which is not in tasks" in failed["reason"]["message"]


@pytest.mark.chaos
def test_a_server_killed_in_between_has_the_answers_it_had(federation: Federation) -> None:
    federation.start_all(*SITES)
    undisturbed = federation.finish(statistics_job())
    for site in SITES:
        federation.opened(site).unlink()
    released = federation.root / "released"
    federation.fault("site-3").write_text(f"await {released}")
    run = federation.submit(statistics_job())
    state = federation.wait_until(run, lambda state: sum(s["state"] == "accepted" for s in state["sites"]) == 2)
    assert state["rounds"] == [], "nothing is told before all answers are in"
    assert federation.server is not None
    federation.server.kill()
    federation.start_server()
    released.touch()
    disturbed = federation.wait_for_end(run)
    assert disturbed["status"] == "finished", federation.logs()
    assert disturbed["rounds"][0]["features"] == undisturbed["rounds"][0]["features"]
    assert {len(federation.opened(site).read_text().splitlines()) for site in SITES} == {1}


@pytest.mark.chaos
def test_a_given_model_is_judged_by_sites_and_server(federation: Federation) -> None:
    test_data = federation.root / "test.npz"
    federation.add_settings(
        federation.server_folder / "server.toml",
        f'[apps.trial]\ndistribution = "trial-apps"\nentry_point = "trial"\n[data.trial]\npath = "{test_data}"\n',
    )
    x, y = breast_cancer()
    np.savez(test_data, x_test=x[450:], y_test=y[450:])
    federation.start_all(*SITES)
    job = trial_job(rounds=3, more="[evaluation]\nserver = true\nby_site = true\n")
    trained = federation.finish(job)
    model, path = federation.root / "model.safetensors", federation.root / "job.toml"
    federation.atoll("model", trained["run"], "--out", model, "--home", federation.researcher)
    done = federation.atoll("evaluate", path, "--model", model, "--json", "--home", federation.researcher)
    judged = json.loads(done.out)
    [record], last = judged["rounds"], trained["rounds"][-1]
    assert record["evaluate"] == last["evaluate"]
    assert record["server"] == last["server"]
    assert record["server"]["accuracy"] > 0.9
    assert record["by_site"] == {site: {"evaluate": last["server"]} for site in SITES}  # each has the same test data
    assert record["train"] == {}
    assert (record["version"], record["bytes_up"]) == (0, 0)
    assert all(federation.opened(site).read_text().splitlines()[-1].startswith("test") for site in SITES)
    text = federation.atoll("status", judged["run"], "--home", federation.researcher).out
    assert re.search(r"^all +0\.\d{4} +\d\.\d{4}$", text, re.MULTILINE)

    path.write_text(job.replace("[app]", "[app]\nhidden = 5"))
    refused = federation.atoll("evaluate", path, "--model", model, "--home", federation.researcher, check=False)
    assert refused.code != 0
    assert 'tensor "0.bias" is float32 [16] in the file, and float32 [5]' in refused.err


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (trial_job(rounds=2, more="[statistics]"), "job.rounds = 2: a job that trains nothing has one round"),
        (statistics_job("[statistics]\nquantiles = [0.5]"), "quantiles come from histograms"),
        (statistics_job("[statistics.histograms.a]\nedges = [1, 1]"), "2 to 1025 rising numbers"),
        (statistics_job("[statistics]\nmin_cell_count = 0"), "statistics.min_cell_count = 0: wanted at least 1"),
        (statistics_job("[statistics]\n[evaluation]\nonly = true"), "are two jobs: submit each by itself"),
        (statistics_job("[statistics]", strategy='kind = "fedbuff"').replace('kind = "rounds", min', 'kind = "buffered", k = 1, min'), "take rounds"),
        (trial_job(rounds=1), "there is no table [statistics]"),
    ],
)  # fmt: skip
@pytest.mark.chaos
def test_what_cannot_be_asked_is_said_before_anything_runs(trio: Federation, job: str, words: str) -> None:
    path = trio.root / "bad.toml"
    path.write_text(job)
    done = trio.atoll("statistics", path, "--detach", "--home", trio.researcher, check=False)
    assert done.code == 2, done.err
    assert words in done.err
