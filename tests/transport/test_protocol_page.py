"""docs/protocol.md speaks of every message and every method that can cross."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from atoll.transport.transfer import DOWNLOAD_METHOD, GRANT_METADATA_KEY, UPLOAD_METHOD
from atoll.wire import admin_pb2, control_pb2, enrolment_pb2, errors_pb2, members_pb2, runs_pb2, transfer_pb2
from atoll.wire.errors import METADATA_KEY

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (admin_pb2, control_pb2, enrolment_pb2, errors_pb2, members_pb2, runs_pb2, transfer_pb2)
]
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


@pytest.mark.parametrize("method", [*METHODS, UPLOAD_METHOD, DOWNLOAD_METHOD, GRANT_METADATA_KEY, METADATA_KEY])
def test_each_method_and_metadata_key_is_named(method: str) -> None:
    assert f"`{method}`" in PAGE
