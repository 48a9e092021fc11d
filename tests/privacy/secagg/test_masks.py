"""Masks: the key stream of the standard, from any place, and sums in which they cancel."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.privacy.secagg.keys import Mask
from atoll.privacy.secagg.masks import BLOCK_BYTES, KeyStream, add_masks


@pytest.mark.parametrize(
    ("key", "counter", "plain", "cipher"),
    [
        (
            "776beff2851db06f4c8a0542c8696f6c6a81af1eec96b4d37fc1d689e6c1c104",
            "00000060db5672c97aa8f0b200000001",
            "53696e676c6520626c6f636b206d7367",
            "145ad01dbf824ec7560863dc71e3e0c0",
        ),
        (
            "f6d66d6bd52d59bb0796365879eff886c66dd51a5b6a99744b50590c87a23884",
            "00faac24c1585ef15a43d87500000001",
            "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
            "f05e231b3894612c49ee000b804eb2a9b8306b508f839d6a5530831d9344af1c",
        ),
    ],
)
def test_the_key_stream_is_aes_256_ctr_by_rfc_3686(key: str, counter: str, plain: str, cipher: str) -> None:
    size = len(plain) // 2
    stream = KeyStream(bytes.fromhex(key), 16 * int(counter, 16)).next(size // 4, np.dtype("<u4")).tobytes()
    assert bytes(a ^ b for a, b in zip(stream, bytes.fromhex(plain), strict=True)).hex() == cipher


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 5000), size=st.integers(0, 3000), width=st.sampled_from([2, 4, 8]))
def test_a_slice_has_the_masks_of_the_whole(start: int, size: int, width: int) -> None:
    masks = [Mask(key=b"\x01" * 32), Mask(key=b"\x02" * 32, negative=True)]
    whole = np.zeros(8000, dtype=f"<u{width}")
    add_masks(whole, 0, masks)
    part = np.zeros(size, dtype=f"<u{width}")
    add_masks(part, start, masks)
    assert np.array_equal(part, whole[start : start + size])


def test_blocks_join_without_a_seam() -> None:
    values = np.zeros(BLOCK_BYTES // 4 * 2 + 5, dtype="<u4")
    add_masks(values, 0, [Mask(key=b"\x07" * 32)])
    near = BLOCK_BYTES // 4 - 3
    around = np.zeros(6, dtype="<u4")
    add_masks(around, near, [Mask(key=b"\x07" * 32)])
    assert np.array_equal(values[near : near + 6], around)


def test_opposite_masks_cancel() -> None:
    values = np.arange(100_000, dtype="<u4")
    masks = [Mask(key=secrets.token_bytes(32), negative=number % 2 == 0) for number in range(5)]
    add_masks(values, 17, masks)
    assert not np.array_equal(values, np.arange(100_000, dtype="<u4"))
    add_masks(values, 17, [mask.opposite for mask in masks])
    assert np.array_equal(values, np.arange(100_000, dtype="<u4"))


def test_masked_zeros_are_uniform_and_two_sites_unrelated() -> None:
    """Chi-square of bytes, 255 degrees of freedom, below 400 (p of 1e-8 by the normal approximation); correlation of
    two sites' masked zeros within 5 / sqrt(n)."""
    first, second = (np.zeros(1 << 16, dtype="<u4") for _ in range(2))
    add_masks(first, 0, [Mask(key=b"\x03" * 32)])
    add_masks(second, 0, [Mask(key=b"\x04" * 32)])
    for values in (first, second, first - second):
        counts = np.bincount(values.view(np.uint8), minlength=256)
        expected = values.nbytes / 256
        assert float(((counts - expected) ** 2 / expected).sum()) < 400
    related = np.corrcoef(first.astype(float), second.astype(float))[0, 1]
    assert abs(related) < 5 / np.sqrt(first.size)


def test_keys_are_not_shown() -> None:
    assert "\\x03" not in repr(Mask(key=b"\x03" * 32))
