"""A run's state as JSON, and as people see it."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from rich.console import Console

from atoll.cli.live import Lines, Screen
from atoll.cli.output import age, note, print_json, print_table, size
from atoll.cli.run_view import SITES_SHOWN, lines, render, round_line, rounds_table, status_line
from atoll.cli.snapshots import headline_metric, metric_values, run_record, timestamp
from atoll.wire.control_pb2 import MetricSum
from atoll.wire.errors_pb2 import ErrorDetail
from atoll.wire.runs_pb2 import RoundRecord, RunSnapshot, SiteProgress
from atoll.wire.secure_pb2 import SecureRecord

RUN = "01JDXK7Q8Z0000000000000000"


def _record(number: int, **fields: object) -> RoundRecord:
    record = RoundRecord(
        round=number, version=number, num_sites=3, weight=1437, seconds=1.25, bytes_up=2048, bytes_down=100
    )
    record.train_metrics["loss"].CopyFrom(MetricSum(sum=718.5, count=1437))
    record.evaluate_metrics["accuracy"].CopyFrom(MetricSum(sum=342, count=360))
    record.server_metrics["accuracy"].CopyFrom(MetricSum(sum=348, count=360))
    record.server_metrics["loss"].CopyFrom(MetricSum(sum=72, count=360))
    record.missing.extend(fields.get("missing", ()))  # type: ignore[arg-type]
    return record


def _snapshot(status: str = "running", round_: int = 2, rounds: int = 1, **fields: object) -> RunSnapshot:
    return RunSnapshot(
        run=RUN,
        name="digits",
        status=status,
        round=round_,
        num_rounds=5,
        version=rounds,
        sites=[
            SiteProgress(site="st-mary", state="training", done=3, total=12),
            SiteProgress(site="lakeside", state="ready"),
        ],
        rounds=[_record(number) for number in range(1, rounds + 1)],
        submitted_by="ada",
        submitted_at_unix_s=1_800_000_000.0,
        **fields,  # type: ignore[arg-type]
    )


def test_how_a_masked_round_was_protected_is_shown() -> None:
    snapshot = _snapshot()
    snapshot.rounds[-1].secure.CopyFrom(
        SecureRecord(
            threat="active", num_sites=4, threshold=3, num_corrupt=1, fewest_survivors=3, sessions=2, parts=2,
            dropped=["lakeside"], liars={"st-mary": "revealed another share than it was given"},
        )
    )  # fmt: skip
    assert run_record(snapshot)["rounds"][0]["secure"] == {
        "threat": "active", "sites": 4, "threshold": 3, "corrupt": 1, "fewest_survivors": 3, "sessions": 2, "parts": 2,
        "dropped": ["lakeside"], "liars": {"st-mary": "revealed another share than it was given"},
    }  # fmt: skip
    shown = "\n".join(lines(snapshot))
    assert "masked in round 1: 2 sums of 3 of 4 sites, at least 3; 3 shares rebuild a secret" in shown
    assert "holds against a server that lies with up to 1 sites on its side; 2 sessions" in shown
    assert "dropped out of the sum: lakeside" in shown
    assert "st-mary revealed another share" in shown
    assert "masked" not in "\n".join(lines(_snapshot()))


def test_a_run_as_json() -> None:
    record = run_record(_snapshot())
    assert json.loads(json.dumps(record)) == {
        "run": RUN,
        "name": "digits",
        "status": "running",
        "reason": None,
        "round": 2,
        "num_rounds": 5,
        "version": 1,
        "best_version": None,
        "continues": None,
        "submitted_by": "ada",
        "submitted_at": "2027-01-15T08:00:00+00:00",
        "sites": [
            {"site": "st-mary", "state": "training", "done": 3, "total": 12, "detail": ""},
            {"site": "lakeside", "state": "ready", "done": 0, "total": 0, "detail": ""},
        ],
        "rounds": [
            {
                "round": 1,
                "version": 1,
                "sites": 3,
                "weight": 1437,
                "seconds": 1.25,
                "train": {"loss": 0.5},
                "evaluate": {"accuracy": 0.95},
                "server": {"accuracy": 348 / 360, "loss": 0.2},
                "missing": {},
                "bytes_up": 2048,
                "bytes_down": 100,
            }
        ],
    }


def test_the_list_of_runs_is_without_sites_and_rounds() -> None:
    assert {"sites", "rounds"}.isdisjoint(run_record(_snapshot(), rounds=False))


def test_a_reason_says_where() -> None:
    reason = ErrorDetail(kind="TooFewSites", message="2 of 3 sites", round=4, bound="3")
    assert run_record(_snapshot(reason=reason))["reason"] == {
        "kind": "TooFewSites",
        "message": "2 of 3 sites",
        "round": 4,
        "bound": "3",
    }


def test_what_was_never_counted_or_is_not_finite_is_null() -> None:
    sums = {"a": MetricSum(sum=1, count=0), "b": MetricSum(sum=math.inf, count=1), "c": MetricSum(sum=1, count=4)}
    assert metric_values(sums) == {"a": None, "b": None, "c": 0.25}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"loss": 1.0, "accuracy": 0.5, "auc": 0.7}, ("accuracy", 0.5)),
        ({"loss": 1.0, "auc": 0.7}, ("auc", 0.7)),
        ({"loss": 1.0}, ("loss", 1.0)),
        ({"loss": 1.0, "personal_accuracy": 0.9, "personal_loss": 0.1}, ("loss", 1.0)),
        ({"accuracy": None, "loss": 2.0}, ("loss", 2.0)),
        ({}, None),
    ],
)
def test_people_look_at_accuracy_first(values: dict[str, float | None], wanted: tuple[str, float] | None) -> None:
    assert headline_metric(values) == wanted


def test_lines_say_each_thing_once() -> None:
    told: list[str] = []
    view = Lines(told.append)
    view.show(_snapshot("queued", round_=0, rounds=0))
    view.show(_snapshot("queued", round_=0, rounds=0))
    view.show(_snapshot("running", round_=2, rounds=1))
    view.say("the server is away, trying again")
    view.say("the server is away, trying again")
    view.show(_snapshot("running", round_=3, rounds=2))
    view.show(_snapshot("running", round_=4, rounds=3))
    view.show(_snapshot("finished", round_=5, rounds=5))
    assert told == [
        f"run {RUN} (digits) is queued",
        f"run {RUN} (digits) is running, round 2 of 5",
        "the server is away, trying again",
        _line(1),
        _line(2),
        *[_line(number) for number in (3, 4, 5)],
        f"run {RUN} (digits) is finished",
    ]


def test_people_see_what_a_run_goes_on_from_why_it_ended_and_which_version_is_the_best() -> None:
    told: list[str] = []
    view = Lines(told.append)
    view.show(_snapshot("queued", round_=0, rounds=0, continues="01JDXK7Q8Z1111111111111111"))
    reason = ErrorDetail(message="early stop after round 3: accuracy at the sites has not improved in 2 evaluations")
    ended = _snapshot(
        "finished", round_=3, rounds=3, best_version=1, continues="01JDXK7Q8Z1111111111111111", reason=reason
    )
    ended.rounds[0].best = True
    view.show(ended)
    origin, best = "goes on from run 01JDXK7Q8Z1111111111111111", "best version: 1, of round 1"
    status = f"run {RUN} (digits) is finished: {reason.message}"
    assert told == [f"run {RUN} (digits) is queued", origin, _line(1), _line(2), _line(3), best, status]
    assert lines(ended)[:3] == [status, origin, best]
    record = run_record(ended)
    assert (record["best_version"], record["continues"]) == (1, "01JDXK7Q8Z1111111111111111")


def test_lines_say_who_takes_no_part_and_why() -> None:
    told: list[str] = []
    view = Lines(told.append)
    snapshot = _snapshot("queued", round_=0, rounds=0)
    snapshot.sites.add(site="lakeside", state="declined", detail="app 'digits' does not import\n  at digits:3")
    view.show(snapshot)
    view.show(snapshot)
    assert told[1:] == ["lakeside takes no part: app 'digits' does not import at digits:3"]


def _line(number: int) -> str:
    return f"round {number} of 5, 3 sites, 1.2 s, training loss 0.5000, accuracy at sites 0.9500, accuracy at server 0.9667"


def test_a_round_names_who_is_missing() -> None:
    record = _record(1, missing=["north-lab", "lakeside"])
    record.reasons["lakeside"] = "gone"
    assert round_line(record, 5).endswith("without north-lab, lakeside (gone)")


def _drawn(renderable: object, width: int = 140) -> str:
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=False).print(renderable)
    return text.getvalue()


def test_the_view_shows_sites_and_rounds() -> None:
    text = _drawn(render(_snapshot(rounds=2)))
    assert "st-mary" in text
    assert "3/12" in text
    assert "accuracy at server" in text
    assert "0.9667" in text
    assert "2.0 KiB" in text


PATIENT = _snapshot(rounds=3, round_=4)
PATIENT.rounds[1].missing.append("lakeside")
PATIENT.sites[0].CopyFrom(SiteProgress(site="st-mary", state="training", done=3, total=12))
PATIENT.sites[1].CopyFrom(
    SiteProgress(site="lakeside", state="failed", detail="the loss is nan at step 3 of 12: lower the learning rate")
)


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (140, "round  sites  training loss  accuracy at sites  accuracy at server  seconds  up  missing"),
        (80, "round  sites  training loss  accuracy at sites  accuracy at server  seconds  up  missing"),
        (60, "round  sites  training loss  accuracy at sites  accuracy at server  missing"),
        (40, "round  accuracy at sites  accuracy at server  missing"),
    ],
)
def test_a_table_that_does_not_fit_leaves_out_and_never_cuts(width: int, titles: str) -> None:
    table = rounds_table(PATIENT, width=width)
    assert "  ".join(str(column.header) for column in table.columns) == titles
    text = _drawn(render(PATIENT, width), width)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= width
    assert [line.split()[:1] for line in text.splitlines()[-3:]] == [["1"], ["2"], ["3"]], "a round is a line"
    assert "0.9667" in text.splitlines()[-2]
    assert "lakeside" in text.splitlines()[-2]
    assert "the loss is nan at step 3 of 12: lower the learning rate" in " ".join(text.split())
    assert "3/12" in text


def test_a_pipe_gets_whole_rows_without_colours() -> None:
    snapshot = _snapshot(rounds=30)
    snapshot.sites[0].CopyFrom(SiteProgress(site="st-mary", state="failed", detail="why " * 100))
    told = lines(snapshot)
    assert next(line for line in told if line.startswith("st-mary")).count("why") == 100
    assert sum(line.split()[0].isdecimal() for line in told) == 12
    assert not any("\x1b" in line or line != line.rstrip() for line in told)


def test_what_comes_from_others_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "the\x1b[2J\x07 app\r\nsays\x9b31m \N{RIGHT-TO-LEFT OVERRIDE}no"
    said = "the\ufffd[2J\ufffd app says\ufffd31m \ufffdno"
    record = _record(1, missing=["lakeside"])
    record.reasons["lakeside"] = evil
    assert round_line(record, 5).endswith(f"without lakeside ({said})")
    assert status_line(_snapshot("failed", reason=ErrorDetail(message=evil))).endswith(f"is failed: {said}")
    snapshot = _snapshot()
    snapshot.sites[0].detail = evil
    for width in (40, 140):
        assert "\x1b" not in _drawn(render(snapshot, width), width)
    note(evil)
    assert capsys.readouterr().err == "the\ufffd[2J\ufffd app\ufffd\nsays\ufffd31m \ufffdno\n"


def _on_a_terminal(program: str, columns: int, term: str = "xterm-256color") -> str:
    """What a program writes to a terminal of so many columns and 24 lines."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=variables | {"TERM": term},
    )
    os.close(follower)
    written = b""
    with suppress(OSError):  # the end, on Linux
        while data := os.read(leader, 1 << 16):
            written += data
    os.close(leader)
    assert process.wait() == 0, written.decode()
    return written.decode()


