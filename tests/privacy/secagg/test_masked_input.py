"""A site's input as it leaves, beside an implementation in Python's own integers that knows no blocks or threads."""

from __future__ import annotations

import hashlib
import math
import zlib
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.privacy.secagg import masked_input
from atoll.privacy.secagg.keys import Mask
from atoll.privacy.secagg.levels import Bits, largest_level
from atoll.privacy.secagg.masked_input import Encoding, Reals, RealsLane, rounding_key, slice_values, write_input
from atoll.wire.errors import BadUpdate

KEY = rounding_key(b"\x07" * 32, 3)
MASKS = [Mask(key=bytes([number]) * 32, negative=number % 3 == 0) for number in range(1, 6)]
EXACT = (17, 2**63, 2**63 - 1, 0, 2**64 - 5)
EXACT_MASKS = [Mask(key=bytes([number]) * 32, negative=number % 2 == 0) for number in range(11, 15)]


def encoding(bits: Bits = 32, *, bound: float = 8.0, share: float = 3 / 7, clips: bool = False) -> Encoding:
    return Encoding(bits=bits, scale=share * largest_level(10, bits) / bound, bound=bound, clips=clips, key=KEY)


def naive_stream(key: bytes, num_bytes: int) -> bytes:
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(num_bytes))


def naive_input(values: list[float], how: Encoding) -> bytes:
    """Each value by itself: scaled, rounded at random, masked by every stream, in Python's integers."""
    out = b""
    for place, number in enumerate(EXACT):
        for mask in EXACT_MASKS:
            stream = naive_stream(mask.key, 8 * len(EXACT))
            number += (-1 if mask.negative else 1) * int.from_bytes(stream[8 * place : 8 * place + 8], "little")
        out += (number % 2**64).to_bytes(8, "little")
    width = how.bits // 8
    rounding = naive_stream(how.key, 4 * len(values))
    streams = [(mask, naive_stream(mask.key, width * len(values))) for mask in MASKS]
    for place, value in enumerate(values):
        shift = Fraction(int.from_bytes(rounding[4 * place : 4 * place + 4], "little", signed=True), 2**32)
        number = round(Fraction(value * (how.scale * 2.0**32)) / 2**32 + shift)
        for mask, stream in streams:
            number += (-1 if mask.negative else 1) * int.from_bytes(
                stream[width * place : width * (place + 1)], "little"
            )
        out += (number % 2**how.bits).to_bytes(width, "little")
    return out


def lane_of(values: np.ndarray, how: Encoding, cuts: list[int] | None = None) -> RealsLane:
    edges: list[int] = sorted({0, values.size, *(cuts or ())})
    pieces = [Reals(low, values[low:high]) for low, high in pairwise(edges)]
    return RealsLane(pieces, how, MASKS, name_at=lambda index: f'tensor "t{index}"')


def written(values: np.ndarray, how: Encoding, num_threads: int | None = None) -> bytes:
    out = bytearray(8 * len(EXACT) + how.bits // 8 * values.size)
    told = write_input(memoryview(out), EXACT, EXACT_MASKS, lane_of(values, how), num_threads=num_threads)
    assert (told.num_bytes, told.crc32, told.sha256) == (len(out), zlib.crc32(out), hashlib.sha256(out).digest())
    return bytes(out)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=60),
    bits=st.sampled_from([16, 32]),
    share=st.floats(1e-6, 1),
)
def test_the_bytes_are_those_of_the_naive_implementation(values: list[float], bits: Bits, share: float) -> None:
    how = encoding(bits, share=share)
    assert written(np.array(values, dtype=np.float32), how) == naive_input(values, how)
    assert written(np.array(values, dtype=np.float64), how) == naive_input(values, how)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_input, "SLICE_VALUES", 3000)
    monkeypatch.setattr(masked_input, "BLOCK_VALUES", 701)


