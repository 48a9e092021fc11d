"""What every database behind the store must do: run over a SQLite file and over a real PostgreSQL, always both."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from samples.postgresql import postgresql
from sqlalchemy import create_engine, text

from atoll.server.database import Database
from atoll.server.records import Certificate, RoundRow, RunRow, Standing
from atoll.server.store import MAX_CERTIFICATES, Store
from atoll.wire.errors import BadToken, LocalError, Malformed, NotAllowed, Stale, TooLarge, Unknown

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
HOUR = timedelta(hours=1)
SECRET = hashlib.sha256(b"the token's secret").digest()


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """A PostgreSQL server of these tests alone."""
    with postgresql() as url:
        yield url


def emptied(url: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state.sqlite'}"
    return emptied(request.getfixturevalue("postgresql_url"))


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store.open(url)
    yield opened
    opened.close()


def certificate(serial: str = "0a", expires: datetime = NOW + 24 * HOUR) -> Certificate:
    return Certificate(serial=serial, expires=expires)


def run_row(run: str = "01RUN", **changes: object) -> RunRow:
    row = RunRow(
        run=run,
        name="digits",
        job=b'{"job":{}}',
        app_hash="ab" * 32,
        submitted_by="ada",
        crc32=0xFFFFFFFF,
        status="uploading",
        reason=None,
        submitted_at=NOW,
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def round_row(round: int = 1, **changes: object) -> RoundRow:
    row = RoundRow(round=round, version=round, record=b"record", model_crc32=0xFFFFFFFF, num_bytes=1 << 40)
    return replace(row, **changes)  # type: ignore[arg-type]


def enrol(store: Store, name: str = "site-1", role: str = "site", secret: bytes = SECRET, serial: str = "0a") -> None:
    store.invite(name, role, "Clinic", secret, NOW + HOUR)
    key = b"k" * 32 if role == "site" else None
    store.redeem(name, secret, NOW, certificate=certificate(serial), signing_key=key)


class TestTokens:
    def test_a_token_admits_once(self, store: Store) -> None:
        store.invite("site-1", "site", "Clinic", SECRET, NOW + HOUR)
        invite = store.redeem("site-1", SECRET, NOW, certificate=certificate(), signing_key=b"k" * 32)
        assert (invite.name, invite.role, invite.organisation, invite.expires) == (
            "site-1",
            "site",
            "Clinic",
            NOW + HOUR,
        )
        with pytest.raises(BadToken, match=r"used already; ask the operator for a new one"):
            store.redeem("site-1", SECRET, NOW, certificate=certificate("0b"), signing_key=None)
        assert store.lookup("site", "site-1") == Standing(active=True, serials=frozenset({"0a"}))

    def test_looking_does_not_use_it_up(self, store: Store) -> None:
        store.invite("site-1", "site", "Clinic", SECRET, NOW + HOUR)
        store.invited("site-1", SECRET, NOW)
        store.invited("site-1", SECRET, NOW)
        assert store.lookup("site", "site-1") is None

    def test_wrong(self, store: Store) -> None:
        store.invite("site-1", "site", "Clinic", SECRET, NOW + HOUR)
        with pytest.raises(BadToken, match="token is wrong"):
            store.invited("site-1", bytes(32), NOW)

    def test_expired(self, store: Store) -> None:
        store.invite("site-1", "site", "Clinic", SECRET, NOW + HOUR)
        with pytest.raises(BadToken, match="expired at 2030-01-02 04:04 UTC"):
            store.redeem("site-1", SECRET, NOW + HOUR, certificate=certificate(), signing_key=None)
        assert store.lookup("site", "site-1") is None

    def test_for_another_name(self, store: Store) -> None:
        store.invite("site-1", "site", "Clinic", SECRET, NOW + HOUR)
        with pytest.raises(BadToken, match="not for site-2"):
            store.invited("site-2", SECRET, NOW)

    def test_a_new_invitation_replaces_the_unused_one(self, store: Store) -> None:
        store.invite("site-1", "site", "Clinic", SECRET, NOW + HOUR)
        store.invite("site-1", "site", "Clinic", b"n" * 32, NOW + HOUR)
        with pytest.raises(BadToken, match="newer one replaced it"):
            store.invited("site-1", SECRET, NOW)
        assert store.invited("site-1", b"n" * 32, NOW).name == "site-1"

    def test_many_callers_one_winner(self, store: Store) -> None:
        store.invite("site-1", "site", "Clinic", SECRET, NOW + HOUR)
        outcomes: list[str] = []
        start = threading.Barrier(8)

        def redeem(serial: str) -> None:
            start.wait()
            try:
                store.redeem("site-1", SECRET, NOW, certificate=certificate(serial), signing_key=None)
                outcomes.append("in")
            except BadToken:
                outcomes.append("out")

        threads = [threading.Thread(target=redeem, args=(f"{n:02x}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["in"] + ["out"] * 7


class TestMembers:
    def test_a_member_is_not_invited_again(self, store: Store) -> None:
        enrol(store)
        with pytest.raises(NotAllowed, match="already a site; revoke it before"):
            store.invite("site-1", "site", "Clinic", b"n" * 32, NOW + HOUR)

    def test_a_name_keeps_its_role(self, store: Store) -> None:
        store.invite("ada", "researcher", "", SECRET, NOW + HOUR)
        with pytest.raises(NotAllowed, match="was added as a researcher and cannot become a operator"):
            store.invite("ada", "operator", "", b"n" * 32, NOW + HOUR)

    def test_roles_do_not_mix(self, store: Store) -> None:
        enrol(store, "ada", "researcher")
        assert store.lookup("operator", "ada") is None
        assert store.lookup("site", "ada") is None
        assert store.sites() == []

    def test_renewal_keeps_the_old_certificate_until_it_runs_out(self, store: Store) -> None:
        enrol(store)
        store.record_certificate("site-1", certificate("0b", NOW + 48 * HOUR), NOW)
        assert store.lookup("site", "site-1") == Standing(active=True, serials=frozenset({"0a", "0b"}))
        store.record_certificate("site-1", certificate("0c", NOW + 72 * HOUR), NOW + 24 * HOUR)
        assert store.lookup("site", "site-1") == Standing(active=True, serials=frozenset({"0b", "0c"}))
        [member] = store.sites()
        assert member.certificate_expires == NOW + 72 * HOUR

    def test_strangers_renew_nothing(self, store: Store) -> None:
        with pytest.raises(NotAllowed, match="ghost is not a member"):
            store.record_certificate("ghost", certificate(), NOW)

    def test_revoked(self, store: Store) -> None:
        enrol(store)
        assert store.revoke("site-1").state == "revoked"
        assert store.revoke("site-1").certificate_expires is None
        assert store.lookup("site", "site-1") == Standing(active=False, serials=frozenset())
        with pytest.raises(NotAllowed):
            store.record_certificate("site-1", certificate("0b"), NOW)
        with pytest.raises(BadToken, match="revoked"):
            store.invited("site-1", SECRET, NOW)

    def test_the_last_operator_stays(self, store: Store) -> None:
        enrol(store, "ada", "operator")
        store.invite("bob", "operator", "", b"n" * 32, NOW + HOUR)
        with pytest.raises(NotAllowed, match="ada is the last operator; admit another before"):
            store.revoke("ada")
        store.redeem("bob", b"n" * 32, NOW, certificate=certificate("0b"), signing_key=None)
        assert store.revoke("ada").state == "revoked"

    def test_certificates_of_a_name_are_bounded(self, store: Store) -> None:
        enrol(store)
        for number in range(1, MAX_CERTIFICATES):
            store.record_certificate("site-1", certificate(f"{number:x}"), NOW)
        with pytest.raises(TooLarge, match="renews far too often"):
            store.record_certificate("site-1", certificate("ffff"), NOW)
        store.record_certificate("site-1", certificate("ffff", NOW + 48 * HOUR), NOW + 24 * HOUR)
        assert store.lookup("site", "site-1") == Standing(active=True, serials=frozenset({"ffff"}))

    def test_one_member(self, store: Store) -> None:
        enrol(store)
        assert store.member("site-1").organisation == "Clinic"
        with pytest.raises(Unknown, match="no member is named ghost"):
            store.member("ghost")

    def test_revoking_nobody(self, store: Store) -> None:
        with pytest.raises(Unknown, match="no member is named ghost"):
            store.revoke("ghost")

    def test_a_revoked_name_comes_back_with_new_keys(self, store: Store) -> None:
        enrol(store)
        store.revoke("site-1")
        store.invite("site-1", "site", "Clinic", b"n" * 32, NOW + HOUR)
        store.redeem("site-1", b"n" * 32, NOW, certificate=certificate("0b"), signing_key=b"m" * 32)
        assert store.lookup("site", "site-1") == Standing(active=True, serials=frozenset({"0b"}))
        assert store.sites()[0].signing_key == b"m" * 32


class TestMemberLists:
    def test_none_at_first(self, store: Store) -> None:
        assert store.member_list() is None

    def test_only_rising_versions(self, store: Store) -> None:
        store.save_member_list(1, b"one")
        store.save_member_list(2, b"two")
        store.save_member_list(2, b"two")
        for version, signed in ((2, b"other"), (1, b"one")):
            with pytest.raises(Stale, match="not newer than 2"):
                store.save_member_list(version, signed)
        assert store.member_list() == b"two"


class TestRuns:
    def test_round_trip(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"\x00\xff", request="r1")
        assert store.run("01RUN") == run_row()
        assert store.manifest("01RUN") == b"\x00\xff"

    def test_the_same_request_is_the_same_run(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        again = store.create_run(run_row("02RUN", submitted_at=NOW + HOUR), manifest=b"m", request="r1")
        assert again == run_row()
        assert [row.run for row in store.runs()] == ["01RUN"]

    def test_the_same_request_for_another_job_is_refused(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        with pytest.raises(Malformed, match="request 'r1' was used before, for run 01RUN"):
            store.create_run(run_row("02RUN", job=b"{}"), manifest=b"m", request="r1")

    def test_requests_belong_to_their_caller(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        store.create_run(run_row("02RUN", submitted_by="bob"), manifest=b"m", request="r1")
        assert [row.run for row in store.runs()] == ["02RUN", "01RUN"]

    def test_status(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        store.set_status("01RUN", "failed", b"why")
        assert store.run("01RUN") == run_row(status="failed", reason=b"why")
        store.set_status("01RUN", "running")
        assert store.run("01RUN").reason is None

    def test_unknown(self, store: Store) -> None:
        for call in (
            lambda: store.run("nix"),
            lambda: store.manifest("nix"),
            lambda: store.set_status("nix", "failed"),
            lambda: store.append("nix", [b"e"]),
            lambda: store.commit_round("nix", [], round_row()),
            lambda: store.update_round_record("nix", 1, b""),
        ):
            with pytest.raises(Unknown, match="nix"):
                call()


class TestJournal:
    def test_order(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        store.create_run(run_row("02RUN"), manifest=b"m", request="r2")
        store.append("01RUN", [b"a", b"b"])
        store.append("02RUN", [b"x"])
        store.append("01RUN", [])
        store.append("01RUN", [b"", b"c"])
        assert store.events("01RUN") == [b"a", b"b", b"", b"c"]
        assert store.events("02RUN") == [b"x"]
        assert store.events("03RUN") == []

    def test_many_writers_lose_nothing(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")

        def write(writer: int) -> None:
            for n in range(10):
                store.append("01RUN", [f"{writer}/{n}".encode()])

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        events = store.events("01RUN")
        assert len(events) == len(set(events)) == 40
        assert [event for event in events if event.startswith(b"2/")] == [f"2/{n}".encode() for n in range(10)]

    def test_survives_a_restart(self, url: str, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        store.append("01RUN", [b"a"])
        store.close()
        again = Store.open(url)
        assert again.events("01RUN") == [b"a"]
        again.close()


class TestRounds:
    def test_a_round_and_its_events_are_one(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        store.commit_round("01RUN", [b"committed 1"], round_row())
        store.commit_round("01RUN", [b"committed 2"], round_row(2))
        assert store.rounds("01RUN") == [round_row(), round_row(2)]
        assert store.events("01RUN") == [b"committed 1", b"committed 2"]

    def test_again_changes_nothing(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        for _ in range(2):
            store.commit_round("01RUN", [b"committed 1"], round_row())
        assert store.events("01RUN") == [b"committed 1"]

    def test_a_committed_round_is_never_another(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        store.commit_round("01RUN", [b"committed 1"], round_row())
        with pytest.raises(Stale, match="round 1: already committed as version 1"):
            store.commit_round("01RUN", [b"other"], round_row(model_crc32=7))
        assert store.events("01RUN") == [b"committed 1"]

    def test_a_failed_commit_leaves_no_event(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        store.commit_round("01RUN", [b"committed 1"], round_row())
        with pytest.raises(LocalError):  # version 1 exists: the round's row fails after its events were written
            store.commit_round("01RUN", [b"committed 2"], round_row(2, version=1))
        assert store.events("01RUN") == [b"committed 1"]

    def test_the_record_takes_evaluations_later(self, store: Store) -> None:
        store.create_run(run_row(), manifest=b"m", request="r1")
        store.commit_round("01RUN", [], round_row())
        store.update_round_record("01RUN", 1, b"with metrics")
        assert store.rounds("01RUN") == [round_row(record=b"with metrics")]
        with pytest.raises(Unknown, match="no committed round 2"):
            store.update_round_record("01RUN", 2, b"")


class TestSchema:
    def test_a_newer_schema_is_refused_with_advice(self, url: str, store: Store) -> None:
        store.close()
        engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            connection.execute(text("UPDATE atoll_schema SET version = 99"))
        engine.dispose()
        with pytest.raises(
            LocalError, match=r"schema is version 99 and this Atoll knows up to 1.*Install that version"
        ):
            Store.open(url)


def test_two_servers_on_one_postgresql(postgresql_url: str) -> None:
    store = Store.open(emptied(postgresql_url))
    with pytest.raises(LocalError, match="another server uses this database"):
        Store.open(postgresql_url)
    store.close()
    Store.open(postgresql_url).close()


def test_postgresql_is_asked_to_be_durable(postgresql_url: str) -> None:
    database = Database.open(emptied(postgresql_url))
    with database.read() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
    database.close()
