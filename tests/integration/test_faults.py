"""What goes wrong in a federation: each fault ends in a stated way, and nothing hangs or is lost."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path

import pytest
from integration.federation import Federation
from integration.trial import install_apps, trial_job

QUORUM = "min = 3, quorum = 2, deadline = '60s'"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", ["this batch cannot be learnt"]),
        ("nan", ["'loss' is nan"]),
        ("huge", ["bound"]),
        ("die", ["died"]),
    ],
)
def test_a_site_whose_training_fails_is_left_out_and_says_why(trio: Federation, fault: str, words: list[str]) -> None:
    trio.fault("site-2").write_text(fault)
    try:
        state = trio.finish(trial_job(rounds=1, schedule=QUORUM))
    finally:
        trio.fault("site-2").unlink()
    assert state["rounds"][0]["sites"] == 2
    assert list(state["rounds"][0]["missing"]) == ["site-2"]
    for word in words:
        assert word in state["rounds"][0]["missing"]["site-2"].lower()


def test_without_a_quorum_the_run_fails_and_names_the_site(trio: Federation) -> None:
    trio.fault("site-2").write_text("raise")
    try:
        state = trio.wait_for_end(trio.submit(trial_job(rounds=1)))
    finally:
        trio.fault("site-2").unlink()
    assert state["status"] == "failed"
    assert "site-2" in state["reason"]["message"]
    assert "this batch cannot be learnt" in state["reason"]["message"]


def test_too_few_sites_is_a_bounded_wait_that_names_who_is_missing(federation: Federation) -> None:
    federation.start_all("site-1")
    federation.enrol_site("site-2")
    federation.sign()
    state = federation.wait_for_end(federation.submit(trial_job(schedule="min = 3", wait="20s")))
    assert state["status"] == "failed"
    assert "site-2 is not connected" in state["reason"]["message"]
    assert "1 of at least 3 joined (site-1)" in state["reason"]["message"], federation.logs()


@pytest.mark.parametrize(
    ("settings", "policy", "words"),
    [
        ("", 'researchers = ["*"]\nmin_cohort = 1', ["allowed_apps", "administrator"]),
        ("", f'allowed_apps = [{{ name = "trial", hash = "{"0" * 64}" }}]\nresearchers = ["*"]\nmin_cohort = 1', ["hash"]),
        ("", 'allowed_apps = [{ name = "trial", hash = "any-installed" }]\nresearchers = ["*"]\nmin_cohort = 5', ["min_cohort"]),
        ("", 'allowed_apps = [{ name = "trial", hash = "any-installed" }]\nresearchers = ["*"]\nmin_cohort = 2', ["may combine as few as 1 sites", "schedule to 2"]),
        ('[apps.other]\ndistribution = "trial-apps"\nentry_point = "trial"', None, ["trial"]),
        ('[apps.trial]\ndistribution = "absent-apps"\nentry_point = "trial"\n[data.trial]\npath = "x"', None, ["absent-apps"]),
        ('[apps.trial]\ndistribution = "trial-apps"\nentry_point = "larger"\n[data.trial]\npath = "{data}"', None, ["weight"]),
        ('[apps.trial]\ndistribution = "trial-apps"\nentry_point = "trial"\n', None, ["data"]),
    ],
    ids=["not-allowed", "hash-not-allowed", "cohort", "cohort-of-job", "unknown-app", "not-installed", "schema", "no-data"],
)  # fmt: skip
def test_a_site_that_cannot_or_will_not_take_part_declines_with_the_reason(
    federation: Federation, settings: str, policy: str | None, words: list[str]
) -> None:
    federation.start_server()
    federation.enrol_researcher()
    data = federation.write_data("site-1")
    federation.enrol_site("site-1", settings=settings.replace("{data}", str(data)), policy=policy)
    federation.sign()
    federation.start_site("site-1")
    detail = why_declined(federation, federation.submit(trial_job(schedule="min = 1")))
    for word in words:
        assert word in detail


def test_a_site_is_told_how_few_updates_a_robust_reducer_lets_through(federation: Federation) -> None:
    """Krum makes a version of one site's update, however many sites are in the round."""
    federation.start_server()
    federation.enrol_researcher()
    federation.enrol_site(
        "site-1",
        policy='allowed_apps = [{ name = "trial", hash = "any-installed" }]\nresearchers = ["*"]\nmin_cohort = 2',
    )
    federation.sign()
    federation.start_site("site-1")
    krum = 'kind = "fedavg"\nreducer = { kind = "krum", faulty = 0 }'
    detail = why_declined(federation, federation.submit(trial_job(strategy=krum, schedule="min = 3")))
    assert "may combine as few as 1 sites" in detail
    assert "a reducer that mixes as many, such as mean" in detail


