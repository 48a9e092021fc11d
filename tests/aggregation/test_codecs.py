from __future__ import annotations

import math

import pytest
import torch
from contracts.golden_updates import FOLDER, golden_update
from contracts.updates import BOUND, CODECS, EVERY_DTYPE, FLOATS, codec, decoded, encoded, layout_of, random_state
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.aggregation.codecs.casts import SUMMABLE
from atoll.aggregation.codecs.scaled import INT4, INT8
from atoll.aggregation.encode import encode_update
from atoll.aggregation.round_sum import RoundSum
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.wire.errors import BadUpdate

SCALED = {"int8": INT8, "int4": INT4}

finite = st.floats(-BOUND, BOUND, width=32)
vectors = st.lists(finite, min_size=1, max_size=600).map(lambda values: torch.tensor(values, dtype=torch.float32))


def round_trip(codec_name: str, values: Tensor) -> Tensor:
    """What a server reads of a difference, in float64."""
    layout = layout_of([("w", "float32", tuple(values.shape), "parameter")], codec_name)
    return decoded(layout, encoded(layout, {"w": torch.zeros_like(values)}, {"w": values}))


def error_bound(codec_name: str, values: Tensor) -> Tensor:
    """The documented bound, for each value of a float32 tensor."""
    if codec_name == "bfloat16":
        return values.abs().double() * 2**-8 + 2.0**-134  # the second: below bfloat16's smallest normal
    if scaled := SCALED.get(codec_name):
        groups = torch.nn.functional.pad(values, (0, -len(values) % scaled.group)).view(-1, scaled.group)
        most = groups.abs().amax(dim=1).double()
        bound = torch.where(most < (scaled.levels + 0.001) * 2.0**-126, most, most / (scaled.levels - 1))
        return bound.repeat_interleave(scaled.group)[: len(values)]
    if codec_name == "top_k":  # one group: what is left out is no larger than what travels
        return values.abs().double().clamp(max=values.abs().sort().values[-math.ceil(0.01 * len(values))])
    if codec_name == "random_k":
        return values.abs().double()
    return torch.zeros(len(values), dtype=torch.float64)


@pytest.mark.parametrize("codec_name", CODECS)
@given(values=vectors)
def test_round_trip_within_the_documented_error(codec_name: str, values: Tensor) -> None:
    error = (round_trip(codec_name, values) - values.double()).abs()
    assert bool((error <= error_bound(codec_name, values)).all())


@given(st.lists(st.floats(-BOUND, BOUND), min_size=1, max_size=50))
def test_native_float64_is_exact(numbers: list[float]) -> None:
    layout = layout_of([("w", "float64", (len(numbers),), "parameter")])
    payload = encoded(layout, {"w": torch.zeros(len(numbers)).double()}, {"w": torch.tensor(numbers).double()})
    assert decoded(layout, payload).tolist() == torch.tensor(numbers).double().tolist()


@given(st.lists(st.floats(-BOUND, BOUND, width=16), min_size=1, max_size=50))
def test_native_float16_is_the_difference_rounded_once(numbers: list[float]) -> None:
    layout = layout_of([("w", "float16", (len(numbers),), "parameter")])
    trained = torch.tensor(numbers, dtype=torch.float16)
    payload = encoded(layout, {"w": torch.full_like(trained, 0.1)}, {"w": trained}, bound=2 * BOUND)
    exact = trained.double() - torch.tensor(0.1, dtype=torch.float16).double()
    error = (decoded(layout, payload) - exact).abs()
    assert bool((error <= torch.maximum(exact.abs() * 2**-11, torch.tensor(2.0**-25))).all())


@pytest.mark.parametrize("codec_name", CODECS)
def test_every_dtype_travels(codec_name: str) -> None:
    layout = layout_of(EVERY_DTYPE, codec_name)
    base, trained = random_state(layout.manifest, 1), random_state(layout.manifest, 2)
    values = decoded(layout, encoded(layout, base, trained))
    for entry in layout.means:
        old, new = (
            (torch.view_as_real(t.to(torch.complex128)) if t.is_complex() else t.double()).reshape(-1)
            for t in (base[entry.spec.name], trained[entry.spec.name])
        )
        error = (values[entry.index : entry.index + entry.num_values] - (new - old)).abs().max()
        rough = {"int8": 0.06, "int4": 1.0}.get(codec_name, 0.04)
        if codec_name in ("top_k", "random_k") and entry.spec.role == "parameter":
            rough = float("inf")  # tests/aggregation/test_sparse.py says which values travel
        assert error <= rough, entry.spec.name
    assert {entry.spec.dtype for entry in layout.means} == set(SUMMABLE)


@pytest.mark.parametrize("codec_name", CODECS)
def test_golden_bytes(codec_name: str) -> None:
    assert golden_update(codec_name) == (FOLDER / f"{codec_name}.bin").read_bytes()


@pytest.mark.parametrize("codec_name", SCALED)
def test_rounding_is_without_bias(codec_name: str) -> None:
    # 2,000 draws of each value of a group: the mean error has a deviation of at most scale / 2 / sqrt(draws).
    size = SCALED[codec_name].group
    values = torch.linspace(-1, 1, size)
    layout = layout_of([("w", "float32", (size,), "parameter")], codec_name)
    total, draws, out = torch.zeros(size, dtype=torch.float64), 2000, bytearray(layout.num_bytes)
    for round in range(draws):
        key = rounding_key(bytes(32), round)
        encode_update(layout, {"w": torch.zeros(size)}, {"w": values}, out, rounding=Rounding(key), bound=1.0)
        total += decoded(layout, bytes(out))
    deviation = (1 / SCALED[codec_name].levels) / 2 / math.sqrt(draws)
    error = total / draws - values.double()
    assert error.abs().max() < 5 * deviation
    assert abs(error.mean()) < 5 * deviation / math.sqrt(size)