SHOWING = """
from atoll.cli.live import open_view
from atoll.wire.runs_pb2 import RunSnapshot
view = open_view()
for data in {snapshots}:
    view.show(RunSnapshot.FromString(data))
view.say("the server is away, trying again")
view.show(RunSnapshot.FromString({last}))
view.close()
print("after")
"""
LAST = _snapshot("finished", round_=5, rounds=5)


def _showing() -> str:
    return SHOWING.format(snapshots=[PATIENT.SerializeToString()], last=LAST.SerializeToString())


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_keeps_the_last_state_and_no_line_is_lost_or_cut(columns: int) -> None:
    written = _on_a_terminal(_showing(), columns)
    assert "\x1b[?25h" in written, "the cursor is there again"
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "").splitlines()
    assert shown[-1] == "after"
    assert [line.split()[0] for line in shown[-6:-1]] == ["1", "2", "3", "4", "5"]
    assert all(len(line) <= columns for line in shown)
    assert "\N{HORIZONTAL ELLIPSIS}" not in written
    assert any("the server is away" in line for line in shown)


def test_a_terminal_that_cannot_redraw_and_a_pipe_get_lines() -> None:
    piped = subprocess.run([sys.executable, "-c", _showing()], capture_output=True, text=True, check=True).stderr
    told = [f"run {RUN} (digits) is running, round 4 of 5", round_line(PATIENT.rounds[0], 5)]
    told += [round_line(PATIENT.rounds[1], 5), "the server is away, trying again"]
    told += [*[_line(number) for number in (3, 4, 5)], f"run {RUN} (digits) is finished"]
    assert piped.splitlines() == told
    dumb = _on_a_terminal(_showing(), 80, term="dumb")
    assert dumb.splitlines() == [*told, "after"]


