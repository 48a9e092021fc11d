"""One frozen session: five sites, of which one drops out after its shares are out. Every byte of it is in the repository.

`python tests/privacy/secagg/test_transcript.py` writes the file where it is missing. A change of these bytes is another
protocol: give it a new suite, and keep this file as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from samples.secagg_session import Session, as_integers, inputs, naive_sum, plan_of

from atoll.privacy.secagg import shamir
from atoll.privacy.secagg.plan import Lane
from atoll.privacy.secagg.site import Secrets

FILE = Path(__file__).parents[2] / "golden" / "secagg_transcript.json"
LANES = (Lane(bits=64, num_values=2), Lane(bits=32, num_values=9), Lane(bits=16, num_values=5))
SITES, DROPPED = set(range(5)), 3


@contextmanager
def drawn(stream: Iterator[bytes]) -> Iterator[None]:
    """All that sites draw comes from a stream that everybody can compute."""

    def below(bound: int) -> int:
        return int.from_bytes(next(stream) + next(stream)[:8], "big") % bound

    split = shamir.split
    with (
        patch("atoll.privacy.secagg.site.secrets.token_bytes", lambda size: next(stream)[:size]),
        patch(
            "atoll.privacy.secagg.site.shamir.split",
            lambda secret, threshold, numbers: split(secret, threshold, numbers, below),
        ),
    ):
        yield


def stream(name: str) -> Iterator[bytes]:
    number = 0
    while True:
        yield hashlib.sha256(f"transcript {name} {number}".encode()).digest()
        number += 1


def played() -> tuple[Session, dict[str, Any]]:
    """The session, and all that was said in it, as text."""
    session = Session(plan_of(5, lanes=LANES))
    values = inputs(session.plan)
    with drawn(stream("draws")):
        session.advertise(SITES, lambda _: Secrets.draw())
        session.share(SITES)
    session.send_inputs(SITES - {DROPPED}, values)
    session.confirm(SITES - {DROPPED})
    session.unmask(SITES - {DROPPED})
    sums, found = session.result()
    server = session.server
    return session, {
        "plan_hash": session.plan.hash.hex(),
        "session": session.plan.session.hex(),
        "signing_keys": [key.private_bytes_raw().hex() for key in session.keys],
        "secrets": {
            str(index): {
                "sealing_key": state.secrets.sealing_key.hex(),
                "masking_key": state.secrets.masking_key.hex(),
                "seed": state.secrets.seed.hex(),
            }
            for index, state in session.states.items()
        },
        "advertised": texts(server.advertised),
        "shared": {str(owner): texts(items) for owner, items in server.shared.items()},
        "levels": {str(index): [lane.tobytes().hex() for lane in values[index]] for index in sorted(SITES)},
        "masked": {str(index): [lane.tobytes().hex() for lane in lanes] for index, lanes in session.masked.items()},
        "inputs": texts(server.inputs),
        "survivors": server.survivors.hex(),
        "confirmed": texts(server.confirmed),
        "unmasked": texts(server.unmasked),
        "unmasking": [[(mask.key.hex(), mask.negative) for mask in lane] for lane in found.masks],
        "sums": [lane.tobytes().hex() for lane in sums],
    }


def texts(messages: Any) -> dict[str, str]:
    return {str(index): data.hex() for index, data in messages.items()}


def as_text(transcript: dict[str, Any]) -> str:
    return json.dumps(transcript, indent=1) + "\n"


def test_the_session_has_the_bytes_of_the_transcript() -> None:
    _, transcript = played()
    known = json.loads(FILE.read_text())
    for name, value in json.loads(as_text(transcript)).items():
        assert value == known[name], name
    assert known.keys() == transcript.keys()


def test_the_transcript_holds_by_itself() -> None:
    """Without our code but for the key stream's standard: masked inputs less the masks that the server rebuilt are the sum."""
    known = json.loads(FILE.read_text())
    sums = []
    for place, lane in enumerate(LANES):
        width, total = lane.bits // 8, np.zeros(lane.num_values, f"<u{lane.bits // 8}")
        for lanes in known["masked"].values():
            total += np.frombuffer(bytes.fromhex(lanes[place]), total.dtype)
        for key, negative in known["unmasking"][place]:
            cipher = Cipher(algorithms.AES256(bytes.fromhex(key)), modes.CTR(bytes(16))).encryptor()
            mask = np.frombuffer(cipher.update(bytes(width * lane.num_values)), total.dtype)
            total = total - mask if negative else total + mask
        sums.append(total.tobytes().hex())
    assert sums == known["sums"]
    values = inputs(plan_of(5, lanes=LANES))
    session, _ = played()
    assert as_integers(session.result()[0]) == naive_sum(values, SITES - {DROPPED})
    assert str(DROPPED) not in known["masked"]


if __name__ == "__main__":
    if not FILE.exists():
        FILE.write_text(as_text(played()[1]))
