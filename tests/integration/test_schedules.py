"""Whom a schedule asks by label, and what of a model travels by fragment: on real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration.federation import Federation
from integration.trial import trial_job

pytestmark = pytest.mark.chaos  # what they are made of has tests of its own
REGIONS = {"site-1": "north", "site-2": "north", "site-3": "south"}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server and three running sites, of which two are in the north."""
    federation = Federation(tmp_path_factory.mktemp("regions"))
    try:
        federation.make()
        federation.start_server()
        federation.enrol_researcher()
        for name, region in REGIONS.items():
            federation.enrol_site(name)
            federation.label(name, region)
        federation.sign()
        for name in REGIONS:
            federation.start_site(name)
        yield federation
    finally:
        federation.close()


def test_a_round_with_fragments_moves_the_bytes_of_one_of_them(federation: Federation) -> None:
    """Up and down: of a model of 64 KiB that is cut in four."""
    job = trial_job(rounds=6, strategy='kind = "local_sgd"', values="hidden = 512", work="batch_size = 32").replace(
        'kind = "rounds", min = 3', 'kind = "every_steps", steps = 4, fragments = {fragments}, min = 3'
    )
    records = {count: federation.finish(job.replace("{fragments}", str(count)))["rounds"] for count in (1, 4)}
    whole, parts = records[1][2:5], records[4][2:5]
    assert all(record["sites"] == 3 for record in [*whole, *parts])
    for way in ("bytes_up", "bytes_down"):
        assert sum(record[way] for record in parts) < 0.9 * sum(record[way] for record in whole)
        largest = 3 * 4 * 30 * 512  # the first layer's weights at three sites: 15 of 17 parts of this model
        assert max(record[way] for record in parts) < largest * 1.05
        assert min(record[way] for record in parts) < largest / 10


def test_sites_without_the_labels_of_a_job_are_not_asked(federation: Federation) -> None:
    state = federation.finish(trial_job(schedule='where = { region = "north" }', work="steps = 2"))
    assert [record["sites"] for record in state["rounds"]] == [2, 2]
