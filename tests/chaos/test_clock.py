"""A wall clock that jumps an hour ahead and back: nothing in a run is decided by it.

The processes run with a patched `time.time` and `datetime.now`: a test cannot set a machine's clock. TLS reads the
clock below Python and is not moved; what the wall clock does decide, here and there, is whether a certificate is good.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from chaos.conftest import JOB, alter, restore
from integration.federation import Federation

ROOT = Path(__file__).parents[2]
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.today", "datetime.utcnow", "utc_now"}
# Who reads the wall clock, and what for. None of these is asked whether a run goes on, waits, or leaves a site out.
READERS = {
    "client/agent.py": "whether to renew the certificate",
    "client/board.py": "shown to people",
    "client/checks.py": "`atoll doctor` compares clocks",
    "client/connection.py": "whether a person's certificate is renewed before a command",
    "client/status.py": "shown to people",
    "server/admin.py": "when an invitation ends, and shown to people",
    "server/authority.py": "from when until when a certificate is good",
    "server/enrolment.py": "whether an invitation is still good",
    "server/expiry.py": "warns of certificates that will expire",
    "server/first_operator.py": "whether the operator's certificate is renewed at the start",
    "server/open_runs.py": "when a run was submitted, shown to people",
    "server/security.py": "whether a caller's certificate has expired",
    "server/setup.py": "when the first invitation ends",
    "server/upstream.py": "when a run was taken on, shown to people",
    "transport/callbacks.py": "when an event came, for those who read the file of events",
    "transport/credentials.py": "whether the own certificate explains a refusal",
    "transport/enrolment.py": "whether a new certificate is good now",
    "transport/identity.py": "whether the own certificate has expired, at the start",
    "transport/members.py": "when a member list was signed, shown to people",
    "transport/peers.py": "from when until when a port's certificate is good",
    "wire/names.py": "the order of run ids, in which runs are listed",
}


def test_only_these_read_the_wall_clock() -> None:
    folders = ("aggregation", "client", "cluster", "server", "transport", "wire")
    found = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if WALL_CLOCKS & set(names_in(path))
    }
    assert found == READERS.keys()


def names_in(path: Path) -> Iterator[str]:
    """Names that are used in a file, with the one before the dot."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield f"{getattr(node.value, 'id', '')}.{node.attr}"
        elif isinstance(node, ast.Name):
            yield node.id


def test_clocks_that_jump_change_nothing(federation: Federation, undisturbed: str, tmp_path: Path) -> None:
    """Ahead while all sites train, behind in the next round, each at the server and at one site, in turn."""
    clock = {name: tmp_path / name for name in ("server", "site-1")}
    for name, file in clock.items():
        alter(federation, name, clock=str(file))
    federation.fault("site-1").write_text("slow 0.3")
    try:
        run = federation.submit(JOB)
        federation.wait_until(run, lambda state: any(site["state"] == "training" for site in state["sites"]))
        clock["server"].write_text("3600")
        clock["site-1"].write_text("-3600")
        federation.wait_until(run, lambda state: state["version"] >= 1)
        clock["server"].write_text("-3600")
        clock["site-1"].write_text("3600")
        state = federation.wait_for_end(run)
        logs = [process.text() for process in (federation.server, federation.sites["site-1"]) if process is not None]
    finally:
        federation.fault("site-1").unlink()
        restore(federation, "server", "site-1")
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [3, 3]
    assert all(0 <= record["seconds"] < 60 for record in state["rounds"])
    assert federation.model_hash(run) == undisturbed
    hours = {log_line[11:13] for log in logs for log_line in log.splitlines() if log_line[:2] == "20"}
    assert len(hours) >= 3, "the processes' own log lines show that their clocks have jumped"
