"""Names that cross between organisations: what each may look like, and fresh run ids.

Names become parts of paths, table keys and terminal lines, so each kind has a small alphabet that is safe in all
three. A check returns the name, so that it can stand where the name is used.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable

from atoll.wire.errors import Malformed

SITE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # as a DNS label, which certificates carry
LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")  # apps, scripts, data, jobs
TASK_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")  # holds a round and a site's name
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")  # payloads, requests
RUN_ID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")  # a ULID: Crockford's base 32, which has no I, L, O, U
SHA256_HEX = re.compile(r"[0-9a-f]{64}")
ORGANISATION_CHARACTERS = 128
PERSONAL = "personal_"  # what the names of metrics of a site's own model begin with

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RANDOM_BITS = 80


def _matching(pattern: re.Pattern[str], value: str, field: str, wanted: str) -> str:
    if not pattern.fullmatch(value):
        raise Malformed(
            f"{field} {value[:200]!r} is not a valid name: {wanted}", field=field, value=value, bound=wanted
        )
    return value


def check_site_name(name: str, field: str = "site") -> str:
    """The name of a site, a person or a federation: 1 to 63 of a-z 0-9 -, no hyphen at either end. Raises Malformed."""
    return _matching(SITE_NAME, name, field, "1 to 63 of a-z, 0-9 and -, no hyphen first or last")


def check_label(name: str, field: str) -> str:
    """The name of an app, script, data set or job: 1 to 63 of A-Z a-z 0-9 . _ -, no . or - first. Raises Malformed."""
    return _matching(LABEL, name, field, "1 to 63 of A-Z, a-z, 0-9 and . _ -, a letter, digit or _ first")


def check_task_id(name: str) -> str:
    """The id of a task within its run: 1 to 96 characters, alphabet of `check_label`. Raises Malformed."""
    return _matching(TASK_ID, name, "task", "1 to 96 of A-Z, a-z, 0-9 and . _ -, a letter, digit or _ first")


def check_payload_name(name: str) -> str:
    """The name of a result's payload: 1 to 64 characters, alphabet of `check_label`. Raises Malformed."""
    return _matching(PART_NAME, name, "payload", "1 to 64 of A-Z, a-z, 0-9 and . _ -, a letter, digit or _ first")


def check_request_id(name: str) -> str:
    """The id by which a submission is repeated safely: 1 to 64 characters, alphabet of `check_label`. Raises Malformed."""
    return _matching(PART_NAME, name, "request", "1 to 64 of A-Z, a-z, 0-9 and . _ -, a letter, digit or _ first")


def check_run_id(name: str) -> str:
    """A run id as `new_run_id` makes them. Raises Malformed."""
    return _matching(RUN_ID, name, "run", "26 characters as printed by `atoll runs`")


def check_sha256(text: str, field: str) -> str:
    """A SHA-256 in lower-case hex. Raises Malformed."""
    return _matching(SHA256_HEX, text, field, "64 characters of 0-9 and a-f")


def check_organisation(name: str) -> str:
    """The name of an organisation: 1 to 128 printable characters, no blank at either end. Raises Malformed."""
    if not 1 <= len(name) <= ORGANISATION_CHARACTERS or not name.isprintable() or name != name.strip():
        wanted = f"1 to {ORGANISATION_CHARACTERS} printable characters, no blank first or last"
        raise Malformed(f"organisation {name[:200]!r}: wanted {wanted}", field="organisation", value=name, bound=wanted)
    return name


def new_run_id(now_s: float | None = None, random_bits: Callable[[int], int] = secrets.randbits) -> str:
    """A fresh run id of 26 characters; ids of later milliseconds sort after earlier ones.

    Args:
        now_s: seconds since 1970; the present where None.
        random_bits: gives an integer of so many random bits; seeded only in tests.
    """
    milliseconds = int((time.time() if now_s is None else now_s) * 1000)
    number = (milliseconds << _RANDOM_BITS) | random_bits(_RANDOM_BITS)
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))
