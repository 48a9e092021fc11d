"""`atoll federation`: decide who belongs, with the offline key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options

if TYPE_CHECKING:
    from atoll.client.member_list import Change
    from atoll.transport.members import FederationKey
    from atoll.wire import admin_pb2

commands = options.group("The member list: who waits, sign the next list, publish it.")

Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="File to write.")]


@commands.command()
def pending(home: options.PersonHome = None, out: Out = None, as_json: options.AsJson = False) -> None:
    """Show who waits to be on the member list.

    Needs the identity of an operator, not the offline key. With --out, what the server says goes into a file that is carried to the machine with the key.

    \b
    Examples:
      atoll federation pending
      atoll federation pending --out request.bin
    """
    import asyncio

    from atoll.cli.output import note, print_json
    from atoll.client.member_list import wanted_changes
    from atoll.client.operator import pending_members
    from atoll.client.people import load_person

    reply = asyncio.run(pending_members(load_person(home)))
    wanted = wanted_changes(reply, None)
    if out is not None:
        _write(out, reply.SerializeToString())
        note(f"next, where the key lies: atoll federation sign --key FOLDER --request {out} --out signed.bin")
    if as_json:
        print_json([_record(change) for change in wanted])
        return
    for change in wanted:
        print(_describe(change))
    if not wanted:
        note("nobody waits")


@commands.command()
def sign(
    key: Annotated[Path, typer.Option("--key", metavar="FOLDER", help="Folder of the offline key.")],
    request: Annotated[
        Path | None,
        typer.Option("--request", metavar="FILE", help="File of `pending --out`, where there is no network."),
    ] = None,
    out: Out = None,
    home: options.PersonHome = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; everybody who waits is admitted.")] = False,
) -> None:
    """Put pending sites on the member list; sign it.

    Compare each fingerprint with the one that the site's administrator reads to you: it is what keeps a server that was
    broken into from adding a site of its own. Online, the list is published at once; with --request and --out nothing
    is sent, and `atoll federation publish` hands the list over later.

    \b
    Examples:
      atoll federation sign --key /media/key --home fed/server/operator
      atoll federation sign --key /media/key --request request.bin --out signed.bin
    """
    from atoll.cli.output import note
    from atoll.client.member_list import wanted_changes
    from atoll.transport.members import FederationKey
    from atoll.wire.errors import ConfigError

    if (request is None) != (out is None):
        raise ConfigError("offline signing needs both --request and --out; online, leave both away", key="--request")
    federation_key = FederationKey.load(key)
    reply = _ask(home) if request is None else _read(request)
    chosen = [change for change in wanted_changes(reply, federation_key) if yes or _confirm(change)]
    if not chosen:
        note("nothing to sign")
        return
    _sign(reply, chosen, federation_key, home=home, out=out)


@commands.command()
def publish(
    signed: Annotated[Path, typer.Argument(metavar="FILE", help="File of `sign --out`.")],
    home: options.PersonHome = None,
) -> None:
    """Hand a signed member list to the server.

    The server pushes it to every site. Needs the identity of an operator.

    \b
    Example:
      atoll federation publish signed.bin
    """
    from google.protobuf.message import DecodeError

    from atoll.wire.errors import ConfigError
    from atoll.wire.members_pb2 import SignedMemberList

    try:
        signed_list = SignedMemberList.FromString(_read_bytes(signed))
    except DecodeError:
        raise ConfigError(
            f"{signed} is no signed member list; give the file of `atoll federation sign --out`"
        ) from None
    _publish(signed_list.SerializeToString(), home)


def _sign(
    reply: admin_pb2.PendingReply, chosen: list[Change], key: FederationKey, *, home: Path | None, out: Path | None
) -> None:
    from atoll.cli.output import note
    from atoll.client.member_list import ChangeKind
    from atoll.transport.members import sign_pending

    admitted = [change.member for change in chosen if change.kind is not ChangeKind.REVOKE]
    revoked = [change.member.site for change in chosen if change.kind is ChangeKind.REVOKE]
    signed = sign_pending(reply.current, admitted, revoked, key)
    for change in chosen:
        note(f"signed: {_describe(change)}")
    if out is None:
        _publish(signed.SerializeToString(), home)
    else:
        _write(out, signed.SerializeToString())
        note(f"next, where the network is: atoll federation publish {out}")


def _publish(signed: bytes, home: Path | None) -> None:
    import asyncio

    from atoll.cli.output import note
    from atoll.client.operator import publish_members
    from atoll.client.people import load_person
    from atoll.wire.members_pb2 import SignedMemberList

    version = asyncio.run(publish_members(load_person(home), SignedMemberList.FromString(signed)))
    note(f"member list {version} is published")


def _ask(home: Path | None) -> admin_pb2.PendingReply:
    import asyncio

    from atoll.client.operator import pending_members
    from atoll.client.people import load_person

    return asyncio.run(pending_members(load_person(home)))


def _read(request: Path) -> admin_pb2.PendingReply:
    from google.protobuf.message import DecodeError

    from atoll.wire.admin_pb2 import PendingReply
    from atoll.wire.errors import ConfigError

    try:
        return PendingReply.FromString(_read_bytes(request))
    except DecodeError:
        raise ConfigError(f"{request} is no request; give the file of `atoll federation pending --out`") from None


def _read_bytes(path: Path) -> bytes:
    from atoll.wire.errors import ConfigError

    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _write(path: Path, data: bytes) -> None:
    from atoll.wire.errors import LocalError

    try:
        path.write_bytes(data)
    except OSError as error:
        raise LocalError(f"{path} cannot be written: {error.strerror}") from None


def _confirm(change: Change) -> bool:
    return typer.confirm(f"{_describe(change)}\n{change.kind.value}?", err=True)


def _describe(change: Change) -> str:
    from atoll.transport.identity import format_fingerprint

    member = change.member
    return f"{change.kind.value} {member.site} of {member.organisation}, key {format_fingerprint(member.signing_key)}"


def _record(change: Change) -> dict[str, str]:
    from atoll.transport.identity import format_fingerprint

    member = change.member
    return {
        "change": change.kind.value,
        "site": member.site,
        "organisation": member.organisation,
        "fingerprint": format_fingerprint(member.signing_key),
    }
