"""Version 0: built by the app on the researcher's machine, the same bytes for the same seed."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, cast

import pytest
from samples.bench import install

from atoll.client.first_version import app_entry, build_first_version
from atoll.client.people import AppTable, Person, PersonSettings
from atoll.cluster.registry import hash_distribution
from atoll.transport.identity import Identity
from atoll.wire.errors import AppFailed, ConfigError, Unknown
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest


def _person(home: Path, **apps: AppTable) -> Person:
    nobody = cast(Identity, None)  # building a model needs no identity
    return Person(home=home, identity=nobody, settings=PersonSettings(apps=apps))


def _job(seed: int = 0, **app: Any) -> Job:
    return parse_job({"job": {"name": "digits", "app": "digits", "rounds": 1, "seed": seed}, "app": app})


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    person = _person(tmp_path)
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        first = build_first_version(person, _job(seed), tmp_path / name)
        data = first.path.read_bytes()
        assert len(data) == Manifest.decode(first.manifest).num_bytes
        assert first.crc32 == zlib.crc32(data)
        assert first.app_hash == hash_distribution("atoll-examples")
        found.append(data)
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_the_app_table_of_the_job_reaches_the_app(tmp_path: Path) -> None:
    first = build_first_version(_person(tmp_path), _job(hidden=8), tmp_path)
    assert Manifest.decode(first.manifest)["0.weight"].shape == (8, 64)


def test_an_option_that_the_app_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'app\.hiden'; did you mean 'hidden'\?"):
        build_first_version(_person(tmp_path), _job(hiden=8), tmp_path)


def test_the_settings_stand_before_what_is_installed(tmp_path: Path) -> None:
    person = _person(tmp_path, digits=AppTable(distribution="no-such-distribution"))
    assert app_entry(person, "digits").distribution == "no-such-distribution"
    with pytest.raises(Unknown, match="no-such-distribution"):
        build_first_version(person, _job(), tmp_path)


def test_an_app_may_have_another_name_here(tmp_path: Path) -> None:
    person = _person(tmp_path, mine=AppTable(distribution="atoll-examples", entry_point="digits"))
    assert app_entry(person, "mine").entry_point == "digits"


def test_an_app_that_nobody_brings_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"app 'digit' is not known .*user.toml.*digits"):
        app_entry(_person(tmp_path), "digit")


def test_an_app_that_builds_no_model_says_what_to_correct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import atoll\nclass One(atoll.App):\n    def model(self): return 1 / 0\n    data = loss = optimizer = model\n"
    )
    install(tmp_path, name="modelless", files={"modelless.py": code}, entry_points={"digits": "modelless:One"})
    monkeypatch.syspath_prepend(str(tmp_path))
    person = _person(tmp_path, digits=AppTable(distribution="modelless"))
    said = r"app 'digits' builds no model: ZeroDivisionError: .*; correct the app, or what the job says in \[app\]\n"
    with pytest.raises(AppFailed, match=said):
        build_first_version(person, _job(), tmp_path)
