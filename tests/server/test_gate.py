"""Who may call what, over real mutual TLS; and what a refusal looks like to the peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
import grpc.aio
import pytest
from samples.loopback import Clock, Federation, WhoAmI, call, certified, kinds_of_methods

from atoll.server.security import METHOD_ROLES, STRANGER, Gate, by_claim
from atoll.transport.credentials import (
    explain_connection_error,
    open_blocking_channel,
    open_blocking_plaintext_channel,
    open_channel,
    open_plaintext_channel,
    server_options,
)
from atoll.transport.enrolment import renew
from atoll.transport.identity import ROLES
from atoll.wire.errors import (
    BadUpdate,
    ConfigError,
    DiskFull,
    Malformed,
    NotAllowed,
    RemoteError,
    Stranger,
    TooLarge,
    Unavailable,
    from_rpc,
)

ENROL = "/atoll.wire.Enrolment/Enrol"
RENEW = "/atoll.wire.Renewal/Renew"

# Written out once more on purpose: a change of METHOD_ROLES must be made twice.
ALLOWED = {
    RENEW: {"operator", "site", "researcher", "reader"},
    "/atoll.wire.Control/Attach": {"site"},
    "/atoll.wire.Transfer/Upload": {"site", "researcher"},
    "/atoll.wire.Transfer/Download": {"site", "researcher"},
    "/atoll.wire.Runs/Submit": {"researcher"},
    "/atoll.wire.Runs/List": {"operator", "researcher", "reader"},
    "/atoll.wire.Runs/Watch": {"operator", "researcher", "reader"},
    "/atoll.wire.Runs/Stop": {"operator", "researcher"},
    "/atoll.wire.Runs/Model": {"researcher"},
    "/atoll.wire.Admin/Add": {"operator"},
    "/atoll.wire.Admin/PendingMembers": {"operator"},
    "/atoll.wire.Admin/PublishMembers": {"operator"},
    "/atoll.wire.Admin/Revoke": {"operator"},
    "/atoll.wire.Admin/Sites": {"operator", "site", "researcher", "reader"},
    ENROL: {STRANGER},
}


async def refusal(calling: Awaitable[bytes]) -> RemoteError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calling
    return from_rpc(caught.value)


def test_every_method_of_the_protocol_has_roles() -> None:
    assert set(METHOD_ROLES) == set(kinds_of_methods()) | {ENROL}
    assert {method: set(roles) for method, roles in METHOD_ROLES.items()} == ALLOWED


@pytest.mark.parametrize("role", ROLES)
async def test_each_method_as_each_role(federation: Federation, role: str) -> None:
    identity = await federation.join("someone", role)
    async with open_channel(identity) as channel:
        for method in METHOD_ROLES:
            if method == RENEW:
                continue  # a real service, called below
            if method == ENROL:
                assert isinstance(await refusal(call(channel, method)), RemoteError)  # not served on this port
            elif role in ALLOWED[method]:
                assert await call(channel, method) == f"{role} someone".encode()
            else:
                error = await refusal(call(channel, method))
                assert type(error) is NotAllowed, method
                assert method in str(error)
                assert error.bound == ", ".join(sorted(ALLOWED[method]))
    assert (await asyncio.to_thread(renew, identity)).name == "someone"


async def test_each_method_as_a_stranger_on_the_enrolment_port(federation: Federation) -> None:
    credentials = grpc.ssl_channel_credentials(federation.authority.ca_pem)
    options = (("grpc.ssl_target_name_override", "server.atoll"),)
    address = f"127.0.0.1:{federation.enrolment_port}"
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        for method in set(METHOD_ROLES) - {ENROL, RENEW}:
            assert type(await refusal(call(channel, method))) is NotAllowed, method


async def test_a_stranger_cannot_fill_the_memory(federation: Federation) -> None:
    credentials = grpc.ssl_channel_credentials(federation.authority.ca_pem)
    options = (("grpc.ssl_target_name_override", "server.atoll"),)
    address = f"127.0.0.1:{federation.enrolment_port}"
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        enrol: Any = channel.unary_unary(ENROL)
        assert type(await refusal(enrol(bytes(1 << 20), timeout=20))) is TooLarge


async def test_a_stream_that_the_member_leaves_ends_at_the_server(federation: Federation) -> None:
    """Sessions are kept in a handler's `finally`: the gate must not hold it back."""
    ended = asyncio.Event()

    async def attach(requests: Any, context: Any) -> Any:
        try:
            yield b"welcome"
            await asyncio.Event().wait()
        finally:
            ended.set()

    federation.handlers.own["/atoll.wire.Control/Attach"] = attach
    async with open_channel(await federation.join("alpha")) as channel:
        stream: Any = channel.stream_stream("/atoll.wire.Control/Attach")
        calling = stream()
        assert await calling.read() == b"welcome"
        calling.cancel()
        await asyncio.wait_for(ended.wait(), 20)


