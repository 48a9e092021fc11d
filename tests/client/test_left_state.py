"""What a run leaves at a site, for a run that goes on from it."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.client.home import SiteHome
from atoll.client.left_state import KEPT_RUNS, app_folder, set_aside, take_up
from atoll.wire.names import new_run_id


def with_state(home: SiteHome, text: str) -> str:
    run = new_run_id()
    app_folder(home, run).mkdir(parents=True)
    (app_folder(home, run) / "00000003.state.safetensors").write_text(text)
    (home.run_state(run) / "worker").mkdir()
    return run


def state_of(home: SiteHome, run: str) -> str:
    return (app_folder(home, run) / "00000003.state.safetensors").read_text()


def test_the_state_of_a_run_that_ended_goes_on_in_another(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    old, new, third = with_state(home, "heads"), new_run_id(), new_run_id()
    set_aside(home, old)
    assert not home.run_state(old).exists()
    for run in (new, third):  # two may go on from one
        home.run_state(run).mkdir(parents=True)
        assert take_up(home, run, old)
        assert state_of(home, run) == "heads"


def test_what_the_run_has_of_its_own_stays(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    old, new = with_state(home, "old"), with_state(home, "new")
    set_aside(home, old)
    assert take_up(home, new, old)
    assert state_of(home, new) == "new"


def test_a_run_that_is_only_ending_is_looked_at_where_it_is(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    old, new = with_state(home, "heads"), new_run_id()
    home.run_state(new).mkdir(parents=True)
    assert take_up(home, new, old)
    assert state_of(home, new) == "heads"


def test_a_copy_that_was_broken_off_is_made_again(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    old, new = with_state(home, "heads"), new_run_id()
    set_aside(home, old)
    draft = app_folder(home, new).with_suffix(".draft")
    draft.mkdir(parents=True)
    (draft / "00000003.state.safetensors").write_text("he")
    assert take_up(home, new, old)
    assert state_of(home, new) == "heads"


def test_a_site_that_has_nothing_begins_afresh(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    old, new = new_run_id(), new_run_id()
    set_aside(home, old)
    home.run_state(new).mkdir(parents=True)
    assert not take_up(home, new, old)
    assert not app_folder(home, new).exists()


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    runs = []
    for number in range(KEPT_RUNS + 2):
        runs.append(with_state(home, str(number)))
        set_aside(home, runs[-1])
        os.utime(home.state / "ended" / runs[-1], (number, number))  # a clock that is coarse does not matter
    assert {path.name for path in (home.state / "ended").iterdir()} == set(runs[-KEPT_RUNS:])
