"""What an agent and its nursery say to each other over a pair of unix sockets that keep packets apart: JSON, one each.

The agent asks with `Fork`; each is answered, in the order of asking, by `Forked` or `Refused`. `Ended` comes whenever a
worker has ended; a pid means the same worker from its Forked to its Ended. File descriptors travel beside the JSON:
with Fork the worker's log, with Forked a pidfd of the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from atoll.wire.errors import Malformed

PACKET_BYTES = 4096  # the longest string in it is the path of a socket, at most 108 bytes

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Start a worker. The descriptor beside it takes its standard output and error."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["fork"] = "fork"
    socket_path: str  # unix socket on which the agent listens


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The worker runs. The descriptor beside it is its pidfd."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["forked"] = "forked"
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No worker could be forked. The nursery lives on."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["refused"] = "refused"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A worker has ended, and its pid may be somebody else's from now on."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["ended"] = "ended"
    pid: int
    returncode: int  # as subprocess has it: -9 for SIGKILL


Message = Fork | Forked | Refused | Ended

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """The packet that carries `message`."""
    return _ADAPTER.dump_json(message)


def decode(packet: bytes) -> Message:
    """The message in one packet. Raises Malformed where it is none."""
    try:
        return _ADAPTER.validate_json(packet)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise Malformed(f"message between agent and nursery: {fault['msg']}") from None
