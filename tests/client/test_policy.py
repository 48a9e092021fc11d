"""The policy refuses unless the file says yes on every count."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from samples.secagg_session import plan_of

from atoll.client.policy import (
    STARTER_POLICY,
    Policy,
    Request,
    check_request,
    consent_to_session,
    least_cell,
    load_policy,
    tasks_of,
    zones_of,
)
from atoll.wire.errors import ConfigError, PolicyRefused
from atoll.wire.job import parse_job
from atoll.wire.privacy_section import SecureAggregationSection

HASH = "ab" * 32
REQUEST = Request(
    run="run-1", app="digits", app_hash=HASH, num_rounds=20, fewest_sites=3, submitted_by="alice", zones=()
)
ALLOWING = f"""
allowed_apps = [{{ name = "digits", hash = "{HASH}" }}]
researchers = ["alice"]
min_cohort = 3
max_rounds = 20
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(text)
    return path


def test_what_is_allowed_passes(tmp_path: Path) -> None:
    check_request(written(tmp_path, ALLOWING), REQUEST, site="north")


@pytest.mark.parametrize(
    ("change", "key", "advice"),
    [
        ({"app": "other"}, "allowed_apps", "site's administrator has to add it"),
        ({"app_hash": "cd" * 32}, "allowed_apps", "site's administrator has to look at that version and add its hash"),
        ({"submitted_by": "mallory"}, "researchers", "site's administrator has to add the name to researchers"),
        ({"fewest_sites": 2}, "min_cohort", "raise min (and quorum, where it is set) of the job's schedule to 3"),
        ({"num_rounds": 21}, "max_rounds", "submit it with fewer, or ask the site's administrator"),
        ({"tasks": ("statistics",)}, "tasks", "the run asks for 'statistics', which is not in tasks; ask the site's"),
        ({"zones": ("lab",)}, "zones", "take it out of the job's schedule, or ask the site's administrator"),
    ],
)
def test_each_count_refuses_by_itself(tmp_path: Path, change: dict[str, object], key: str, advice: str) -> None:
    request = replace(REQUEST, **change)  # type: ignore[arg-type]
    with pytest.raises(PolicyRefused) as refused:
        check_request(written(tmp_path, ALLOWING), request, site="north")
    assert (refused.value.field, refused.value.site, refused.value.run) == (key, "north", "run-1")
    assert "north" in refused.value.message
    assert advice in refused.value.message


SECURE = SecureAggregationSection(threat="active", corrupt=0.1, fewest_survivors=5)
TRAINS = replace(REQUEST, secure=SECURE, tasks=("train",))


@pytest.mark.parametrize(
    ("policy", "change", "key", "told"),
    [
        ("{}", {"secure": None}, "require_secagg", "add [privacy] secure_aggregation to the job"),
        ("{}", {"zones": ("lab",)}, "require_secagg", "neighbours in zone 'lab'"),
        ("{}", {"tasks": ("train", "evaluate")}, "require_secagg", "set evaluation.sites = false"),
        ("{}", {"secure": {"threat": "semi-honest"}}, "require_secagg.threat", "semi-honest"),
        (
            "{}",
            {"secure": {"corrupt": 0.05}},
            "require_secagg.corrupt",
            "corrupt is 0.05, require_secagg.corrupt is 0.1",
        ),
        ("{}", {"secure": {"fewest_survivors": 4}}, "require_secagg.fewest_survivors", "is 4, require_secagg"),
        (
            "{ fewest_survivors = 7 }",
            {},
            "require_secagg.fewest_survivors",
            "is 5, require_secagg.fewest_survivors is 7",
        ),
        ("{ corrupt = 0.2 }", {}, "require_secagg.corrupt", "is 0.1, require_secagg.corrupt is 0.2"),
    ],
)
def test_what_secure_aggregation_has_to_hold(
    tmp_path: Path, policy: str, change: dict[str, object], key: str, told: str
) -> None:
    """What is absent in the table is the careful side: an active server, a tenth corrupt, five survivors."""
    path = written(tmp_path, f'{ALLOWING}\nzones = ["lab"]\nrequire_secagg = {policy}\n')
    if isinstance(terms := change.get("secure"), dict):
        change = {"secure": SECURE.model_copy(update=terms)}
    with pytest.raises(PolicyRefused) as refused:
        check_request(path, replace(TRAINS, **change), site="north")  # type: ignore[arg-type]
    assert refused.value.field == key
    assert told in refused.value.message
    assert refused.value.bound
    check_request(written(tmp_path, f"{ALLOWING}\nrequire_secagg = {{}}\n"), TRAINS, site="north")


def test_a_site_may_take_less_but_not_less_than_three(tmp_path: Path) -> None:
    few = replace(TRAINS, secure=SECURE.model_copy(update={"fewest_survivors": 3}))
    check_request(written(tmp_path, f"{ALLOWING}\nrequire_secagg = {{ fewest_survivors = 3 }}\n"), few, site="north")
    with pytest.raises(ConfigError, match="require_secagg"):
        load_policy(written(tmp_path, f"{ALLOWING}\nrequire_secagg = {{ fewest_survivors = 2 }}\n"))