async def test_each_method_as_a_stranger_on_the_members_port(federation: Federation) -> None:
    credentials = grpc.ssl_channel_credentials(federation.authority.ca_pem)
    options = (("grpc.ssl_target_name_override", "server.atoll"),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{federation.port}", credentials, options=options) as channel:
        for method in METHOD_ROLES:
            assert type(await refusal(call(channel, method))) is Unavailable, method  # the handshake fails


async def test_a_method_that_is_in_no_table_is_closed(federation: Federation) -> None:
    async with open_channel(await federation.join("olga", "operator")) as channel:
        assert type(await refusal(call(channel, "/atoll.wire.Runs/Forgotten"))) is NotAllowed
        streams: Any = channel.stream_stream("/atoll.wire.Runs/ForgottenStream")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(streams(iter([b""]), timeout=20)))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_revocation_counts_from_the_next_call_on(federation: Federation) -> None:
    identity = await federation.join("alpha")
    async with open_channel(identity) as channel:
        assert await call(channel, "/atoll.wire.Admin/Sites") == b"site alpha"
        federation.store.revoke("alpha")
        error = await refusal(call(channel, "/atoll.wire.Admin/Sites"))
    assert type(error) is Stranger
    assert "site alpha was revoked" in str(error)


async def test_a_name_that_the_server_never_admitted(federation: Federation) -> None:
    """The CA's key alone makes nobody a member of the directory."""
    alpha = await federation.join("alpha")
    ghost = certified(federation, alpha, name="ghost")
    async with open_channel(ghost) as channel:
        error = await refusal(call(channel, "/atoll.wire.Admin/Sites"))
    assert type(error) is Stranger
    assert "no site ghost is known" in str(error)


async def test_a_certificate_that_the_directory_does_not_know(federation: Federation) -> None:
    """As after a theft and a new joining: the name is right, the certificate is not the recorded one."""
    forged = certified(federation, await federation.join("alpha"), name="alpha")
    async with open_channel(forged) as channel:
        error = await refusal(call(channel, "/atoll.wire.Admin/Sites"))
    assert type(error) is Stranger
    assert "replaced by a newer one" in str(error)


