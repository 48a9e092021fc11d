"""One neighbour of a site in one round of gossip, as the server introduced it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from atoll.transport.member_certificate import MemberCertificate
from atoll.transport.tasks import Key
from atoll.transport.transfer import Withdrawal
from atoll.wire.gossip_pb2 import Card, Introduction

ZONE = "zone"  # the label by which a site declares its zone
MODEL = "model"  # the payload of a training in gossip


def task_of(round_: int, site: str) -> str:
    """The id of the task whose result is the model that a site has trained in a round."""
    return f"g{round_}.{site}"


@dataclass(slots=True, kw_only=True)
class Meeting:
    """One neighbour in one round, as the server introduced it."""

    introduction: Introduction
    card: Card
    own: Key  # of this site's model
    own_path: Path
    path: Path  # where the neighbour's goes
    filling: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by whoever writes to `path`
    incoming: Withdrawal | None = None  # of the neighbour's call that writes to it
    given_bytes: int = 0
    grant: str = ""  # of the server, where it relays
    task: asyncio.Task[None] | None = None

    @property
    def what(self) -> str:
        said = self.introduction
        return f"the model of {said.peer}, round {said.round}"


class Meetings(Protocol):
    """What a port needs to know of them."""

    def find(self, token: str, caller: MemberCertificate) -> Meeting:
        """The meeting that a call names. Raises Unknown, NotAllowed."""
        ...

    def received(self, meeting: Meeting) -> None:
        """The neighbour's model is here, durably."""
        ...
