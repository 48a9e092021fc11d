"""Joining and renewing over real TLS, and everything that a wrong token can be."""

from __future__ import annotations

import asyncio
import logging
import stat
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from samples.loopback import Clock, Federation, call

from atoll.server.enrolment import EnrolmentService
from atoll.transport.credentials import open_channel
from atoll.transport.enrolment import (
    CERTIFICATE_BYTES,
    SITE_ROLES,
    USER_ROLES,
    encode_token,
    enrol,
    renew,
    renewal_due,
)
from atoll.transport.identity import Identity, holds_identity, load_identity, utc_now
from atoll.wire.enrolment_pb2 import EnrolmentToken, EnrolReply, EnrolRequest
from atoll.wire.errors import (
    AtollError,
    BadToken,
    IdentityError,
    Malformed,
    NotAllowed,
    Stranger,
    TooLarge,
    Unavailable,
)

SITES = "/atoll.wire.Admin/Sites"


async def join(token: EnrolmentToken, folder: Path, roles: frozenset[str] = SITE_ROLES) -> Identity:
    return await asyncio.to_thread(enrol, encode_token(token), folder, roles=roles)


async def test_a_site_joins_and_is_known(federation: Federation, tmp_path: Path) -> None:
    identity = await join(federation.ticket("alpha", "site"), tmp_path / "alpha")
    assert (identity.name, identity.role, identity.federation) == ("alpha", "site", "isles")
    assert identity.organisation == "St Mary"
    assert identity.federation_public_key == federation.key.public_key
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "alpha").iterdir()} == {0o600}
    recorded = federation.store.sites()[0]
    assert identity.signing_key is not None
    assert recorded.signing_key == identity.signing_key.public_key().public_bytes_raw()
    async with open_channel(load_identity(tmp_path / "alpha")) as channel:
        assert await call(channel, SITES) == b"site alpha"


@pytest.mark.parametrize("role", sorted(USER_ROLES))
async def test_a_person_joins(federation: Federation, tmp_path: Path, role: str) -> None:
    identity = await join(federation.ticket("ada", role), tmp_path / "ada", USER_ROLES)
    assert (identity.role, identity.signing_key) == (role, None)
    async with open_channel(identity) as channel:
        assert await call(channel, SITES) == f"{role} ada".encode()