async def test_metadata_names_nobody_behind_tls(federation: Federation) -> None:
    """A site that claims another's name gets its own."""
    claim = (("atoll-name", "beta"), ("atoll-role", "operator"))
    await federation.join("beta")
    async with open_channel(await federation.join("alpha")) as channel:
        sites: Any = channel.unary_unary("/atoll.wire.Admin/Sites")
        assert await sites(b"", metadata=claim, timeout=20) == b"site alpha"
        revoke: Any = channel.unary_unary("/atoll.wire.Admin/Revoke")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await revoke(b"", metadata=claim, timeout=20)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_certificate_that_expires_during_an_open_connection(
    federation: Federation, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """TLS looks at the date only when it connects; the gate looks at each call, and both ends read what to do."""
    identity = await federation.join("alpha")
    async with open_channel(identity) as channel:
        clock.now = identity.expires_at + timedelta(minutes=4)  # within the skew of clocks
        assert await call(channel, "/atoll.wire.Admin/Sites") == b"site alpha"
        clock.now += timedelta(minutes=2)
        error = await refusal(call(channel, "/atoll.wire.Admin/Sites"))
    assert type(error) is Stranger
    for text in (str(error), caplog.text):  # the peer's, and the server's log
        assert "the certificate of site alpha expired at" in text
        assert "atoll site add alpha" in text


async def test_typed_errors_reach_the_peer_whole(federation: Federation) -> None:
    def fail(method: str) -> bytes:
        raise BadUpdate("ü" * 2000, site="alpha", run="r", round=12, field="conv1.weight", value="v", bound="b")

    federation.handlers.answer = fail
    identity = await federation.join("ada", "researcher")
    async with open_channel(identity) as channel:
        for method in ("/atoll.wire.Runs/List", "/atoll.wire.Runs/Watch", "/atoll.wire.Transfer/Upload"):
            error = await refusal(call(channel, method))
            assert type(error) is BadUpdate
            assert (error.site, error.run, error.round, error.field) == ("alpha", "r", 12, "conv1.weight")
            assert error.message == "ü" * 2000

    def read(channel: grpc.Channel) -> RemoteError:
        listing: Any = channel.unary_unary("/atoll.wire.Runs/List")
        with pytest.raises(grpc.RpcError) as caught:
            listing(b"", timeout=20)
        return from_rpc(caught.value)

    with open_blocking_channel(identity) as blocking:
        assert type(await asyncio.to_thread(read, blocking)) is BadUpdate


@pytest.mark.parametrize(
    ("raised", "code", "told", "kept"),
    [
        (ConfigError("rounds is 0", key="rounds", value="0"), "INVALID_ARGUMENT", "rounds is 0", None),
        (DiskFull("/srv/secret/place is full"), "UNAVAILABLE", "DiskFull", "/srv/secret/place"),
        (RuntimeError("password=hunter2"), "INTERNAL", "reference", "hunter2"),
    ],
)
async def test_what_is_the_servers_own_stays_in_its_log(
    federation: Federation,
    caplog: pytest.LogCaptureFixture,
    raised: Exception,
    code: str,
    told: str,
    kept: str | None,
) -> None:
    def fail(method: str) -> bytes:
        raise raised

    federation.handlers.answer = fail
    async with open_channel(await federation.join("ada", "researcher")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "/atoll.wire.Runs/List")
    assert caught.value.code() is grpc.StatusCode[code]
    assert told in str(caught.value.details())
    if kept is not None:
        assert kept not in str(caught.value.details()) + str(caught.value.trailing_metadata())
        assert kept in caplog.text


async def test_a_refusal_is_logged_with_who_and_why(federation: Federation, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with open_channel(await federation.join("alpha")) as channel:
        await refusal(call(channel, "/atoll.wire.Admin/Revoke"))
    assert "/atoll.wire.Admin/Revoke is not for site alpha" in caplog.text


class TestPlaintext:
    """A server that was started with the plaintext flag: callers name themselves, on loopback."""

    @pytest.fixture
    async def address(self) -> Any:
        server = grpc.aio.server(interceptors=(Gate(by_claim),), options=server_options())
        server.add_generic_rpc_handlers((WhoAmI(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(0)

    @pytest.mark.parametrize("role", ROLES)
    async def test_roles_hold_as_behind_tls(self, address: str, role: str) -> None:
        async with open_plaintext_channel(address, name="someone", role=role) as channel:
            for method in set(METHOD_ROLES) - {ENROL, RENEW}:
                if role in ALLOWED[method]:
                    assert await call(channel, method) == f"{role} someone".encode()
                else:
                    assert type(await refusal(call(channel, method))) is NotAllowed

    async def test_blocking(self, address: str) -> None:
        def sites() -> bytes:
            with open_blocking_plaintext_channel(address, name="alpha", role="site") as channel:
                sites: Any = channel.unary_unary("/atoll.wire.Admin/Sites")
                return bytes(sites(b"", timeout=20))

        assert await asyncio.to_thread(sites) == b"site alpha"

    @pytest.mark.parametrize(
        ("name", "role", "kind"),
        [("alpha", "stranger", Stranger), ("alpha", "root", Stranger), ("../alpha", "site", Malformed)],
    )
    async def test_a_claim_must_be_one(self, address: str, name: str, role: str, kind: type[RemoteError]) -> None:
        async with open_plaintext_channel(address, name=name, role=role) as channel:
            assert type(await refusal(call(channel, "/atoll.wire.Admin/Sites"))) is kind

    async def test_no_claim(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            assert type(await refusal(call(channel, "/atoll.wire.Admin/Sites"))) is Stranger

    async def test_a_member_with_tls_reads_what_is_wrong(self, address: str, federation: Federation) -> None:
        identity = replace(await federation.join("alpha"), address=address)
        async with open_channel(identity) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, "/atoll.wire.Admin/Sites")
        error = explain_connection_error(caught.value, identity)
        assert type(error) is Stranger
        assert "does not speak TLS" in str(error)

    async def test_a_tls_port_takes_no_plain_text(self, federation: Federation) -> None:
        address = f"127.0.0.1:{federation.port}"
        async with open_plaintext_channel(address, name="olga", role="operator") as channel:
            assert type(await refusal(call(channel, "/atoll.wire.Admin/Revoke"))) is Unavailable
