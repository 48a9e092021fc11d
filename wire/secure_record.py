"""How a round's sum was protected, as plain values for people and programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.wire.secure_pb2 import SecureRecord


def secure_values(record: SecureRecord) -> dict[str, Any]:
    """The record of a sum as JSON has it: who may lie, cohort, shares that rebuild a secret, drops, liars."""
    return {
        "threat": record.threat,
        "sites": record.num_sites,
        "threshold": record.threshold,
        "corrupt": record.num_corrupt,
        "fewest_survivors": record.fewest_survivors,
        "sessions": record.sessions,
        "parts": record.parts or 1,
        "dropped": list(record.dropped),
        "liars": dict(record.liars),
    }