class TestBadTokens:
    """In each case nothing is stored, and the sentence says what to do."""

    async def refused(self, token: EnrolmentToken, folder: Path, kind: type[Exception] = BadToken) -> str:
        with pytest.raises(kind) as caught:
            await join(token, folder)
        assert not holds_identity(folder)
        assert type(caught.value) is kind
        return str(caught.value)

    async def test_wrong(self, federation: Federation, tmp_path: Path) -> None:
        token = federation.ticket("alpha", "site")
        token.secret = bytes(32)
        text = await self.refused(token, tmp_path / "alpha")
        assert "wrong" in text
        assert "ask the operator for a new one" in text

    async def test_used(self, federation: Federation, tmp_path: Path) -> None:
        token = federation.ticket("alpha", "site")
        await join(token, tmp_path / "first")
        assert "used already" in await self.refused(token, tmp_path / "second")

    async def test_used_by_two_at_once(self, federation: Federation, tmp_path: Path) -> None:
        token = federation.ticket("alpha", "site")
        tries = [join(token, tmp_path / str(i)) for i in range(4)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["BadToken"] * 3 + ["Identity"]

    async def test_expired(self, federation: Federation, tmp_path: Path, clock: Clock) -> None:
        token = federation.ticket("alpha", "site", valid=timedelta(hours=1))
        clock.now += timedelta(hours=2)
        assert "expired" in await self.refused(token, tmp_path / "alpha")

    async def test_for_another_name(self, federation: Federation, tmp_path: Path) -> None:
        """The token of alpha, with the name of beta written into it."""
        federation.ticket("beta", "site")
        token = federation.ticket("alpha", "site")
        token.name = "beta"
        assert "not for beta" in await self.refused(token, tmp_path / "beta")

    async def test_a_raised_role(self, federation: Federation, tmp_path: Path) -> None:
        """The server certifies the role of the invitation, and the joiner notices that it is not the token's."""
        token = federation.ticket("ada", "reader")
        token.role = "operator"
        with pytest.raises(Malformed, match="not the one asked for"):
            await join(token, tmp_path / "ada", USER_ROLES)
        assert federation.store.lookup("operator", "ada") is None

    async def test_for_the_other_command(self, federation: Federation, tmp_path: Path) -> None:
        assert "atoll user join" in await self.refused(federation.ticket("ada", "reader"), tmp_path / "ada")
        with pytest.raises(BadToken, match="atoll site join"):
            await join(federation.ticket("alpha", "site"), tmp_path / "alpha", USER_ROLES)

    async def test_revoked_before_use(self, federation: Federation, tmp_path: Path) -> None:
        token = federation.ticket("alpha", "site")
        federation.store.revoke("alpha")
        assert "revoked" in await self.refused(token, tmp_path / "alpha")

    async def test_of_another_federation(
        self, federation: Federation, other_federation: Federation, tmp_path: Path
    ) -> None:
        """The joiner does not send its secret to a server that the token's CA did not certify."""
        token = federation.ticket("alpha", "site")
        token.enrolment_address = f"127.0.0.1:{other_federation.enrolment_port}"
        assert "another CA" in await self.refused(token, tmp_path / "alpha", Stranger)
        token.enrolment_address = f"127.0.0.1:{federation.enrolment_port}"
        assert (await join(token, tmp_path / "alpha")).name == "alpha"  # so it is still unused

    async def test_another_federation_key(self, federation: Federation, tmp_path: Path) -> None:
        """A server that swaps the offline key for one of its own is found out."""
        token = federation.ticket("alpha", "site")
        token.federation_fingerprint = bytes(32)
        assert "do not join" in await self.refused(token, tmp_path / "alpha", Stranger)

    async def test_nobody_there(self, federation: Federation, tmp_path: Path) -> None:
        token = federation.ticket("alpha", "site")
        token.enrolment_address = "127.0.0.1:1"
        assert "nobody listens at 127.0.0.1:1" in await self.refused(token, tmp_path / "alpha", Unavailable)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (EnrolReply(certificate=bytes(CERTIFICATE_BYTES + 1)), TooLarge),
        (EnrolReply(organisation="o" * 129), Malformed),
        (EnrolReply(organisation="\x1b[2J"), Malformed),
    ],
)
async def test_a_server_that_answers_out_of_bounds(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: EnrolReply, kind: type[Exception]
) -> None:
    answer = EnrolmentService._enrol

    def otherwise(self: EnrolmentService, request: EnrolRequest) -> EnrolReply:
        reply = answer(self, request)
        reply.MergeFrom(change)
        return reply

    monkeypatch.setattr(EnrolmentService, "_enrol", otherwise)
    with pytest.raises(kind):
        await join(federation.ticket("alpha", "site"), tmp_path / "alpha")
    assert not holds_identity(tmp_path / "alpha")


class TestAgain:
    """Joining where an identity lies already."""

    async def test_the_signing_key_stays(self, federation: Federation, tmp_path: Path) -> None:
        first = await join(federation.ticket("alpha", "site"), tmp_path / "alpha")
        federation.store.revoke("alpha")
        second = await join(federation.ticket("alpha", "site"), tmp_path / "alpha")
        assert first.signing_key is not None
        assert second.signing_key is not None
        assert first.signing_key.private_bytes_raw() == second.signing_key.private_bytes_raw()
        assert first.private_key_pem != second.private_key_pem

    async def test_another_name(self, federation: Federation, tmp_path: Path) -> None:
        await join(federation.ticket("alpha", "site"), tmp_path / "alpha")
        with pytest.raises(IdentityError, match=r"holds the identity of site alpha.*choose another --home"):
            await join(federation.ticket("beta", "site"), tmp_path / "alpha")
        assert load_identity(tmp_path / "alpha").name == "alpha"

    async def test_another_federation_of_that_name(
        self, federation: Federation, other_federation: Federation, tmp_path: Path
    ) -> None:
        await join(federation.ticket("alpha", "site"), tmp_path / "alpha")
        with pytest.raises(IdentityError, match="pins another key"):
            await join(other_federation.ticket("alpha", "site"), tmp_path / "alpha")


