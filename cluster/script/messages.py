"""What the processes of a script and `atoll site exec` say to each other over a unix socket. JSON, one message a line.

Requests of the agent (`Prepare`, `Train`, `Mask`) pass through as they are; `Prepared`, `Masked`, `Progress` and `Failed` come
back so. What is new is the agreement of the processes: each says when it has done the steps of a round (`Arrived`), and
all of them go on only when all have, with the same word. So no process waits for another in a collective that the other
never enters. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from atoll.cluster import messages
from atoll.wire.errors import Malformed

SOCKET_VARIABLE = "ATOLL_SCRIPT_SOCKET"  # says to a script where `atoll site exec` listens

_STRICT = ConfigDict(extra="forbid", strict=True)
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A process of the script is there. Answered by the run's `Prepare`."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["hello"] = "hello"
    rank: _Count
    world_size: Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A process has done the steps of a round. Answered, when all have, by `Finish`, `Void` or `Over`."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["arrived"] = "arrived"
    rank: _Count
    round: Annotated[int, Field(ge=1)]
    base_version: _Count
    steps: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Write the update. Answered by `Done`."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["finish"] = "finish"
    task: messages.Train  # as the agent last asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Void:
    """Nobody wants that round any more; the next `Train` says what is wanted."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["void"] = "void"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A process's part of a round is written; the first process has written the file."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["done"] = "done"
    rank: _Count
    key: str
    weight: _Count  # examples of this process
    metrics: messages.MetricSums
    num_bytes: _Count
    crc32: _Count
    num_values: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The site's part in the run has ended."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["over"] = "over"
    reason: str
    together: bool  # all processes are told at the same step


FromRelay = messages.Prepare | messages.Train | messages.Mask | Finish | Void | Over
ToRelay = Hello | Arrived | Done | messages.Prepared | messages.Masked | messages.Progress | messages.Failed

_ADAPTER: TypeAdapter[FromRelay | ToRelay] = TypeAdapter(Annotated[FromRelay | ToRelay, Field(discriminator="kind")])


def encode(message: FromRelay | ToRelay) -> bytes:
    """One line of JSON, newline included. Raises Malformed where a field breaks its bound."""
    line = _ADAPTER.dump_json(message)
    decode(line)
    return line + b"\n"


def decode(line: bytes) -> FromRelay | ToRelay:
    """The message in one line. Raises Malformed where it is none."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(step) for step in fault["loc"]) or "message"
        raise Malformed(f"message of a script: {place}: {fault['msg']}", field=place) from None