@pytest.mark.parametrize("codec_name", SCALED)
def test_rounding_is_reproducible_and_differs_by_site(codec_name: str) -> None:
    layout = layout_of(FLOATS, codec_name)
    base, trained = random_state(layout.manifest, 1), random_state(layout.manifest, 2)
    assert encoded(layout, base, trained, site="a") == encoded(layout, base, trained, site="a")
    assert encoded(layout, base, trained, site="a") != encoded(layout, base, trained, site="b")


@pytest.mark.parametrize("codec_name", SCALED)
def test_rounding_draws_by_the_place_in_the_model(codec_name: str) -> None:
    # A tensor at another place draws other numbers, whatever stands before it; so each rank can write its own slice.
    encoding, values = codec(codec_name).encoding("float32"), random_state(layout_of(FLOATS).manifest, 3)["w"]
    regions = [torch.zeros(encoding.num_bytes(300), dtype=torch.uint8) for _ in range(3)]
    rounding = Rounding(rounding_key(bytes(32), 1))
    encoding.encode(values, regions[0], 0, rounding, 4096)
    encoding.encode(values[:256], regions[1], 0, rounding, 4096)
    encoding.encode(values[256:], regions[1], 256, rounding, 4096 + 256)
    encoding.encode(values, regions[2], 0, rounding, 0)
    assert torch.equal(regions[0], regions[1])
    assert not torch.equal(regions[0], regions[2])


@pytest.mark.parametrize("codec_name", SCALED)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-40, 1e-37, 1024.0, -1024.0, 1023.9999])
def test_the_edges(codec_name: str, value: float) -> None:
    values = torch.full((5,), value)
    result = round_trip(codec_name, values)
    assert bool(((result - values.double()).abs() <= error_bound(codec_name, values)).all())
    assert result.abs().max() <= BOUND


def sum_of(layout_codec: str) -> tuple[RoundSum, bytes]:
    layout = layout_of(FLOATS, layout_codec)
    payload = encoded(layout, random_state(layout.manifest, 1), random_state(layout.manifest, 2))
    return RoundSum(layout, num_sites=2, max_weight=1, bound=BOUND), payload


@pytest.mark.parametrize("codec_name", CODECS)
@settings(max_examples=40)
@given(data=st.data())
def test_flipped_bits_never_reach_the_sum_out_of_bounds(codec_name: str, data: st.DataObject) -> None:
    """Without the checksum too: an update is refused, or holds nothing but finite values within the bound."""
    total, payload = sum_of(codec_name)
    flipped = bytearray(payload)
    for position in data.draw(st.lists(st.integers(0, 8 * len(payload) - 1), min_size=1, max_size=20)):
        flipped[position // 8] ^= 1 << position % 8
    try:
        total.check(flipped, 1)
    except BadUpdate:
        return
    assert decoded(total.layout, bytes(flipped)).abs().max() <= BOUND


@pytest.mark.parametrize("codec_name", CODECS)
@given(data=st.data())
def test_truncated_updates_are_refused(codec_name: str, data: st.DataObject) -> None:
    total, payload = sum_of(codec_name)
    length = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(BadUpdate, match=f"{length} bytes"):
        total.check(payload[:length], 1)


@pytest.mark.parametrize(
    ("codec_name", "place", "data", "what"),
    [
        ("int8", 64, b"\x00\x00\x80\xbf", "a negative scale"),
        ("int8", 64, b"\x00\x00\x00\x80", "a negative scale"),
        ("int8", 64, b"\x00\x00\xc0\x7f", "nan"),
        ("int8", 64, b"\x00\x00\x80\x7f", "inf"),
        ("int8", 64, b"\x00\x00\x20\x41", "bound is 1024"),  # a scale of 10: levels could say 1270
        ("int8", 64 + 8 + 5, b"\x80", "a level of -128"),
        ("int4", 64, b"\x00\x00\x80\xbf", "a negative scale"),
        ("int4", 64, b"\x00\x00\x16\x43", "bound is 1024"),  # a scale of 150: levels could say 1050
        ("int4", 64 + 20 + 5, b"\x80", "a level of -8"),
        ("int4", 64 + 20 + 5, b"\x18", "a level of -8"),
    ],
)
def test_bytes_that_are_never_written_are_refused(codec_name: str, place: int, data: bytes, what: str) -> None:
    total, payload = sum_of(codec_name)
    hostile = payload[:place] + data + payload[place + len(data) :]
    with pytest.raises(BadUpdate, match=what) as caught:
        total.check(hostile, 1)
    assert caught.value.field == "w"


def test_bytes_between_tensors_are_zero() -> None:
    layout = layout_of([("w", "float32", (3,), "parameter"), ("b", "float32", (3,), "parameter")], "int8")
    payload = bytearray(encoded(layout, random_state(layout.manifest, 1), random_state(layout.manifest, 2)))
    (start, _), *_ = layout.gaps
    payload[start] = 1
    with pytest.raises(BadUpdate, match="not zero"):
        RoundSum(layout, num_sites=1, max_weight=1, bound=BOUND).check(payload, 1)


def test_half_a_byte_beyond_the_last_value_is_refused() -> None:
    layout = layout_of([("w", "float32", (5,), "parameter")], "int4")
    payload = bytearray(encoded(layout, {"w": torch.zeros(5)}, {"w": torch.linspace(-1, 1, 5)}))
    total = RoundSum(layout, num_sites=1, max_weight=1, bound=BOUND)
    total.check(payload, 1)
    payload[-1] |= 0x10
    with pytest.raises(BadUpdate, match="beyond the last value"):
        total.check(payload, 1)