class TestRenewal:
    async def test_due_at_half_life(self, federation: Federation) -> None:
        identity = await federation.join("alpha")
        assert not renewal_due(identity, identity.expires_at - timedelta(days=16))
        assert renewal_due(identity, identity.expires_at - timedelta(days=14))

    async def test_new_keys_and_the_old_ones_until_they_expire(self, federation: Federation) -> None:
        old = await federation.join("alpha")
        new = await asyncio.to_thread(renew, old)
        assert new.private_key_pem != old.private_key_pem
        assert new.certificate_pem != old.certificate_pem
        stored = load_identity(old.folder)
        assert stored.certificate_pem == new.certificate_pem
        assert stored.federation_public_key == old.federation_public_key
        for identity in (old, new):  # a site that crashed before it stored the new one goes on with the old one
            async with open_channel(identity) as channel:
                assert await call(channel, SITES) == b"site alpha"

    async def test_the_name_is_the_peers_and_not_the_requests(self, federation: Federation) -> None:
        """A site that asks under another's name gets a certificate of its own, which it then refuses to store."""
        await federation.join("beta")
        alpha = await federation.join("alpha")
        with pytest.raises(Malformed, match="not the one asked for"):
            await asyncio.to_thread(renew, replace(alpha, name="beta"))
        assert load_identity(alpha.folder).certificate_pem == alpha.certificate_pem

    async def test_a_revoked_member_gets_none(self, federation: Federation) -> None:
        alpha = await federation.join("alpha")
        federation.store.revoke("alpha")
        with pytest.raises(Stranger, match="revoked"):
            await asyncio.to_thread(renew, alpha)

    async def test_an_expired_one_reads_what_to_do(self, federation: Federation) -> None:
        """By then TLS refuses, so the sentence is the member's own."""
        alpha = await federation.join("alpha")
        late = replace(alpha, expires_at=utc_now() - timedelta(days=1), address="127.0.0.1:1")
        with pytest.raises(IdentityError, match=r"site alpha expired.*atoll site join TOKEN"):
            await asyncio.to_thread(renew, late)


async def test_secrets_are_in_no_log(
    federation: Federation,
    other_federation: Federation,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Everything that goes wrong and right is logged at its loudest; no key, secret or token may be in it."""
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []

    async def fails(coroutine: Any) -> None:
        with pytest.raises((AtollError, grpc.RpcError)) as caught:
            await coroutine
        texts.extend((str(caught.value), repr(caught.value), repr(caught.value.__cause__)))

    token = federation.ticket("alpha", "site")
    alpha = await join(token, tmp_path / "alpha")
    await fails(join(token, tmp_path / "again"))
    wrong = federation.ticket("beta", "site")
    wrong.enrolment_address = f"127.0.0.1:{other_federation.enrolment_port}"
    await fails(join(wrong, tmp_path / "beta"))
    async with open_channel(alpha) as channel:
        await fails(call(channel, "/atoll.wire.Admin/Revoke"))
    renewed = await asyncio.to_thread(renew, alpha)
    federation.store.revoke("alpha")
    await fails(asyncio.to_thread(renew, renewed))
    texts.extend((repr(alpha), repr(federation.key), repr(federation.authority)))
    out, err = capfd.readouterr()
    seen = "\n".join((*texts, caplog.text, out, err))

    assert alpha.signing_key is not None
    raw = [token.secret, wrong.secret, alpha.signing_key.private_bytes_raw(), federation.key.key.private_bytes_raw()]
    canaries = [canary for secret in raw for canary in (secret.hex(), repr(secret)[2:-1])]
    canaries += [encode_token(token)[-60:], encode_token(wrong)[-60:]]
    for pem in (alpha.private_key_pem, renewed.private_key_pem, (tmp_path / "isles/ca/ca_key.pem").read_bytes()):
        canaries.append(pem.decode().splitlines()[1])
    assert NotAllowed.__name__ in caplog.text  # the log was on
    assert [canary for canary in canaries if canary in seen] == []
