"""The commands of people against a real server: what they print, how they end, what they leave."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.federation import Federation, command
from integration.trial import trial_job
from safetensors.numpy import load_file

ABSENT = "01JDXK7Q8Z0000000000000000"


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server with a researcher and no site."""
    federation = Federation(tmp_path_factory.mktemp("lone"), limits="drain_s = 2")
    try:
        federation.make()
        federation.start_server()
        federation.enrol_researcher()
        yield federation
    finally:
        federation.close()


def _json(federation: Federation, *arguments: str | Path) -> Any:
    lines = federation.atoll(*arguments, "--json").out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def test_the_offline_key_admits_a_site_whose_fingerprint_its_keeper_has_seen(lone: Federation, tmp_path: Path) -> None:
    added = _json(lone, "site", "add", "ward", "--organisation", "St Mary's", "--home", lone.operator)
    joined = subprocess.run(
        command(["site", "join", "-", "--home", tmp_path / "ward"]),
        input=added["token"],
        env=lone.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    fingerprint = next(line for line in joined.stderr.splitlines() if "fingerprint" in line).partition(": ")[2]

    request, signed = tmp_path / "request.bin", tmp_path / "signed.bin"
    waiting = _json(lone, "federation", "pending", "--home", lone.operator, "--out", request)
    assert waiting == [{"change": "admit", "site": "ward", "organisation": "St Mary's", "fingerprint": fingerprint}]
    offline = ("federation", "sign", "--key", lone.root / "offline-key", "--request", request, "--out", signed)
    refused = subprocess.run(
        command(offline), input="n\n", env=lone.environment, capture_output=True, text=True, check=True
    )
    assert fingerprint in refused.stderr
    assert not signed.exists()
    lone.atoll(*offline, "--yes")
    assert _site(lone, "ward")["state"] == "pending"
    lone.atoll("federation", "publish", signed, "--home", lone.operator)
    assert _site(lone, "ward")["state"] == "active"

    checks = _json(lone, "doctor", "--home", tmp_path / "ward")
    assert checks["ok"]
    verdicts = {check["check"]: check["verdict"] for check in checks["checks"]}
    assert verdicts == {
        "software": "ok",
        "identity": "ok",
        "certificate": "ok",
        "server": "ok",
        "clock": "ok",
        "membership": "ok",
        "disk": "ok",
        "device": "ok",
        "policy": "warning",  # as written by `site join`, it allows nothing
    }

    lone.atoll("site", "revoke", "ward", "--yes", "--home", lone.operator)
    assert _site(lone, "ward")["state"] == "revoked"
    lone.atoll("federation", "sign", "--yes", "--key", lone.root / "offline-key", "--home", lone.operator)
    failed = lone.atoll("doctor", "--home", tmp_path / "ward", check=False)
    assert failed.code == 3
    assert "failed  server" in failed.out


def test_a_program_reads_what_joining_gave(lone: Federation, tmp_path: Path) -> None:
    added = _json(lone, "site", "add", "annex", "--organisation", "St Mary's", "--home", lone.operator)
    joined = _json(lone, "site", "join", added["token"], "--home", tmp_path / "annex")
    waiting = _json(lone, "federation", "pending", "--home", lone.operator)
    fingerprint = next(change["fingerprint"] for change in waiting if change["site"] == "annex")
    home = str(tmp_path / "annex")
    assert joined == {"site": "annex", "federation": "trial", "fingerprint": fingerprint, "home": home}
    lone.atoll("site", "revoke", "annex", "--yes", "--home", lone.operator)

    added = _json(lone, "user", "add", "grace", "--home", lone.operator)
    joined = _json(lone, "user", "join", added["token"], "--home", tmp_path / "grace")
    assert joined == {"user": "grace", "federation": "trial", "home": str(tmp_path / "grace")}


def _site(federation: Federation, name: str) -> dict[str, Any]:
    sites = _json(federation, "site", "list", "--home", federation.operator)
    found: dict[str, Any] = next(site for site in sites if site["site"] == name)
    return found


def test_a_run_is_listed_shown_exported_and_stopped(lone: Federation, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(trial_job())
    ada = ("--home", lone.researcher)
    run = _json(lone, "run", tmp_path / "job.toml", "--detach", *ada)["run"]
    listed = next(entry for entry in _json(lone, "runs", *ada) if entry["run"] == run)
    assert (listed["name"], listed["status"], listed["submitted_by"]) == ("trial", "queued", "ada")
    assert _json(lone, "status", "latest", *ada)["run"] == run
    assert run in lone.atoll("runs", *ada).out
    assert "queued" in lone.atoll("status", run.lower(), *ada).out

    model = _json(lone, "model", run, "--out", tmp_path / "out" / "model.safetensors", "--version", "0", *ada)
    assert model["version"] == 0
    assert sum(array.nbytes for array in load_file(model["path"]).values()) == model["bytes"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]

    token = lone.atoll("user", "add", "bob", "--home", lone.operator).out.strip()
    lone.atoll("user", "join", token, "--home", tmp_path / "bob")
    refused = lone.atoll("stop", run, "--home", tmp_path / "bob", check=False)
    assert refused.code == 4
    assert f"run {run} is ada's: only they or an operator can stop it" in refused.err
    assert next(entry for entry in _json(lone, "runs", *ada) if entry["run"] == run)["status"] == "queued"

    lone.atoll("stop", run, *ada)
    ended = lone.atoll("status", run, "--watch", *ada, check=False)
    assert ended.code == 5
    assert "is stopped" in ended.err
    assert lone.atoll("stop", run, *ada, check=False).code == 4


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("status", ABSENT), 4, ABSENT),
        (("status", "no-id"), 2, "no run id"),
        (("model", ABSENT, "--out", "x"), 4, ABSENT),
        (("stop", ABSENT), 4, ABSENT),
        (("site", "add", "x", "--organisation", "y"), 4, "researcher ada"),
        (("site", "revoke", "x", "--yes"), 4, "researcher ada"),
        (("federation", "pending"), 4, "researcher ada"),
        (("run", "absent.toml"), 2, "absent.toml: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_one_line_and_a_code(
    lone: Federation, arguments: tuple[str, ...], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = lone.atoll(*arguments, "--home", lone.researcher, check=False)
    assert done.code == code, done.err
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert said in done.err


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"app": "unheard-of"}, "app 'unheard-of' is not known on this machine"),
        ({"values": "learning_rate = 1"}, "job.toml, line 12: unknown key 'app.learning_rate'"),
        ({"more": "[privacy]\ndifferential_privacy = {}"}, "not in this version"),
        (
            {"strategy": 'kind = "fedavgg"'},
            "job.toml, line 15: strategy.kind = 'fedavgg' is not known; did you mean 'fedavg'?",
        ),
    ],
    ids=["app", "value", "privacy", "strategy"],
)
def test_a_job_that_cannot_run_is_refused_before_it_is_sent(
    lone: Federation, table: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(trial_job(**table))
    done = lone.atoll("run", tmp_path / "job.toml", "--home", lone.researcher, check=False)
    assert done.code == 2, done.err
    assert said in done.err


def test_ctrl_c_stops_following_and_the_run_goes_on(lone: Federation, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(trial_job())
    log = tmp_path / "run.log"
    with log.open("wb") as file:
        following = subprocess.Popen(
            command(["run", tmp_path / "job.toml", "--home", lone.researcher]), env=lone.environment, stderr=file
        )
    lone.wait_for(lambda: "is queued" in log.read_text(), "the run is queued")
    following.send_signal(signal.SIGINT)
    assert following.wait(30) == 130
    run = _json(lone, "runs", "--home", lone.researcher)[0]
    assert run["status"] == "queued"
    said = f"run {run['run']} goes on; follow it: atoll status {run['run']} --watch; stop it: atoll stop {run['run']}"
    assert said in log.read_text()
    assert "Traceback" not in log.read_text()


def test_following_goes_on_when_the_server_was_restarted(lone: Federation, tmp_path: Path) -> None:
    run = lone.submit(trial_job(wait="600s"))
    log = tmp_path / "watch.log"
    with log.open("wb") as file:
        following = subprocess.Popen(
            command(["status", run, "--watch", "--home", lone.researcher]), env=lone.environment, stderr=file
        )
    lone.wait_for(lambda: "is queued" in log.read_text(), "the run is shown")
    assert lone.server is not None
    lone.server.stop()
    lone.wait_for(lambda: "trying again" in log.read_text(), "the server is missed")
    lone.start_server()
    lone.atoll("stop", run, "--home", lone.researcher)
    assert following.wait(60) == 5
    assert "is stopped" in log.read_text()


def test_nobody_at_the_address_is_said_at_once(lone: Federation, tmp_path: Path) -> None:
    assert lone.server is not None
    lone.server.stop()
    try:
        (tmp_path / "job.toml").write_text(trial_job())
        done = lone.atoll("run", tmp_path / "job.toml", "--home", lone.researcher, check=False)
        assert done.code == 4
        assert "nobody listens" in done.err.splitlines()[-1]
    finally:
        lone.start_server()


def test_plain_text_needs_the_flag_on_both_ends(federation: Federation) -> None:
    settings = federation.server_folder / "server.toml"
    settings.write_text(settings.read_text().replace("# plaintext = false", "plaintext = true"))
    federation.start_server()
    refused = federation.atoll("runs", "--home", federation.operator, check=False)
    assert refused.code == 4
    assert len(refused.err.splitlines()) == 1
    assert "does not speak TLS" in refused.err
    (federation.operator / "user.toml").write_text("plaintext = true\n")
    assert _json(federation, "runs", "--home", federation.operator) == []
