"""Rows of the store as values. Times are aware datetimes in UTC."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

MemberState = Literal["invited", "enrolled", "revoked"]
RunStatus = Literal["uploading", "queued", "running", "finished", "failed", "stopped"]

OPEN_STATUSES: frozenset[RunStatus] = frozenset({"uploading", "queued", "running"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """What a redeemable token stands for."""

    name: str
    role: str
    organisation: str
    expires: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """One certificate that the TLS port takes; `serial` is lower-case hex without prefix."""

    serial: str
    expires: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """One name that was ever invited."""

    name: str
    role: str
    organisation: str
    state: MemberState
    signing_key: bytes | None
    token_expires: datetime
    certificate_expires: datetime | None  # of the newest one; None before enrolment and after revocation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run, without its manifest (`Store.manifest` has that: up to 16 MiB)."""

    run: str
    name: str
    job: bytes  # canonical JSON
    app_hash: str
    submitted_by: str
    crc32: int  # of the bytes of version 0
    status: RunStatus
    reason: bytes | None  # a serialised ErrorDetail
    submitted_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One committed round and the model version that it made."""

    round: int
    version: int
    record: bytes  # a serialised RoundRecord
    model_crc32: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the holder of a certificate stands: whether its membership holds, and which certificates count."""

    active: bool
    serials: frozenset[str]  # lower-case hex
