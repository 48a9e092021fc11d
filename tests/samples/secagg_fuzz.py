"""Every decoder of what a peer sends in a session, for bytes of any kind: `Malformed`, or the one encoding of a value.

`PYTHONPATH=tests python tests/samples/secagg_fuzz.py -max_total_time=60` looks for other endings with atheris, where that is
installed (`pip install atheris`). `tests/privacy/secagg/test_messages.py` does it by hypothesis, always.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from samples.secagg_session import plan_of

from atoll.privacy.secagg.agreement import Opening
from atoll.privacy.secagg.messages import (
    Phase,
    PublicKeys,
    ShareItem,
    Survivors,
    bitmap,
    decode_revealed,
    encode_revealed,
    read_bitmap,
    verify,
)
from atoll.wire.errors import Malformed

SITES = 11
PLAN = plan_of(SITES)

DECODERS: dict[str, Callable[[bytes], bytes]] = {
    "keys": lambda data: PublicKeys.decode(data).encode(),
    "share": lambda data: ShareItem.decode(data).encode(),
    "survivors": lambda data: Survivors.decode(data, SITES).encode(SITES),
    "revealed": lambda data: encode_revealed(decode_revealed(data)),
    "bitmap": lambda data: bitmap(read_bitmap(data, SITES), SITES),
    "opening": lambda data: Opening.decode(data).canonical(),
    **{phase.name.lower(): lambda data, phase=phase: verify(PLAN, phase, data).data for phase in Phase},  # type: ignore[misc]
}


def one(name: str, data: bytes) -> bool:
    """Whether a decoder takes the bytes; then it has read all of them.

    Raises:
        AssertionError: they are another value's bytes. Whatever else comes is a fault too.
    """
    try:
        again = DECODERS[name](data)
    except Malformed:
        return False
    assert again == data, f"{name}: {data.hex()} became {again.hex()}"
    return True


def each(data: bytes) -> None:
    """All decoders."""
    for name in DECODERS:
        one(name, data)


if __name__ == "__main__":
    atheris = import_module("atheris")
    atheris.instrument_all()
    atheris.Setup(sys.argv, each)
    atheris.Fuzz()
