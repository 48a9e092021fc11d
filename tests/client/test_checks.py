"""`atoll doctor`: each verdict, and that a check never raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.client.checks import Verdict, check_clock, check_home, check_membership, check_transfers
from atoll.transport.bulk_carrier import BLOCKED


def _verdicts(home: Path) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in check_home(home)}


@pytest.mark.parametrize(
    ("ahead_s", "verdict", "said"),
    [
        (0.2, Verdict.OK, "0.2 s behind"),
        (-4.9, Verdict.OK, "4.9 s ahead of"),
        (12.0, Verdict.WARNED, "12.0 s behind"),
        (-3600.0, Verdict.FAILED, "3600.0 s ahead of"),
    ],
)
def test_a_skewed_clock_is_told(ahead_s: float, verdict: Verdict, said: str) -> None:
    check = check_clock(ahead_s)
    assert check.verdict is verdict
    assert said in check.found
    assert bool(check.advice) == (verdict is not Verdict.OK)


def test_how_updates_travel_is_told_with_what_to_open() -> None:
    assert check_transfers("") == []
    (well,) = check_transfers("bulk lines to TCP port 7445 of isles.example")
    assert (well.verdict, well.advice) == (Verdict.OK, "")
    (held_up,) = check_transfers(f"gRPC: TCP port 7445 of isles.example {BLOCKED}: timed out")
    assert held_up.verdict is Verdict.WARNED
    assert "let this machine connect to that port" in held_up.advice


def test_an_empty_folder_is_told_what_it_lacks(tmp_path: Path) -> None:
    assert _verdicts(tmp_path / "nowhere") == {
        "software": Verdict.OK,
        "identity": Verdict.FAILED,
        "disk": Verdict.OK,
        "device": Verdict.OK,
    }


def test_a_site_hears_of_settings_policy_apps_scripts_and_data(tmp_path: Path) -> None:
    (tmp_path / "there.npz").touch()
    (tmp_path / "site.toml").write_text(
        '[site]\nname = "ward"\nserver = "127.0.0.1:1"\n'
        '[apps.known]\ndistribution = "atoll-examples"\nentry_point = "digits"\n'
        '[apps.other]\ndistribution = "atoll-examples"\nentry_point = "digits"\n'
        '[apps.absent]\ndistribution = "no-such-distribution"\nentry_point = "x"\n'
        f'[scripts.old]\npath = "{tmp_path / "there.npz"}"\n'
        f'[scripts.away]\npath = "{tmp_path / "gone.py"}"\n'
        f'[data.known]\npath = "{tmp_path / "there.npz"}"\n'
        f'[data.absent]\npath = "{tmp_path / "gone.npz"}"\n'
    )
    (tmp_path / "policy.toml").write_text(
        'researchers = ["ada"]\nallowed_apps = [{ name = "known", hash = "any-installed" }]\n'
    )
    found = _verdicts(tmp_path)
    assert {name: verdict for name, verdict in found.items() if " " in name or name == "policy"} == {
        "policy": Verdict.OK,
        "app known": Verdict.OK,
        "app other": Verdict.WARNED,  # installed, and the policy does not allow it
        "app absent": Verdict.FAILED,
        "script old": Verdict.OK,
        "script away": Verdict.FAILED,
        "data known": Verdict.OK,
        "data absent": Verdict.FAILED,
    }


def test_whatever_is_not_well_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(
        '[site]\nname = "ward"\nserver = "127.0.0.1:1"\n'
        '[apps.other]\ndistribution = "atoll-examples"\nentry_point = "digits"\n'
        '[apps.absent]\ndistribution = "no-such-distribution"\nentry_point = "x"\n'
        f'[scripts.away]\npath = "{tmp_path / "gone.py"}"\n'
        f'[data.absent]\npath = "{tmp_path / "gone.npz"}"\n'
    )
    (tmp_path / "policy.toml").write_text("researchers = []\nmax_rounds = 0\n")
    told = {check.name: f"{check.found}; {check.advice}" for check in check_home(tmp_path)}
    for name, words in {
        "identity": "join first",
        "policy": "line 2: max_rounds = 0: wanted at least 1; until that is mended, every run is refused",
        "app other": "put name and hash into allowed_apps of policy.toml",
        "app absent": "pip install it",
        "script away": "correct its path under [scripts] of site.toml",
        "data absent": "put it there, or correct the path under [data.absent]",
    }.items():
        assert words in told[name]


@pytest.mark.parametrize(
    ("state", "verdict", "words"),
    [
        ("active", Verdict.OK, ""),
        ("pending", Verdict.WARNED, "federation sign"),
        ("revoked", Verdict.WARNED, "site add"),
    ],
)
def test_a_site_that_is_not_on_the_member_list_hears_how_it_gets_there(
    state: str, verdict: Verdict, words: str
) -> None:
    check = check_membership(state)
    assert check.verdict is verdict
    assert words in check.advice
    assert bool(check.advice) == (state != "active")


def test_settings_with_a_fault_do_not_hide_the_rest(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("[site]\nnome = 1\n")
    found = _verdicts(tmp_path)
    assert found["settings"] is Verdict.FAILED
    assert found["disk"] is Verdict.OK


def test_a_device_that_is_absent_is_told(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('[site]\nname = "ward"\n[devices]\ndevice = "cuda:63"\n')
    assert _verdicts(tmp_path)["device"] is Verdict.FAILED
