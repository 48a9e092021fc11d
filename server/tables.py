"""The tables of a server's state, for SQLite and PostgreSQL alike. Rules of evolution: a column never changes its
meaning; a change of this file raises SCHEMA_VERSION, and `database.py` refuses a schema newer than it knows.

Times are seconds since 1970, UTC. `bytes` columns hold serialised protobuf messages unless said otherwise.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

SCHEMA_VERSION = 1

metadata = MetaData()

schema = Table("atoll_schema", metadata, Column("version", Integer, nullable=False))

# Who was invited, enrolled, revoked. A name belongs to one member, whatever its role.
members = Table(
    "members",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("organisation", String(128), nullable=False),
    Column("state", String(16), nullable=False),  # invited, enrolled, revoked
    Column("secret_sha256", LargeBinary(32), nullable=False),  # of the newest token; the secret itself is nowhere
    Column("token_expires_unix_s", Double, nullable=False),
    Column("token_used", Integer, nullable=False, default=0),
    Column("signing_key", LargeBinary(32)),  # Ed25519 public key; sites only
    CheckConstraint("state in ('invited', 'enrolled', 'revoked')", name="members_state"),
)

# Certificates that the TLS port takes. Renewal adds one; revocation removes those of a name.
certificates = Table(
    "certificates",
    metadata,
    Column("serial", String(40), primary_key=True),  # hex: 20 bytes do not fit an integer column
    Column("name", String(63), ForeignKey("members.name"), nullable=False),
    Column("expires_unix_s", Double, nullable=False),
    Index("certificates_by_name", "name"),
)

member_lists = Table(
    "member_lists",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("signed", LargeBinary, nullable=False),  # SignedMemberList
)

runs = Table(
    "runs",
    metadata,
    Column("run", String(26), primary_key=True),  # sorts by time of submission
    Column("name", String(63), nullable=False),
    Column("job", LargeBinary, nullable=False),  # canonical JSON
    Column("manifest", LargeBinary, nullable=False),
    Column("app_hash", String(64), nullable=False),
    Column("submitted_by", String(63), nullable=False),
    Column("request", String(64), nullable=False),
    Column("crc32", BigInteger, nullable=False),  # of the bytes of version 0
    Column("status", String(16), nullable=False),
    Column("reason", LargeBinary),  # ErrorDetail
    Column("submitted_unix_s", Double, nullable=False),
    UniqueConstraint("submitted_by", "request", name="runs_request"),
)

# What happened in a run, in order, written before it is acted on.
journal = Table(
    "journal",
    metadata,
    Column("run", String(26), ForeignKey("runs.run"), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),  # from 1, without gaps
    Column("event", LargeBinary, nullable=False),
)

rounds = Table(
    "rounds",
    metadata,
    Column("run", String(26), ForeignKey("runs.run"), primary_key=True),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("record", LargeBinary, nullable=False),  # RoundRecord
    Column("model_crc32", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    UniqueConstraint("run", "version", name="rounds_version"),
)
