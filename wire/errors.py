"""One tree of errors, ours and theirs, and the form in which a refusal reaches the peer.

::

    AtollError
    |-- ConfigError          a file, an option or a job says something we cannot do        (ours, exit 2)
    |-- LocalError           this machine cannot do it: disk, port, device, identity       (ours, exit 3)
    |   |-- IdentityError    keys or certificates missing, expired, unreadable
    |   |-- DiskFull
    |   |-- PortInUse
    |   `-- DeviceMissing
    `-- RemoteError          one end of a connection refuses what the other sent           (theirs, exit 4)
        |-- Malformed        bytes that are not what they claim to be           INVALID_ARGUMENT
        |   |-- BadManifest
        |   |-- BadFrame
        |   `-- BadUpdate    schema, value, weight or metric out of bounds
        |-- TooLarge         over a stated limit                                RESOURCE_EXHAUSTED
        |-- Stranger         no valid identity, or another than claimed         UNAUTHENTICATED
        |   `-- BadToken
        |-- NotAllowed       known, but the role or cohort does not permit it   PERMISSION_DENIED
        |   `-- PolicyRefused  a site's own policy says no
        |-- Unknown          no such run, version, site, app                    NOT_FOUND
        |-- Stale            an old round, attempt, version or grant            FAILED_PRECONDITION
        |-- AppFailed        the user's code raised                             ABORTED
        |-- TooFewSites      a bounded wait ended without enough sites          DEADLINE_EXCEEDED
        |-- Incompatible     no protocol version in common                      UNIMPLEMENTED
        `-- Unavailable      the peer is going down or busy: try again          UNAVAILABLE

A message says what, which site and round, the value, the bound, and what to do.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grpc

    from atoll.wire import errors_pb2  # these two cost a command that connects to nobody a third of its start

MESSAGE_CHARACTERS = 2000  # a screenful; longer texts are cut, since they may carry what an app printed
VALUE_CHARACTERS = 200
SITE_CHARACTERS, RUN_CHARACTERS = 63, 26  # as wire/names.py has them
FIELD_CHARACTERS = 512  # the name of a tensor fits


class AtollError(Exception):
    """Root of all errors that Atoll raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(AtollError):
    """A setting that cannot be used: names the key, the value and what is wanted."""

    exit_code = 2

    def __init__(self, message: str, *, key: str = "", value: str = "", bound: str = "") -> None:
        super().__init__(message)
        self.key, self.value, self.bound = key, value, bound


class LocalError(AtollError):
    """This machine cannot do it."""

    exit_code = 3


class IdentityError(LocalError):
    """Keys or certificates are missing, expired or unreadable."""


class DiskFull(LocalError):
    """No room for a file that must be durable."""


class PortInUse(LocalError):
    """Another process listens on the address."""


class DeviceMissing(LocalError):
    """The requested accelerator is not there."""


class RemoteError(AtollError):
    """One end of a connection refuses what the other sent."""

    exit_code = 4
    status = "UNKNOWN"  # name of the gRPC status that it travels with

    def __init__(
        self,
        message: str,
        *,
        site: str = "",
        run: str = "",
        round: int = 0,
        field: str = "",
        value: object = "",
        bound: object = "",
    ) -> None:
        super().__init__(message[:MESSAGE_CHARACTERS])
        self.site, self.run, self.round = site[:SITE_CHARACTERS], run[:RUN_CHARACTERS], round
        self.field = field[:FIELD_CHARACTERS]
        self.value, self.bound = str(value)[:VALUE_CHARACTERS], str(bound)[:VALUE_CHARACTERS]

    @property
    def message(self) -> str:
        return str(self.args[0])


class Malformed(RemoteError):
    """Bytes that are not what they claim to be."""

    status = "INVALID_ARGUMENT"


class BadManifest(Malformed):
    """A manifest that breaks its rules, or differs from the run's."""


class BadFrame(Malformed):
    """A tensor frame that is truncated, corrupted or out of place."""


class BadUpdate(Malformed):
    """An update whose schema, values, weight or metrics are out of bounds."""


class TooLarge(RemoteError):
    """Over a stated limit."""

    status = "RESOURCE_EXHAUSTED"


class Stranger(RemoteError):
    """No valid identity, or another than the one claimed."""

    status = "UNAUTHENTICATED"


class BadToken(Stranger):
    """An enrolment token that is wrong, used, expired or for another name."""


class NotAllowed(RemoteError):
    """The caller is known, but its role or the cohort does not permit this."""

    status = "PERMISSION_DENIED"


class PolicyRefused(NotAllowed):
    """A site's own policy says no."""


class Unknown(RemoteError):
    """No such run, version, site or app."""

    status = "NOT_FOUND"


class Stale(RemoteError):
    """Belongs to an old round, attempt, version or grant."""

    status = "FAILED_PRECONDITION"


class AppFailed(RemoteError):
    """The user's code raised, or could not be imported."""

    status = "ABORTED"


class TooFewSites(RemoteError):
    """A bounded wait ended without enough sites."""

    status = "DEADLINE_EXCEEDED"


class Incompatible(RemoteError):
    """The two ends have no protocol version in common."""

    status = "UNIMPLEMENTED"


class Unavailable(RemoteError):
    """The peer is going down, unreachable or busy; trying again later is right."""

    status = "UNAVAILABLE"


def _tree(root: type[RemoteError]) -> dict[str, type[RemoteError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


KINDS: dict[str, type[RemoteError]] = _tree(RemoteError)
METADATA_KEY = "atoll-error-bin"  # trailing metadata that carries a serialised ErrorDetail


def to_detail(error: RemoteError) -> errors_pb2.ErrorDetail:
    """The form of `error` that travels."""
    from atoll.wire import errors_pb2

    return errors_pb2.ErrorDetail(
        kind=type(error).__name__,
        message=error.message,
        site=error.site,
        run=error.run,
        round=error.round,
        field=error.field,
        value=error.value,
        bound=error.bound,
    )


def from_detail(detail: errors_pb2.ErrorDetail) -> RemoteError:
    """The error that a peer sent; a kind that this version does not know becomes a RemoteError."""
    kind = KINDS.get(detail.kind, RemoteError)
    return kind(
        detail.message,
        site=detail.site,
        run=detail.run,
        round=detail.round,
        field=detail.field,
        value=detail.value,
        bound=detail.bound,
    )


def from_rpc(error: grpc.RpcError | grpc.aio.AioRpcError) -> RemoteError:
    """The error behind a failed call: the peer's own where it sent one, else one by gRPC status."""
    from google.protobuf.message import DecodeError

    from atoll.wire import errors_pb2

    # The blocking API raises a plain RpcError that is also a Call; only the Call has these methods.
    call: Any = error
    trailing = call.trailing_metadata() if hasattr(call, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            with suppress(DecodeError):  # a damaged detail is no detail: the status still says which kind
                return from_detail(errors_pb2.ErrorDetail.FromString(value))
    code = call.code() if hasattr(call, "code") else None
    text = call.details() if hasattr(call, "details") else str(error)
    kind = next((k for k in RemoteError.__subclasses__() if code and k.status == code.name), RemoteError)
    return kind(text or str(code or "the call failed"))