@pytest.mark.parametrize(
    ("policy", "terms", "key"),
    [
        ("", {"fewest": 2}, "min_cohort"),
        ("require_secagg = {}", {"fewest": 4}, "require_secagg.fewest_survivors"),
        ("require_secagg = {}", {"threat": "semi-honest"}, "require_secagg.threat"),
        ("require_secagg = {}", {"corrupt": 0.0}, "require_secagg.corrupt"),
        ("require_secagg = { organisations = 11 }", {}, "require_secagg.organisations"),
    ],
)
def test_a_session_is_looked_at_too(tmp_path: Path, policy: str, terms: dict[str, object], key: str) -> None:
    path = written(tmp_path, f"{ALLOWING}\n{policy}\n")
    good = {"corrupt": 0.1, "fewest": 5}
    with pytest.raises(PolicyRefused) as refused:
        consent_to_session(path, plan_of(10, **(good | terms)), site="north", run="run-1")  # type: ignore[arg-type]
    assert refused.value.field == key
    assert consent_to_session(path, plan_of(11, **good), site="north", run="run-1") is False  # type: ignore[arg-type]
    path = written(tmp_path, f"{ALLOWING}\nrequire_secagg = {{ across_runs = true }}\n")
    assert consent_to_session(path, plan_of(10, **good), site="north", run="run-1") is True  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("allowed_apps", 'allowed_apps = [{ name = "digits", hash = "any-installed" }]'),
        ("researchers", 'researchers = ["alice"]'),
    ],
)
def test_what_grants_is_nothing_where_absent(tmp_path: Path, key: str, line: str) -> None:
    lines = {
        "allowed_apps": f'allowed_apps = [{{ name = "digits", hash = "{HASH}" }}]',
        "researchers": 'researchers = ["*"]',
    }
    del lines[key]
    with pytest.raises(PolicyRefused) as refused:
        check_request(written(tmp_path, "\n".join(lines.values())), REQUEST, site="north")
    assert refused.value.field == key
    check_request(written(tmp_path, "\n".join([*lines.values(), line])), REQUEST, site="north")


def test_no_policy_refuses_everything(tmp_path: Path) -> None:
    with pytest.raises(PolicyRefused, match=r"no policy.*administrator has to write policy\.toml"):
        check_request(tmp_path / "policy.toml", REQUEST, site="north")


def test_the_starter_allows_nothing_and_explains_each_key(tmp_path: Path) -> None:
    path = written(tmp_path, STARTER_POLICY)
    assert load_policy(path) == Policy()
    with pytest.raises(PolicyRefused):
        check_request(path, replace(REQUEST, fewest_sites=1000, num_rounds=1), site="north")
    lines = STARTER_POLICY.splitlines()
    for key in Policy.model_fields:
        at = next(i for i, line in enumerate(lines) if line.removeprefix("# ").startswith(f"{key} = "))
        assert lines[at - 1].startswith("# ")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("\nallowed_app = []", "policy.toml, line 2: unknown key 'allowed_app'; did you mean 'allowed_apps'?"),
        (
            'zones = []\nallowed_apps = [\n  { name = "digits", hash = "latest" }\n]',
            "policy.toml, line 2: allowed_apps.0.hash = 'latest': wanted the 64 hex digits that `atoll site status` prints",
        ),
        ("min_cohort = 0", "policy.toml, line 1: min_cohort = 0: wanted at least 1"),
        ('researchers = "ada"', "line 1: researchers = 'ada': wanted a list, [...]"),
        ("max_rounds = ", "policy.toml: not TOML: Invalid value (at end of document); correct it there"),
    ],
)
def test_a_faulty_policy_says_where_and_refuses_everything(tmp_path: Path, text: str, hint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load_policy(path)
    with pytest.raises(PolicyRefused, match=r"fault.*`atoll doctor` there names the line"):
        check_request(path, REQUEST, site="north")


def test_zones_are_found_at_any_depth_of_the_schedule() -> None:
    job = {"job": {"name": "j", "app": "a", "rounds": 1}}
    inner = {"kind": "every_step", "zone": "lab"}
    schedule = {"kind": "hierarchical", "inner": inner, "groups": [{"zones": ["ward", "lab"]}]}
    assert zones_of(parse_job(job)) == ()
    assert zones_of(parse_job({**job, "strategy": {"schedule": schedule}})) == ("lab", "ward")


def test_what_a_job_asks_of_its_sites() -> None:
    table = {"job": {"name": "x", "app": "x", "rounds": 1}}
    for more, tasks in (
        ({}, ("train", "evaluate")),
        ({"evaluation": {"sites": False}}, ("train",)),
        ({"evaluation": {"only": True}}, ("evaluate",)),
        ({"statistics": {}}, ("statistics",)),
    ):
        assert tasks_of(parse_job({**table, **more})) == tasks


def test_the_least_cell_is_the_sites_own_and_read_anew(tmp_path: Path) -> None:
    path = written(tmp_path, ALLOWING + 'tasks = ["statistics"]')
    assert least_cell(path, site="north", run="run-1") == 10
    written(tmp_path, ALLOWING + 'tasks = ["train", "statistics"]\nmin_cell_count = 25')
    assert least_cell(path, site="north", run="run-1") == 25
    written(tmp_path, ALLOWING)
    with pytest.raises(PolicyRefused, match="'statistics' is not in tasks") as refused:
        least_cell(path, site="north", run="run-1")
    assert refused.value.field == "tasks"
    path.unlink()
    with pytest.raises(PolicyRefused, match="no policy"):
        least_cell(path, site="north", run="run-1")


def test_a_label_that_is_called_zone_connects_nobody() -> None:
    schedule = {"kind": "rounds", "where": {"zone": "north"}}
    assert (
        zones_of(parse_job({"job": {"name": "j", "app": "a", "rounds": 1}, "strategy": {"schedule": schedule}})) == ()
    )
