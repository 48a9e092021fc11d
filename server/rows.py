"""Rows of the tables as records, and the questions about members that several methods of the store ask."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row, Select, func, select

from atoll.server.records import Invite, MemberRow, RoundRow, RunRow
from atoll.server.tables import certificates, member_lists, members
from atoll.wire.errors import BadToken, Unknown


def invite_of(connection: Connection, name: str, secret_sha256: bytes, now: datetime) -> Invite:
    """The invitation behind a token's secret. Raises BadToken as `Store.invited` does."""
    row = connection.execute(select(members).where(members.c.secret_sha256 == secret_sha256)).one_or_none()
    advice = "ask the operator for a new one: atoll site add"
    if row is None:
        raise BadToken(f"the token is wrong, or a newer one replaced it; {advice}", field="token")
    if row.name != name:
        raise BadToken(
            f"the token is not for {name}; join under the name that it was made for", field="name", value=name
        )
    if row.state == "revoked":
        raise BadToken(f"{name} was revoked; {advice}", site=name, field="token")
    if row.token_used:
        raise BadToken(f"the token of {name} was used already; {advice}", site=name, field="token")
    expires = time_of(row.token_expires_unix_s)
    if now >= expires:
        raise BadToken(
            f"the token of {name} expired at {expires:%Y-%m-%d %H:%M} UTC; {advice}",
            site=name,
            field="token",
            value=f"{now:%Y-%m-%d %H:%M}",
            bound=f"{expires:%Y-%m-%d %H:%M}",
        )
    return Invite(name=row.name, role=row.role, organisation=row.organisation, expires=expires)


def find_member(connection: Connection, name: str) -> MemberRow:
    """One member. Raises Unknown where nobody has that name."""
    row = connection.execute(member_query().where(members.c.name == name)).one_or_none()
    if row is None:
        raise Unknown(f"no member is named {name}; see: atoll site list", field="name", value=name)
    return member_of(row)


def member_query() -> Select[Any]:
    """All members, with the expiry of each one's newest certificate."""
    newest = (
        select(func.max(certificates.c.expires_unix_s)).where(certificates.c.name == members.c.name).scalar_subquery()
    )
    return select(members, newest.label("certificate_expires_unix_s"))


def newest_list() -> Select[Any]:
    """The newest member list, or no row."""
    return select(member_lists).order_by(member_lists.c.version.desc()).limit(1)


def member_of(row: Row[Any]) -> MemberRow:
    expires = row.certificate_expires_unix_s
    return MemberRow(
        name=row.name,
        role=row.role,
        organisation=row.organisation,
        state=row.state,
        signing_key=row.signing_key,
        token_expires=time_of(row.token_expires_unix_s),
        certificate_expires=None if expires is None else time_of(expires),
    )


def run_of(row: Row[Any]) -> RunRow:
    return RunRow(
        run=row.run,
        name=row.name,
        job=row.job,
        app_hash=row.app_hash,
        submitted_by=row.submitted_by,
        crc32=row.crc32,
        status=row.status,
        reason=row.reason,
        submitted_at=time_of(row.submitted_unix_s),
    )


def round_of(row: Row[Any]) -> RoundRow:
    return RoundRow(
        round=row.round,
        version=row.version,
        record=row.record,
        model_crc32=row.model_crc32,
        num_bytes=row.num_bytes,
    )


def time_of(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)