def test_a_site_with_other_code_under_the_same_name_declines(federation: Federation) -> None:
    federation.start_server()
    federation.enrol_researcher()
    federation.enrol_site("site-1")
    federation.sign()
    changed = install_apps(federation.root / "changed", {"trial_apps.py": "\nCHANGED = True\n"})
    federation.start_site("site-1", PYTHONPATH=str(changed))
    assert "hash" in why_declined(federation, federation.submit(trial_job(schedule="min = 1")))


def test_an_app_that_does_not_import_is_named(federation: Federation) -> None:
    broken = install_apps(federation.root / "broken", {"trial_apps.py": "\nimport no_such_module\n"})
    federation.start_server()
    federation.enrol_researcher()
    federation.enrol_site("site-1")
    federation.sign()
    federation.start_site("site-1")
    federation.environment["PYTHONPATH"] = str(broken)
    path = federation.root / "job.toml"
    path.write_text(trial_job(schedule="min = 1", wait="10s"))
    done = federation.atoll("run", path, "--detach", "--home", federation.researcher, check=False)
    assert done.code != 0
    assert "no_such_module" in done.err


def test_a_site_killed_in_the_middle_of_a_round_is_not_waited_for(federation: Federation) -> None:
    federation.start_all("site-1", "site-2", "site-3")
    federation.fault("site-2").write_text("slow 1")
    run = federation.submit(trial_job(rounds=1, schedule=QUORUM))
    federation.wait_until(run, lambda state: any(site["state"] == "accepted" for site in state["sites"]))
    federation.sites["site-2"].kill()
    state = federation.wait_for_end(run)
    assert state["status"] == "finished"
    assert list(state["rounds"][0]["missing"]) == ["site-2"]


def test_a_site_that_comes_back_goes_on_where_it_was(federation: Federation) -> None:
    """kill -9 of an agent; with quorum = all the round waits, and the bytes are those of an undisturbed run."""
    federation.limits = "heartbeat_s = 1\nlease_s = 60"
    federation.close()
    shutil.rmtree(federation.root)
    federation.root.mkdir()
    federation.make()
    federation.start_all("site-1", "site-2", "site-3")
    undisturbed = federation.model_hash(federation.finish(trial_job(rounds=2))["run"])
    federation.fault("site-2").write_text("slow 3")  # seconds a step: it is seen training, however busy the machine is
    run = federation.submit(trial_job(rounds=2))
    federation.wait_until(run, lambda state: state["status"] == "running" and _is(state, "site-2", "training"))
    federation.sites["site-2"].kill()
    federation.fault("site-2").unlink()
    federation.start_site("site-2")
    state = federation.wait_for_end(run)
    assert state["status"] == "finished"
    assert federation.model_hash(run) == undisturbed


@pytest.mark.chaos  # of the everyday suite: chaos/test_kills.py
@pytest.mark.parametrize("strategy", ['kind = "fedavg"', 'kind = "fedadam"'])
def test_a_server_killed_between_and_in_rounds_goes_on_to_the_same_bytes(federation: Federation, strategy: str) -> None:
    federation.start_all("site-1", "site-2", "site-3")
    job = trial_job(rounds=4, strategy=strategy)
    undisturbed = federation.model_hash(federation.finish(job)["run"])
    for name in ("site-1", "site-2", "site-3"):
        federation.fault(name).write_text("slow 0.05")
    run = federation.submit(job)
    for version in (1, 2):
        federation.wait_until(run, lambda state, version=version: state["version"] >= version)  # type: ignore[misc]
        assert federation.server is not None
        federation.server.kill()
        federation.start_server()
    state = federation.wait_for_end(run)
    assert state["status"] == "finished"
    assert [record["sites"] for record in state["rounds"]] == [3, 3, 3, 3]
    assert federation.model_hash(run) == undisturbed


def test_a_server_that_is_drained_ends_in_order(federation: Federation) -> None:
    federation.start_all("site-1")
    federation.finish(trial_job(rounds=1, schedule="min = 1"))
    assert federation.server is not None
    assert federation.server.stop() == 0
    federation.start_server()
    federation.finish(trial_job(rounds=1, schedule="min = 1"))


