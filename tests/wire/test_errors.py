"""The error tree: every kind reaches the peer whole, and a damaged or unknown one is still an error."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from atoll.wire import errors, errors_pb2
from atoll.wire.errors import KINDS, METADATA_KEY, BadUpdate, RemoteError, from_detail, from_rpc, to_detail


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_the_wire(kind: str) -> None:
    sent = KINDS[kind](
        'tensor "w" is 2000, bound 1024', site="site-3", run="R", round=12, field="w", value=2000, bound=1024
    )
    data = to_detail(sent).SerializeToString()
    received = from_detail(errors_pb2.ErrorDetail.FromString(data))
    assert type(received) is type(sent)
    assert vars(received) == vars(sent)
    assert received.message == sent.message
    assert received.exit_code == 4


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    for name, kind in KINDS.items():
        line = next(line for line in errors.__doc__.splitlines() if f"- {name} " in f"{line} ")
        if "status" in vars(kind) and kind is not RemoteError:
            assert kind.status in line
            assert grpc.StatusCode[kind.status]


def test_statuses_tell_the_branches_apart() -> None:
    statuses = [kind.status for kind in RemoteError.__subclasses__()]
    assert len(set(statuses)) == len(statuses)


def test_an_unknown_kind_is_a_remote_error() -> None:
    assert type(from_detail(errors_pb2.ErrorDetail(kind="FromTheFuture", message="m"))) is RemoteError
    assert type(from_detail(errors_pb2.ErrorDetail(kind="ConfigError", message="m"))) is RemoteError


def test_long_texts_are_cut() -> None:
    long = "x" * 5000
    bounds = {"message": 2000, "site": 63, "run": 26, "field": 512, "value": 200, "bound": 200}
    detail = to_detail(BadUpdate(long, site=long, run=long, field=long, value=long, bound=long))
    assert {name: len(getattr(detail, name)) for name in bounds} == bounds


def test_long_texts_of_a_peer_are_cut() -> None:
    error = from_detail(errors_pb2.ErrorDetail(message="m" * 5000, site="s" * 5000, run="r" * 5000, field="f" * 5000))
    assert (len(error.message), len(error.site), len(error.run), len(error.field)) == (2000, 63, 26, 512)


class Call(grpc.RpcError):
    """What the blocking API raises: an RpcError that is also a Call."""

    def __init__(self, code: grpc.StatusCode, metadata: tuple[tuple[str, str | bytes], ...] | None) -> None:
        self._code, self._metadata = code, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "as gRPC puts it"

    def trailing_metadata(self) -> Any:
        return self._metadata


def test_the_peers_own_error_comes_out_of_a_failed_call() -> None:
    detail = to_detail(BadUpdate("no", site="s")).SerializeToString()
    error = from_rpc(Call(grpc.StatusCode.INVALID_ARGUMENT, ((METADATA_KEY, detail),)))
    assert type(error) is BadUpdate
    assert (error.message, error.site) == ("no", "s")


@pytest.mark.parametrize("metadata", [None, (), (("x", "y"),), ((METADATA_KEY, b"\xff\xff"),)])
def test_without_a_detail_the_status_says_which_kind(metadata: tuple[tuple[str, str | bytes], ...] | None) -> None:
    error = from_rpc(Call(grpc.StatusCode.UNAVAILABLE, metadata))
    assert type(error) is errors.Unavailable
    assert error.message == "as gRPC puts it"
    assert type(from_rpc(Call(grpc.StatusCode.INTERNAL, metadata))) is RemoteError
    assert type(from_rpc(grpc.RpcError())) is RemoteError


def test_exit_codes() -> None:
    assert errors.ConfigError("c").exit_code == 2
    assert errors.DiskFull("d").exit_code == 3
    assert RemoteError("r").exit_code == 4
