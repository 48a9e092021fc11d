"""What a server must remember: members, runs, the journal, committed rounds. Blocking; safe to use from many threads.

Invariant: a method that changes something is one transaction. When it has returned, the change survives a power cut;
when it raised, nothing changed. Every method may raise LocalError (the database failed) or DiskFull besides what it
names itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, func, insert, select, update

from atoll.server.database import Database
from atoll.server.records import Certificate, Invite, MemberRow, RoundRow, RunRow, RunStatus, Standing
from atoll.server.rows import find_member, invite_of, member_of, member_query, newest_list, round_of, run_of
from atoll.server.tables import certificates, journal, member_lists, members, rounds, runs
from atoll.wire.errors import Malformed, NotAllowed, Stale, TooLarge, Unknown

# Renewal is due twice a month, and each try whose answer is lost leaves one behind.
MAX_CERTIFICATES = 100

_RUN_COLUMNS = [column for column in runs.columns if column.name not in ("manifest", "request")]


class Store:
    """The state of one server."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url: str) -> Store:
        """The store behind a database URL. Raises as `Database.open` does."""
        return cls(Database.open(url))

    def close(self) -> None:
        self._database.close()

    # --- members --------------------------------------------------------------------------------------------------

    def invite(self, name: str, role: str, organisation: str, secret_sha256: bytes, expires: datetime) -> None:
        """Opens `name` for whoever has the secret. A new invitation replaces an unused one and readmits a revoked name.

        Raises:
            NotAllowed: the name is a member's already, or was another role's.
        """
        row = {
            "name": name,
            "role": role,
            "organisation": organisation,
            "state": "invited",
            "secret_sha256": secret_sha256,
            "token_expires_unix_s": expires.timestamp(),
            "token_used": 0,
            "signing_key": None,
        }
        with self._database.write() as connection:
            present = connection.execute(select(members).where(members.c.name == name)).one_or_none()
            if present is None:
                connection.execute(insert(members).values(row))
                return
            if present.state == "enrolled":
                raise NotAllowed(
                    f"{name} is already a {present.role}; revoke it before inviting it again", site=name, field="name"
                )
            if present.role != role:
                raise NotAllowed(
                    f"{name} was added as a {present.role} and cannot become a {role}; choose another name",
                    site=name,
                    field="role",
                    value=role,
                    bound=present.role,
                )
            connection.execute(update(members).where(members.c.name == name).values(row))

    def invited(self, name: str, secret_sha256: bytes, now: datetime) -> Invite:
        """The invitation that the secret opens; changes nothing.

        Raises:
            BadToken: the secret is wrong, used, expired, revoked, or for another name.
        """
        with self._database.read() as connection:
            return invite_of(connection, name, secret_sha256, now)

    def redeem(
        self,
        name: str,
        secret_sha256: bytes,
        now: datetime,
        *,
        certificate: Certificate,
        signing_key: bytes | None,
    ) -> Invite:
        """Uses the token up and records the certificate and signing key that it was used for, all or nothing.

        Raises:
            BadToken: as `invited`; of two calls with one secret only one returns.
        """
        with self._database.write() as connection:
            invite = invite_of(connection, name, secret_sha256, now)
            connection.execute(
                update(members)
                .where(members.c.name == name)
                .values(state="enrolled", token_used=1, signing_key=signing_key)
            )
            _insert_certificate(connection, name, certificate)
            return invite

    def record_certificate(self, name: str, certificate: Certificate, now: datetime) -> None:
        """Takes a renewed certificate beside those that still run, and forgets those that have run out.

        Raises:
            NotAllowed: `name` is not enrolled (any more).
            TooLarge: it has MAX_CERTIFICATES that still run.
        """
        with self._database.write() as connection:
            state = connection.execute(select(members.c.state).where(members.c.name == name)).scalar_one_or_none()
            if state != "enrolled":
                raise NotAllowed(f"{name} is not a member; ask the operator for a new token", site=name)
            expired = (certificates.c.name == name) & (certificates.c.expires_unix_s <= now.timestamp())
            connection.execute(delete(certificates).where(expired))
            running = select(func.count()).where(certificates.c.name == name)
            if connection.execute(running).scalar_one() >= MAX_CERTIFICATES:
                raise TooLarge(
                    f"{name} has {MAX_CERTIFICATES} running certificates; it renews far too often, look into its log",
                    site=name,
                    bound=MAX_CERTIFICATES,
                )
            _insert_certificate(connection, name, certificate)

    def revoke(self, name: str) -> MemberRow:
        """Ends a membership or an invitation: no certificate of `name` counts from now on. Again is harmless.

        Raises:
            Unknown: nobody has that name.
            NotAllowed: it is the last operator, without whom nobody could be admitted any more.
        """
        with self._database.write() as connection:
            member = find_member(connection, name)
            if (member.role, member.state) == ("operator", "enrolled"):
                operators = (members.c.role == "operator") & (members.c.state == "enrolled")
                if connection.execute(select(func.count()).where(operators)).scalar_one() == 1:
                    raise NotAllowed(
                        f"{name} is the last operator; admit another before: atoll user add NAME --role operator",
                        field="name",
                        value=name,
                    )
            connection.execute(update(members).where(members.c.name == name).values(state="revoked"))
            connection.execute(delete(certificates).where(certificates.c.name == name))
            return find_member(connection, name)

    def lookup(self, role: str, name: str) -> Standing | None:
        """Where the holder of a certificate for (role, name) stands; None where no such member was ever enrolled."""
        query = select(members.c.state).where((members.c.name == name) & (members.c.role == role))
        with self._database.read() as connection:
            state = connection.execute(query).scalar_one_or_none()
            if state is None or state == "invited":
                return None
            serials = connection.scalars(select(certificates.c.serial).where(certificates.c.name == name)).all()
        return Standing(active=state == "enrolled", serials=frozenset(serials))

    def member(self, name: str) -> MemberRow:
        """One member. Raises Unknown where nobody has that name."""
        with self._database.read() as connection:
            return find_member(connection, name)

    def members(self) -> list[MemberRow]:
        """Everyone who was ever invited, by name."""
        with self._database.read() as connection:
            return [member_of(row) for row in connection.execute(member_query().order_by(members.c.name))]

    def sites(self) -> list[MemberRow]:
        """The members that are sites, by name."""
        return [member for member in self.members() if member.role == "site"]

    def save_member_list(self, version: int, signed: bytes) -> None:
        """Keeps a signed member list. The same list again is harmless.

        Raises:
            Stale: `version` is not newer than the newest one kept.
        """
        with self._database.write() as connection:
            newest = connection.execute(newest_list()).one_or_none()
            if newest is not None and newest.version >= version:
                if newest.version == version and newest.signed == signed:
                    return
                raise Stale(
                    f"member list {version} is not newer than {newest.version}, which is published; sign again: "
                    "atoll federation sign",
                    field="version",
                    value=version,
                    bound=f"> {newest.version}",
                )
            connection.execute(insert(member_lists).values(version=version, signed=signed))

    def member_list(self) -> bytes | None:
        """The newest SignedMemberList, serialised; None before the first."""
        with self._database.read() as connection:
            newest = connection.execute(newest_list()).one_or_none()
        return None if newest is None else newest.signed

    # --- runs -----------------------------------------------------------------------------------------------------

    def create_run(self, row: RunRow, *, manifest: bytes, request: str, events: Sequence[bytes] = ()) -> RunRow:
        """Keeps a new run and returns it; a call repeated with the same submitter and request returns the first run.

        Args:
            events: what its journal begins with.

        Raises:
            Malformed: the same request came before with another job, manifest, app or model.
        """
        same = (runs.c.submitted_by == row.submitted_by) & (runs.c.request == request)
        with self._database.write() as connection:
            present = connection.execute(select(runs).where(same)).one_or_none()
            if present is None:
                values = {column.name: getattr(row, column.name) for column in _RUN_COLUMNS[:-1]}
                values["submitted_unix_s"] = row.submitted_at.timestamp()
                connection.execute(insert(runs).values(values | {"manifest": manifest, "request": request}))
                _append(connection, row.run, events)
                return row
            before = (present.job, present.manifest, present.app_hash, present.crc32)
            if before != (row.job, manifest, row.app_hash, row.crc32):
                raise Malformed(
                    f"request {request!r} was used before, for run {present.run} with another job or model; "
                    "choose a new request",
                    run=present.run,
                    field="request",
                    value=request,
                )
            return run_of(present)

    def run(self, run: str) -> RunRow:
        """One run. Raises Unknown where there is none of that id."""
        with self._database.read() as connection:
            row = connection.execute(select(*_RUN_COLUMNS).where(runs.c.run == run)).one_or_none()
        if row is None:
            raise _no_run(run)
        return run_of(row)

    def manifest(self, run: str) -> bytes:
        """The serialised manifest of a run's model. Raises Unknown where there is no such run."""
        with self._database.read() as connection:
            manifest = connection.execute(select(runs.c.manifest).where(runs.c.run == run)).scalar_one_or_none()
        if manifest is None:
            raise _no_run(run)
        return bytes(manifest)

    def runs(self) -> list[RunRow]:
        """All runs, newest first."""
        with self._database.read() as connection:
            return [run_of(row) for row in connection.execute(select(*_RUN_COLUMNS).order_by(runs.c.run.desc()))]

    def set_status(self, run: str, status: RunStatus, reason: bytes | None = None) -> None:
        """Raises Unknown where there is no such run."""
        with self._database.write() as connection:
            changed = connection.execute(update(runs).where(runs.c.run == run).values(status=status, reason=reason))
            if changed.rowcount == 0:
                raise _no_run(run)

    # --- journal and rounds ---------------------------------------------------------------------------------------

    def append(self, run: str, events: Sequence[bytes]) -> None:
        """Writes events to the end of a run's journal, in order. Raises Unknown where there is no such run."""
        with self._database.write() as connection:
            _append(connection, run, events)

    def events(self, run: str, most: int | None = None) -> list[bytes]:
        """The journal of a run, oldest first, or its first `most` events; empty where there is none."""
        query = select(journal.c.event).where(journal.c.run == run).order_by(journal.c.seq).limit(most)
        with self._database.read() as connection:
            return [bytes(event) for event in connection.scalars(query)]

    def commit_round(self, run: str, events: Sequence[bytes], row: RoundRow) -> None:
        """Commits a round together with the events that say so. A call repeated with the same version is harmless.

        Raises:
            Unknown: there is no such run.
            Stale: the round was committed before with another version or other bytes.
        """
        with self._database.write() as connection:
            at = (rounds.c.run == run) & (rounds.c.round == row.round)
            present = connection.execute(select(rounds).where(at)).one_or_none()
            if present is not None:
                if (present.version, present.model_crc32, present.num_bytes) == (
                    row.version,
                    row.model_crc32,
                    row.num_bytes,
                ):
                    return
                raise Stale(
                    f"run {run}, round {row.round}: already committed as version {present.version}",
                    run=run,
                    round=row.round,
                    value=row.version,
                    bound=present.version,
                )
            _append(connection, run, events)
            connection.execute(
                insert(rounds).values(
                    run=run,
                    round=row.round,
                    version=row.version,
                    record=row.record,
                    model_crc32=row.model_crc32,
                    num_bytes=row.num_bytes,
                )
            )

    def rounds(self, run: str) -> list[RoundRow]:
        """The committed rounds of a run, oldest first."""
        query = select(rounds).where(rounds.c.run == run).order_by(rounds.c.round)
        with self._database.read() as connection:
            return [round_of(row) for row in connection.execute(query)]

    def update_round_record(self, run: str, round: int, record: bytes) -> None:
        """Replaces the record of a committed round (its evaluation comes in later). Raises Unknown without one."""
        at = (rounds.c.run == run) & (rounds.c.round == round)
        with self._database.write() as connection:
            if connection.execute(update(rounds).where(at).values(record=record)).rowcount == 0:
                raise Unknown(f"run {run} has no committed round {round}", run=run, round=round)


def _append(connection: Connection, run: str, events: Sequence[bytes]) -> None:
    if connection.execute(select(runs.c.run).where(runs.c.run == run)).one_or_none() is None:
        raise _no_run(run)
    last = connection.execute(
        select(func.coalesce(func.max(journal.c.seq), 0)).where(journal.c.run == run)
    ).scalar_one()
    if events:
        rows = [{"run": run, "seq": last + place, "event": event} for place, event in enumerate(events, start=1)]
        connection.execute(insert(journal), rows)


def _insert_certificate(connection: Connection, name: str, certificate: Certificate) -> None:
    connection.execute(
        insert(certificates).values(
            serial=certificate.serial, name=name, expires_unix_s=certificate.expires.timestamp()
        )
    )


def _no_run(run: str) -> Unknown:
    return Unknown(f"there is no run {run}; see: atoll runs", run=run, field="run", value=run)
