"""Which bytes of an object are in: every frame is checked before any of it is kept, and counted after.

Invariant: the first `received_bytes` bytes are there, in order, without a gap, each under a checksum that was right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from atoll.wire.errors import BadFrame, TooLarge
from atoll.wire.frames import FRAME_HEADER, check_payload, decode_frame, decode_header


class Intake:
    """The count and the running checksum of one object as its frames come in.

    Args:
        num_bytes: length of the whole object.
        crc32: of the whole object (zlib); None where nobody announced it.
        what: names the object in errors, e.g. "update of site-3, round 12".
    """

    def __init__(self, num_bytes: int, crc32: int | None = None, what: str = "object") -> None:
        self.num_bytes, self._announced_crc32, self._what = num_bytes, crc32, what
        self.received_bytes, self.crc32 = 0, 0

    def take(self, frame: bytes, keep: Callable[[int, memoryview], None]) -> None:
        """Counts the frame once `keep(offset, payload)` has stored its bytes.

        Raises:
            BadFrame: damaged, or not the next bytes.
            TooLarge: it ends beyond the object.
        """
        offset, payload = decode_frame(frame)
        self._expect(offset, payload.nbytes)
        keep(offset, payload)
        self.count(payload.nbytes, FRAME_HEADER.unpack_from(frame)[2])

    def read(
        self,
        header: bytes | bytearray,
        room: Callable[[int, int], memoryview],
        fill: Callable[[memoryview], None],
        keep: Callable[[int, memoryview], None] = lambda offset, payload: None,
    ) -> None:
        """As `take`, for a frame of which only the header has come: `fill` brings the payload.

        Args:
            room: gives the place of the payload, by its offset and length; asked once the header is found right.

        Raises:
            BadFrame, TooLarge: as `take`; of what was filled nothing is counted.
        """
        offset, length, crc32 = decode_header(header)
        self._expect(offset, length)
        payload = room(offset, length)
        fill(payload)
        check_payload(offset, payload, crc32)
        keep(offset, payload)
        self.count(length, crc32)

    def _expect(self, offset: int, length: int) -> None:
        """Raises BadFrame where it is not the next frame, TooLarge where it ends beyond the object."""
        if offset != self.received_bytes:
            raise BadFrame(
                f"{self._what}: frame at byte {offset}, wanted byte {self.received_bytes}; go on from there",
                field="offset",
                value=offset,
                bound=self.received_bytes,
            )
        if length > self.num_bytes - offset:
            raise TooLarge(
                f"{self._what}: frame at byte {offset} ends at byte {offset + length}, the object has "
                f"{self.num_bytes} bytes",
                field="num_bytes",
                value=offset + length,
                bound=self.num_bytes,
            )

    def count(self, num_bytes: int, crc32: int) -> None:
        """Counts the next bytes, which are stored, by their length and checksum."""
        self.crc32 = combine_crc32(self.crc32, crc32, num_bytes)
        self.received_bytes += num_bytes

    @property
    def complete(self) -> bool:
        return self.received_bytes == self.num_bytes

    def check_whole(self) -> None:
        """Raises BadFrame where all bytes are in and are not those that were announced."""
        if self.complete and self._announced_crc32 not in (None, self.crc32):
            raise BadFrame(
                f"{self._what}: the crc32 of all {self.num_bytes} bytes is {self.crc32:08x}, announced was "
                f"{self._announced_crc32:08x}; send the object again from its first byte",
                field="crc32",
                value=f"{self.crc32:08x}",
                bound=f"{self._announced_crc32:08x}",
            )


# A crc32 is a polynomial over GF(2) modulo P, so that of two pieces together follows from those of the pieces: as in
# crc32_combine of zlib 1.2.12, which Python does not offer. It costs 10 us a frame; a second pass over the frame 150.
_P = 0xEDB88320  # bits reflected: the highest bit is x^0
_ONE = 1 << 31


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """The crc32 of two pieces in a row, from the crc32 of each and the length of the second."""
    return _multiply(_power_of_x(8 * second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """a times b modulo P."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _P if b & 1 else b >> 1
    return product


@lru_cache(maxsize=64)  # nearly all frames of all transfers have one length
def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        exponent >>= 1
    return power