def test_a_server_that_is_away_twice_is_told_of_twice() -> None:
    told: list[str] = []
    view = Lines(told.append)
    for _ in range(2):
        view.show(_snapshot("running", round_=1, rounds=0))
        view.say("the server is away, trying again")
        view.say("the server is away, trying again")
    assert told.count("the server is away, trying again") == 2


def test_names_from_the_wire_are_text_and_never_markup() -> None:
    snapshot = _snapshot()
    snapshot.sites[0].detail = "[bold red]boo[/] \N{WARNING SIGN}"
    assert "[bold red]boo[/]" in _drawn(render(snapshot))
    assert "[x]" in _drawn(render(_snapshot(reason=ErrorDetail(message="[x]"))))


def test_a_thousand_sites_do_not_fill_the_screen() -> None:
    snapshot = _snapshot()
    snapshot.sites.extend(SiteProgress(site=f"s-{number}", state="training") for number in range(1000))
    text = _drawn(render(snapshot))
    assert "and 962 more" in text
    assert text.count("training") < SITES_SHOWN + 5


def test_the_table_of_rounds_can_be_the_newest_alone() -> None:
    snapshot = _snapshot(rounds=30)
    assert rounds_table(snapshot, newest=12).row_count == 12
    assert rounds_table(snapshot).row_count == 30


def test_the_screen_draws_the_last_state_and_leaves_it() -> None:
    text = io.StringIO()
    screen = Screen(Console(file=text, width=120, force_terminal=True))
    screen.show(_snapshot())
    screen.say("the server is away, trying again")
    screen.show(_snapshot("finished", round_=5, rounds=5))
    screen.close()
    assert "the server is away" in text.getvalue()
    assert status_line(_snapshot("finished")) in text.getvalue()


def test_units() -> None:
    assert [age(seconds) for seconds in (0, 59, 60, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
    assert [size(count) for count in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
    assert timestamp(0) is None


def test_data_goes_to_stdout_and_words_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("run", "job"), [("1", "digits")], empty="none")
    assert capsys.readouterr() == ("run  job\n1    digits\n", "")
    print_table(("run", "job"), [], empty="none")
    assert capsys.readouterr() == ("", "none\n")
    print_json([{"a": None}])
    assert capsys.readouterr() == ('[{"a": null}]\n', "")