def test_a_revoked_site_is_out_at_once(federation: Federation) -> None:
    federation.start_all("site-1", "site-2")
    federation.fault("site-2").write_text("slow 1")
    run = federation.submit(trial_job(rounds=1, schedule="min = 2, quorum = 1, deadline = '60s'"))
    federation.wait_until(run, lambda state: any(site["state"] == "accepted" for site in state["sites"]))
    federation.atoll("site", "revoke", "site-2", "--yes", "--home", federation.operator)
    state = federation.wait_for_end(run)
    assert state["status"] == "finished"
    assert list(state["rounds"][0]["missing"]) == ["site-2"]
    federation.wait_for(lambda: "revoked" in federation.sites["site-2"].text(), "the site says that it is revoked")


def test_a_running_agent_renews_its_certificate_and_attaches_with_the_new_one(federation: Federation) -> None:
    """Its clock is sixteen days ahead, past the middle of the certificate's thirty; TLS itself reads the true one."""
    federation.start_all("site-1")
    federation.finish(trial_job(rounds=1, schedule="min = 1"))
    federation.sites["site-1"].stop()
    keys = federation.home("site-1") / "identity"
    old = {path.name: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    clock = federation.root / "clock"
    clock.write_text(str(16 * 24 * 3600))
    program = Path(__file__).parents[1] / "samples" / "altered_process.py"
    arguments = [
        sys.executable,
        str(program),
        "site",
        str(federation.home("site-1")),
        json.dumps({"clock": str(clock)}),
    ]
    agent = federation.sites["site-1"] = federation.start_program("renewing", arguments)
    federation.wait_for(lambda: "the certificate is renewed" in agent.text(), "the certificate is renewed", agent)
    federation.wait_for(lambda: agent.text().count("attached to federation") == 2, "it attaches anew", agent)
    new = {path.name: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    assert new != old, "the new certificate is kept for the next start"
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys.rglob("*"))
    federation.finish(trial_job(rounds=1, schedule="min = 1"))


def test_a_port_in_use_is_said(federation: Federation) -> None:
    federation.start_server()
    other = Federation(federation.root / "other")
    other.root.mkdir()
    other.make()
    text = (other.server_folder / "server.toml").read_text()
    (other.server_folder / "server.toml").write_text(text.replace(str(other.ports[0]), str(federation.ports[0])))
    done = other.atoll("server", "run", other.server_folder, check=False)
    assert done.code == 3
    assert str(federation.ports[0]) in done.err
    assert "Traceback" not in done.err


def test_a_second_server_on_the_same_folder_names_the_first(trio: Federation) -> None:
    assert trio.server is not None
    done = trio.atoll("server", "run", trio.server_folder, check=False)
    assert done.code == 3
    assert f"a server with pid {trio.server.pid} works on this folder" in done.err
    assert "Traceback" not in done.err
    assert trio.server.running
    trio.finish(trial_job(rounds=1))  # the first one was left alone


def test_a_full_disk_at_the_server_is_waited_out(federation: Federation) -> None:
    """None of the server's files may grow beyond a kilobyte for a while; then the run goes on."""
    federation.start_all("site-1")
    undisturbed = federation.model_hash(federation.finish(trial_job(rounds=2, schedule="min = 1"))["run"])
    federation.fault("site-1").write_text("slow 0.2")
    run = federation.submit(trial_job(rounds=2, schedule="min = 1"))
    federation.wait_until(run, lambda state: state["status"] == "running")
    assert federation.server is not None
    resource.prlimit(federation.server.pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    state = federation.wait_until(run, lambda state: bool(state["reason"]))
    assert "disk" in state["reason"]["message"]
    resource.prlimit(federation.server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    state = federation.wait_for_end(run)
    assert state["status"] == "finished"
    assert federation.model_hash(run) == undisturbed


def why_declined(federation: Federation, run: str) -> str:
    """What site-1 said when it declined the run."""
    state = federation.wait_until(run, lambda state: _is(state, "site-1", "declined"))
    return next(str(site["detail"]) for site in state["sites"] if site["site"] == "site-1")


def _is(state: dict[str, list[dict[str, str]]], site: str, what: str) -> bool:
    return any(one["site"] == site and one["state"] == what for one in state["sites"])