@pytest.mark.parametrize("bits", [16, 32])
def test_threads_slices_and_blocks_change_no_byte(
    bits: Bits, small_slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(3).normal(size=25_000).astype(np.float32)
    found = {written(values, encoding(bits), num_threads=number) for number in (1, 2, 5)}
    monkeypatch.undo()
    assert found == {written(values, encoding(bits))}


@settings(max_examples=200, deadline=None)
@given(num_values=st.integers(0, 10**9), num_threads=st.integers(1, 64))
def test_threads_have_slices_alike(num_values: int, num_threads: int) -> None:
    size = slice_values(num_values, num_threads)
    assert 0 < size <= masked_input.SLICE_VALUES
    slices = -(-num_values // size)
    rounds = -(-slices // num_threads)
    assert (
        rounds * size <= num_values / num_threads + rounds * 4096
    )  # no thread works on more than its share and a page


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_ranks_that_write_their_own_slices_give_the_bytes_of_one(data: st.DataObject) -> None:
    """DDP: each of two ranks writes a half of what both have. FSDP: each has the values of its own slices alone."""
    values = np.random.default_rng(4).normal(size=5000).astype(np.float32)
    how = encoding()
    whole = np.zeros(values.size, dtype="<u4")
    lane_of(values, how).write(0, whole)
    edges = sorted({0, values.size, *data.draw(st.lists(st.integers(1, 4999), max_size=8))})
    parts = np.zeros(values.size, dtype="<u4")
    for low, high in pairwise(edges):
        own = np.full(values.size, np.nan, dtype=np.float32)  # what a rank does not have it must not read
        own[low:high] = values[low:high]
        lane_of(own, how, cuts=edges).write(low, parts[low:high])
    assert np.array_equal(parts, whole)


def test_a_worker_that_is_killed_and_begins_again_writes_the_same_bytes(small_slices: None) -> None:
    values = np.random.default_rng(5).normal(size=20_000).astype(np.float32)
    wanted = written(values, encoding())
    out, slices = bytearray(len(wanted)), 0

    def killed() -> None:
        nonlocal slices
        slices += 1
        if slices == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_input(memoryview(out), EXACT, EXACT_MASKS, lane_of(values, encoding()), num_threads=1, on_slice=killed)
    assert bytes(out) != wanted
    write_input(memoryview(out), EXACT, EXACT_MASKS, lane_of(values, encoding()))
    assert bytes(out) == wanted


def test_what_lies_in_the_file_from_before_does_not_matter() -> None:
    values = np.random.default_rng(6).normal(size=100).astype(np.float32)
    out = bytearray(b"\xff" * (40 + 400))
    write_input(memoryview(out), EXACT, EXACT_MASKS, lane_of(values, encoding()))
    assert bytes(out) == written(values, encoding())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 8.001, -8.001, 3e38])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_value_that_is_not_finite_or_beyond_the_bound_is_an_error(value: float, dtype: type) -> None:
    values: NDArray[Any] = np.zeros(100_000, dtype=dtype)
    values[70_001] = value
    with pytest.raises(BadUpdate, match=r'tensor "t70001" moved by .*, secure aggregation takes at most 8') as caught:
        written(values, encoding())
    assert (caught.value.field, caught.value.bound) == ('tensor "t70001"', "8.0")
    values[70_001] = math.copysign(8.0, value)
    written(values, encoding())


def test_where_values_may_be_clipped_they_are_counted_and_cut_to_the_bound() -> None:
    values = np.random.default_rng(8).normal(size=100_000).astype(np.float32) * 4
    how = encoding(clips=True)
    assert lane_of(values, how).num_beyond() == int((np.abs(values) > 8).sum()) > 1000
    assert written(values, how) == written(np.clip(values, -8, 8), encoding())
    values[123] = math.inf
    with pytest.raises(BadUpdate, match='tensor "t123" moved by inf'):
        written(values, how)


def test_bfloat16_is_read_as_it_is() -> None:
    values = np.random.default_rng(9).normal(size=1000).astype(np.float32)
    upper = (values.view("<u4") >> 16).astype("<u2")
    rounded = (upper.astype("<u4") << 16).view("<f4")
    assert written(upper, encoding()) == written(rounded, encoding())


@pytest.mark.parametrize("value", [2**64, -1])
def test_an_exact_value_that_has_no_place_is_an_error(value: int) -> None:
    lane = lane_of(np.zeros(2, dtype=np.float32), encoding())
    with pytest.raises(BadUpdate, match="exact value 1 of an input"):
        write_input(memoryview(bytearray(24)), [0, value], [], lane)


def test_pieces_with_a_gap_or_another_length_of_file() -> None:
    values = np.zeros(10, dtype=np.float32)
    with pytest.raises(ValueError, match="do not follow one another"):
        RealsLane([Reals(0, values), Reals(11, values)], encoding(), MASKS)
    with pytest.raises(ValueError, match="an input of 48 bytes into 47"):
        write_input(memoryview(bytearray(47)), [1], [], lane_of(values, encoding()))


def test_keys_of_rounding_differ_by_round_and_are_not_shown() -> None:
    assert rounding_key(b"\x07" * 32, 3) != rounding_key(b"\x07" * 32, 4)
    assert KEY.hex() not in repr(encoding())
    assert str(KEY) not in repr(encoding())
