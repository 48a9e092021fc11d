"""The job file: every section's typos are named, and what this version lacks is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.aggregation.strategy import resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import JOB_BYTES, Job, decode_job, load_job, located, parse_duration_s, parse_job

GOOD = """
[job]
name = "fashion"
app = "fashion"
rounds = 20
[app]
lr = 0.05
[strategy]
kind = "fedavg"
schedule = { kind = "rounds", fraction = 1.0, min = 8, quorum = 6, deadline = "10m" }
work = { epochs = 1 }
[evaluation]
every = 2
[training]
threads = 2
"""


def job_from(tmp_path: Path, text: str) -> Job:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return load_job(path)


def test_a_good_job(tmp_path: Path) -> None:
    job = job_from(tmp_path, GOOD)
    assert job.data_name == "fashion"
    assert job.app == {"lr": 0.05}
    assert job.strategy.schedule is not None
    assert job.strategy.schedule.options == {"fraction": 1.0, "min": 8, "quorum": 6, "deadline": "10m"}
    assert job.strategy.work.num_epochs == 1
    assert decode_job(job.canonical()) == job
    assert decode_job(job.canonical()).canonical() == job.canonical()


TYPOS = {
    ("[job]", "[jbo]"): ("'jbo'", "'job'"),
    ("rounds = 20", "round = 20"): ("'job.round'", "'rounds'"),
    ('app = "fashion"', 'apps = "fashion"'): ("'job.apps'", "'app'"),
    ("[strategy]", "[stratgy]"): ("'stratgy'", "'strategy'"),
    ("schedule = {", "shedule = {"): ("'strategy.shedule'", "'schedule'"),
    ("epochs = 1", "epoch = 1"): ("'strategy.work.epoch'", "'epochs'"),
    ("[evaluation]", "[evalution]"): ("'evalution'", "'evaluation'"),
    ("every = 2", "evry = 2"): ("'evaluation.evry'", "'every'"),
    ("[training]", "[trainig]"): ("'trainig'", "'training'"),
    ("threads = 2", "thread = 2"): ("'training.thread'", "'threads'"),
    ("work = {", "sum = { bond = 3.0 }\nwork = {"): ("'strategy.sum.bond'", "'bound'"),
}


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_names_the_nearest_key(tmp_path: Path, typo: tuple[str, str]) -> None:
    right, wrong = typo
    assert right in GOOD
    with pytest.raises(ConfigError) as caught:
        job_from(tmp_path, GOOD.replace(right, wrong, 1))
    found, nearest = TYPOS[typo]
    line = next(
        n for n, text in enumerate(GOOD.replace(right, wrong, 1).splitlines(), 1) if wrong.split("\n")[0] in text
    )
    assert f"job.toml, line {line}: unknown key {found}; did you mean {nearest}?" in str(caught.value)


def test_a_key_near_to_none_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known keys: app, continues, data, name, rounds"):
        job_from(tmp_path, GOOD.replace("rounds = 20", "rounds = 20\nzzzzz = 1"))


BAD_VALUES = {
    ("rounds = 20", "rounds = 0"): "job.toml, line 5: job.rounds = 0: wanted at least 1",
    ("rounds = 20", "rounds = 2.5"): "job.rounds = 2.5: wanted a whole number",
    ("rounds = 20", "rounds = [\n  20\n]"): "job.toml, line 5: job.rounds = [20]: wanted a whole number",
    ('app = "fashion"', "app = 3"): 'job.toml, line 4: job.app = 3: wanted text in quotes, "..."',
    ("every = 2", 'server = "perhaps"'): "evaluation.server = 'perhaps': wanted true or false",
    ("work = { epochs = 1 }", "work = 1"): "strategy.work = 1: wanted a table, { key = value }",
    ('kind = "fedavg"', 'buffers = "sum"'): "strategy.buffers = 'sum': wanted 'mean', 'local' or 'first'",
    ("rounds = 20", 'rounds = "many"'): "job.rounds = 'many'",
    ("rounds = 20", "rounds = 20\nseed = -1"): "job.seed = -1",
    ("rounds = 20", 'rounds = 20\nwait_for_sites = "soon"'): "wanted a duration",
    ("rounds = 20", 'rounds = 20\nsites = ["Bad Name"]'): "job.sites.0 = 'Bad Name': wanted 1 to 63",
    ('name = "fashion"', 'name = "../../etc"'): "job.name = '../../etc': wanted 1 to 63",
    ("epochs = 1", "epochs = 1, steps = 5"): "job.toml, line 11: strategy.work: give epochs or steps, not both",
    ("lr = 0.05", "lr = nan"): "app.lr = nan: wanted a finite number",
    ("lr = 0.05", "since = 2020-01-01"): "app.since = 2020-01-01: write dates and times as text",
    ("fraction = 1.0", "fraction = inf"): "strategy.schedule.fraction = inf",
    ('kind = "rounds", ', ""): (
        "job.toml, line 10: strategy.schedule.kind is missing; add `kind = ...` to [strategy.schedule]"
    ),
    ("threads = 2", "threads = 2000"): "training.threads = 2000",
    ("rounds = 20", ""): "job.toml, line 2: job.rounds is missing; add `rounds = ...` to [job]",
    ("[job]", "[job"): "not TOML",
}


@pytest.mark.parametrize("change", BAD_VALUES)
def test_a_bad_value_is_named_with_its_bound(tmp_path: Path, change: tuple[str, str]) -> None:
    right, wrong = change
    assert right in GOOD
    with pytest.raises(ConfigError) as caught:
        job_from(tmp_path, GOOD.replace(right, wrong, 1))
    assert BAD_VALUES[change] in str(caught.value)
    assert "job.toml" in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        "[privacy.differential_privacy]\nepsilon = 1.0",
        "[differential_privacy]\nepsilon = 1.0",
    ],
)
def test_what_this_version_lacks_is_refused_by_name(tmp_path: Path, table: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.toml, line 16: .*not in this version of Atoll; remove the table"):
        job_from(tmp_path, GOOD + table)


def test_the_terms_of_secure_aggregation_are_read(tmp_path: Path) -> None:
    job = job_from(tmp_path, GOOD + "[privacy]\nsecure_aggregation = { threat = 'semi-honest', metrics = ['b', 'a'] }")
    assert job.secure_aggregation is not None
    assert (job.secure_aggregation.threat, job.secure_aggregation.metrics) == ("semi-honest", ("a", "b"))
    assert job.secure_aggregation.fewest_survivors == 5
    assert decode_job(job.canonical()) == job


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        ("", r"line 16: privacy\.secure_aggregation is missing"),
        ("secure_aggregation = { fewest_survivors = 2 }", r"privacy\.secure_aggregation\.fewest_survivors = 2: .*3"),
        ("secure_aggregation = { bits = 8 }", r"privacy\.secure_aggregation\.bits = 8: .*16.*32"),
        ("secure_aggregation = { corrupt = 1 }", r"privacy\.secure_aggregation\.corrupt = 1: .*1"),
        ("secure_aggregation = { bound = 0 }", r"privacy\.secure_aggregation\.bound = 0"),
        ("secure_aggregation = { threat = 'none' }", r"privacy\.secure_aggregation\.threat = 'none'"),
        ("secure_aggregation = { metrics = ['a', 'a'] }", r"wanted printable names, each once"),
        ("secure_aggregation = { deadline = '0s' }", r"privacy\.secure_aggregation\.deadline = '0s'"),
        ("secure_aggregation = { tries = 3 }", r"privacy\.secure_aggregation\.tries"),
    ],
)
def test_terms_out_of_bounds_are_refused_by_name(tmp_path: Path, terms: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        job_from(tmp_path, GOOD + "[privacy]\n" + terms)


def test_differential_privacy_is_called_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="differential privacy is not in this version"):
        job_from(tmp_path, GOOD + "[privacy.differential_privacy]\nepsilon = 1.0")


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("quorum = 6", "qourum = 6", r"line 10: strategy\.schedule\.qourum: .*did you mean 'quorum'\?"),
        ('kind = "rounds"', 'kind = "round"', r"line 10: strategy\.schedule\.kind = 'round' .*did you mean 'rounds'\?"),
        ('kind = "fedavg"', 'kind = "fedavgg"', r"line 9: strategy\.kind = 'fedavgg' .*did you mean 'fedavg'\?"),
        ("fraction = 1.0", "fraction = 2.0", r"line 10: strategy\.schedule\.fraction = 2\.0: wanted at most 1$"),
        ("[evaluation]", "rule.kind = 'fedprox'\n[evaluation]", r"line 12: strategy\.rule\.mu is missing"),
    ],
)
def test_a_mistake_in_a_part_of_the_strategy_names_the_line_too(
    tmp_path: Path, right: str, wrong: str, told: str
) -> None:
    """The parts know their options, and not the file."""
    job = job_from(tmp_path, GOOD.replace(right, wrong, 1))
    with pytest.raises(ConfigError, match=rf"job\.toml, {told}") as caught, located(tmp_path / "job.toml"):
        resolve(job)
    assert caught.value.key.startswith("strategy.")


def test_errors_of_other_files_stay_as_they_are(tmp_path: Path) -> None:
    job_from(tmp_path, GOOD)
    for error in (ConfigError("user.toml: unknown key 'jbo'", key="jbo"), ConfigError("no key at all")):
        with pytest.raises(ConfigError) as caught, located(tmp_path / "job.toml"):
            raise error
        assert caught.value is error


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; give the path of a job file"):
        load_job(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_job(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[job]\nname = "\xe4"')
    with pytest.raises(ConfigError, match=r"latin\.toml, line 2: not UTF-8 text; save the file as UTF-8"):
        load_job(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 5_000, b"{}", b" " * (JOB_BYTES + 1)],
)
def test_hostile_jobs_from_a_peer(data: bytes) -> None:
    with pytest.raises(ConfigError):
        decode_job(data)


def test_deep_tables_are_refused() -> None:
    deep: dict[str, object] = {}
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(ConfigError, match="nested"):
        parse_job({"job": {"name": "n", "app": "a", "rounds": 1}, "app": deep})


@given(st.binary(max_size=100))
def test_any_bytes_give_a_job_or_the_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        decode_job(data)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 d ", 172_800), ("250ms", 0.25), (5, 5)]
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "-1s", "1y", 0, -1, True, None, float("nan"), float("inf"), "99999d"])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration_s(text)


def script_job(text: str = "", strategy: Mapping[str, object] | None = None) -> Job:
    table: dict[str, object] = {"job": {"name": "a", "script": "old", "rounds": 1}, **tomllib.loads(text)}
    return parse_job({**table, "strategy": strategy} if strategy else table)


def test_a_job_names_an_app_or_a_script() -> None:
    job = script_job()
    assert (job.job.app, job.job.code, job.data_name) == (None, "old", None)
    assert not job.evaluation.sites  # nobody asks a script to judge a model
    assert decode_job(job.canonical()) == job
    for section in ({}, {"app": "a", "script": "b"}):
        with pytest.raises(ConfigError, match="job: name an app or a script, and not both"):
            parse_job({"job": {"name": "a", "rounds": 1, **section}})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[evaluation]\nsites = true", r"evaluation\.sites = true"),
        ("[evaluation]\nserver = true", r"evaluation\.server = true"),
        ("[evaluation]\nonly = true", r"evaluation\.only = true"),
        ("[parallel]\ndp_shard = 2", r"\[parallel\]"),
        ("[statistics]", r"\[statistics\]"),
    ],
)
def test_what_goes_with_apps_alone_is_refused_of_scripts(text: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key + r" with job\.script = 'old': "):
        script_job(text)


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        ({"kind": "fedprox", "rule": {"kind": "fedprox", "mu": 0.1}}, "strategy.rule.kind = fedprox"),
        ({"kind": "diloco", "schedule": {"kind": "every_steps", "steps": 4, "fragments": 2}}, "fragments = 2"),
        ({"local": ["head.*"]}, "strategy.local = head."),
        ({"buffers": "local"}, "strategy.buffers = local"),
        ({"parameters": "trainable"}, "strategy.parameters = trainable"),
        ({"download": {"kind": "int8"}}, "strategy.download = a codec"),
        ({"codec": {"kind": "top_k", "fraction": 0.1, "error_feedback": True}}, "strategy.codec = top_k"),
    ],
)
def test_strategies_that_need_an_app_are_refused_of_scripts(strategy: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.* with job.script = 'old': that "):
        resolve(script_job(strategy=strategy))
