from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from atoll.server.authority import Authority
from atoll.server.database import without_password
from atoll.server.first_operator import renew_operator
from atoll.server.records import Certificate
from atoll.server.settings import ServerFolder, ServerSettings, load_settings
from atoll.server.setup import init_server
from atoll.server.store import Store
from atoll.transport.identity import load_identity, utc_now
from atoll.transport.members import FederationKey
from atoll.wire.errors import AtollError, ConfigError, LocalError


def make(tmp_path: Path, **changes: object) -> ServerFolder:
    values: dict[str, object] = {
        "federation": "demo",
        "key_folder": tmp_path / "offline",
        "address": "atoll.example.org:7443",
    }
    init_server(tmp_path / "server", **(values | changes))  # type: ignore[arg-type]
    return ServerFolder(root=tmp_path / "server")


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_settings_explain_themselves_and_can_be_read(tmp_path: Path) -> None:
    place = make(tmp_path)
    settings = load_settings(place.root, {})
    assert settings.listen == "0.0.0.0:7443"
    assert settings.enrolment_listen == "0.0.0.0:7444"
    assert settings.enrolment_address == "atoll.example.org:7444"
    text = place.settings_path.read_text()
    for model in (ServerSettings, type(settings.limits), type(settings.evaluation)):
        for key in model.model_fields:
            assert key in text, f"server.toml does not explain {key}"


def test_the_defaults_in_comments_are_the_defaults(tmp_path: Path) -> None:
    place = make(tmp_path)
    before = load_settings(place.root, {})
    text = place.settings_path.read_text()
    for key in (*type(before.limits).model_fields, *type(before.evaluation).model_fields):
        text = text.replace(f"# {key} ", f"{key} ")
    place.settings_path.write_text(text.replace("# [limits]", "[limits]").replace("# [evaluation]", "[evaluation]"))
    assert load_settings(place.root, {}) == before


def test_the_key_lies_apart_and_all_keys_are_private(tmp_path: Path) -> None:
    place = make(tmp_path)
    key = FederationKey.load(tmp_path / "offline")
    authority = Authority.load(place.authority)
    assert (authority.federation, authority.federation_public_key) == ("demo", key.public_key)
    private = key.key.private_bytes_raw()
    assert not any(private in path.read_bytes() for path in files_in(place.root))
    for path in [*files_in(place.authority), *files_in(place.operator), *files_in(tmp_path / "offline")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_the_operator_can_enter_at_once(tmp_path: Path) -> None:
    place = make(tmp_path)
    identity = load_identity(place.operator)
    assert (identity.name, identity.role, identity.address) == ("operator", "operator", "atoll.example.org:7443")
    store = Store.open(f"sqlite:///{place.database_path}")
    standing = store.lookup("operator", "operator")
    store.close()
    serial = x509.load_pem_x509_certificate(identity.certificate_pem).serial_number
    assert standing is not None
    assert standing.active
    assert standing.serials == {f"{serial:x}"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"federation": "De Mo"}, "federation = 'De Mo': not a name"),
        ({"address": "atoll.example.org"}, r'address .*wanted "host:port"'),
        ({"address": "atoll.example.org:65535"}, "at most 65535"),
        ({"listen": "nowhere"}, "listen = 'nowhere'"),
        ({"database": "mysql://x"}, 'wanted "sqlite"'),
        ({"plaintext": True, "listen": "0.0.0.0:1"}, "plaintext = true takes a loopback address only"),
    ],
)
def test_bad_values_leave_nothing_behind(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **changes)
    assert files_in(tmp_path) == []


def test_a_key_below_the_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must lie apart from the server's data"):
        make(tmp_path, key_folder=tmp_path / "server" / "key")
    assert files_in(tmp_path) == []


def test_a_failure_midway_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="database failed"):
        make(tmp_path, database="postgresql://nobody@127.0.0.1:1/none")
    assert files_in(tmp_path) == []
    make(tmp_path)


def test_the_database_that_the_environment_names_is_filled_and_goes_on_record(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'elsewhere.sqlite'}"
    place = make(tmp_path, environment={"ATOLL_DATABASE": url})
    assert load_settings(place.root, {}).database == url
    assert not place.database_path.exists()
    store = Store.open(url)
    assert [member.role for member in store.members()] == ["operator"]
    store.close()


def test_a_password_does_not_go_on_record() -> None:
    assert without_password("postgresql://atoll:secret@db/atoll") == "postgresql://atoll@db/atoll"
    assert without_password("sqlite") == "sqlite"


def test_a_server_is_never_overwritten(tmp_path: Path) -> None:
    place = make(tmp_path)
    before = {path: path.read_bytes() for path in files_in(tmp_path)}
    with pytest.raises(ConfigError, match="already holds a server"):
        make(tmp_path, key_folder=tmp_path / "other")
    with pytest.raises(AtollError, match="already holds a federation's key"):
        init_server(tmp_path / "second", federation="two", key_folder=tmp_path / "offline", address="a.example:1")
    assert {path: path.read_bytes() for path in files_in(tmp_path)} == before
    assert place.settings_path.exists()


def test_plaintext_listens_on_loopback(tmp_path: Path) -> None:
    place = make(tmp_path, plaintext=True, address="127.0.0.1:7443")
    assert load_settings(place.root, {}).listen == "127.0.0.1:7443"


class TestRenewingTheOperator:
    def renew(self, place: ServerFolder, now: datetime) -> bool:
        store = Store.open(f"sqlite:///{place.database_path}")
        try:
            return renew_operator(
                place.operator,
                address="moved.example.org:1",
                store=store,
                authority=Authority.load(place.authority),
                clock=lambda: now,
            )
        finally:
            store.close()

    def test_not_before_it_is_due(self, tmp_path: Path) -> None:
        assert not self.renew(make(tmp_path), utc_now() + timedelta(days=14))

    def test_long_after_it_expired(self, tmp_path: Path) -> None:
        past = utc_now() - timedelta(days=90)
        place = make(tmp_path, clock=lambda: past)
        assert self.renew(place, utc_now())
        identity = load_identity(place.operator)
        assert identity.address == "moved.example.org:1"
        assert identity.expires_at > datetime.now(UTC) + timedelta(days=29)

    def test_nobody_is_renewed_who_moved_away(self, tmp_path: Path) -> None:
        place = make(tmp_path)
        for path in files_in(place.operator):
            path.unlink()
        assert not self.renew(place, utc_now() + timedelta(days=60))

    def test_nobody_is_renewed_who_was_revoked(self, tmp_path: Path) -> None:
        place = make(tmp_path)
        store = Store.open(f"sqlite:///{place.database_path}")
        store.invite("bob", "operator", "", b"s" * 32, utc_now() + timedelta(hours=1))
        bobs = Certificate(serial="1", expires=utc_now())
        store.redeem("bob", b"s" * 32, utc_now(), certificate=bobs, signing_key=None)
        store.revoke("operator")
        store.close()
        assert not self.renew(place, utc_now() + timedelta(days=60))
