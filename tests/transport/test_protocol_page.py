"""docs/protocol.md speaks of every message and every method that can cross."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from atoll.transport.grpc_carrier import DOWNLOAD_METHOD, GRANT_METADATA_KEY, UPLOAD_METHOD
from atoll.transport.peers import MEET_METHOD
from atoll.wire import (
    admin_pb2,
    control_pb2,
    enrolment_pb2,
    errors_pb2,
    gossip_pb2,
    members_pb2,
    runs_pb2,
    transfer_pb2,
)
from atoll.wire.errors import METADATA_KEY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        admin_pb2,
        control_pb2,
        enrolment_pb2,
        errors_pb2,
        gossip_pb2,
        members_pb2,
        runs_pb2,
        transfer_pb2,
    )
]
_FIELD = re.compile(r"\s+((?:repeated )?[\w.]+(?:<\w+, \w+>)?) (\w+) = \d+;\s*(?://\s*(.*))?$")
_SIZED = re.compile(r"repeated |map<|string$|bytes$")
_BOUND = re.compile(
    r"(?<![\w-])\d[\d,]* (?:printable |random )?(?:characters|bytes|KiB|MiB|of )|at most \d"  # so many
    r'|"\w+",? or "\w+"|"\w+", "\w+"|one of the kinds'  # one of these
    r"|as in the token"  # bounded there
)
ENVELOPES = {"SiteMessage", "ServerMessage"}  # only a way to write "one of these"
MESSAGES = sorted({name for file in FILES for name in file.message_types_by_name} - ENVELOPES)
METHODS = sorted(
    f"{service.name}.{method.name}"
    for file in FILES
    for service in file.services_by_name.values()
    for method in service.methods
)


@pytest.mark.parametrize("message", MESSAGES)
def test_each_message_has_its_meaning(message: str) -> None:
    assert f"`{message}`" in PAGE or f"`{message}s`" in PAGE or f"`{message}`s" in PAGE


@pytest.mark.parametrize(
    "method", [*METHODS, MEET_METHOD, UPLOAD_METHOD, DOWNLOAD_METHOD, GRANT_METADATA_KEY, METADATA_KEY]
)
def test_each_method_and_metadata_key_is_named(method: str) -> None:
    assert f"`{method}`" in PAGE


def test_every_field_of_every_message_says_what_it_is() -> None:
    bare = [
        f"{path.name}: {message}.{field}"
        for path in sorted((ROOT / "wire").glob("*.proto"))
        for message, _, field, comment in _fields(path.read_text())
        if not comment and message not in ENVELOPES
    ]
    assert bare == []


def test_every_text_and_every_list_says_how_long_it_may_be() -> None:
    boundless = [
        f"{path.name}: {message}.{field}"
        for path in sorted((ROOT / "wire").glob("*.proto"))
        for message, kind, field, comment in _fields(path.read_text())
        if _SIZED.search(kind) and not _BOUND.search(comment)
    ]
    assert boundless == []


def _fields(proto: str) -> Iterator[tuple[str, str, str, str]]:
    """Message, type, field and comment of each field."""
    message = ""
    for line in proto.splitlines():
        if opened := re.match(r"message (\w+)", line):
            message = opened[1]
        elif re.match(r"(enum|service) ", line):
            message = ""
        elif message and (found := _FIELD.match(line)):
            yield message, found[1], found[2], found[3] or ""
