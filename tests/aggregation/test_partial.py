"""Partial sums: lossless, golden bytes, the sums of any tree, and what hostile ones are told."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from contracts.updates import BOUND, CODECS, SMALL, encoded, layout_of, random_state, whole_mean

from atoll.aggregation.layout import Buffers, UpdateLayout
from atoll.aggregation.partial import PARTIAL_HEADER_BYTES
from atoll.aggregation.reducers.reduction import Mergeable
from atoll.aggregation.round_sum import RoundSum
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import Entry

GOLDEN = Path(__file__).parents[1] / "golden" / "partial_sum.bin"
WEIGHTS = {"amber": 7, "birch": 120, "cedar": 33, "dune": 119}
MOST = 200  # w_max of the whole round, which is no weight of these sites
MIXED: tuple[Entry, ...] = (
    *SMALL,
    ("wide", "float64", (5, 3), "parameter"),
    ("seen", "int32", (3,), "buffer"),
    ("last", "uint8", (5,), "buffer"),
)
REGIONS = [("amber", "cedar"), ("birch", "dune")]


def updates(layout: UpdateLayout) -> dict[str, bytes]:
    base = random_state(layout.manifest, 0)
    return {
        site: encoded(layout, base, random_state(layout.manifest, number), site=site)
        for number, site in enumerate(WEIGHTS, start=1)
    }


def empty(layout: UpdateLayout) -> RoundSum:
    return RoundSum(layout, num_sites=len(WEIGHTS), max_weight=MOST, bound=BOUND)


def folded(layout: UpdateLayout, sites: tuple[str, ...] = tuple(WEIGHTS)) -> RoundSum:
    total, payloads = empty(layout), updates(layout)
    for site in sites:
        total.check(payloads[site], WEIGHTS[site])
        total.fold(site, payloads[site], WEIGHTS[site])
    return total


def travelled(total: RoundSum) -> bytes:
    out = bytearray(total.partial_bytes)
    total.write_partial(out)
    return bytes(out)


def same(one: RoundSum, other: RoundSum) -> bool:
    raws = all(torch.equal(one.raw(e.spec.name), other.raw(e.spec.name)) for e in one.layout.raws)
    counts = (one.num_updates, one.sum_weights) == (other.num_updates, other.sum_weights)
    return raws and counts and torch.equal(whole_mean(one).view(torch.int64), whole_mean(other).view(torch.int64))


@pytest.mark.parametrize("buffers", ["mean", "first", "local"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_tree_has_the_bytes_of_a_flat_sum(codec: str, buffers: Buffers) -> None:
    layout = layout_of(MIXED, codec, buffers)
    flat = folded(layout)
    for order in itertools.permutations(REGIONS):
        top = empty(layout)
        for number, sites in enumerate(order):
            part = folded(layout, sites)
            payload = travelled(part)
            top.check_partial(payload, part.sum_weights, num_sites=2)
            top.merge_partial(f"region-{number}", payload)
        assert same(top, flat)
        assert travelled(top) == travelled(flat)


def test_a_region_of_regions_and_a_site_beside_it() -> None:
    layout = layout_of(MIXED, buffers="first")
    middle, top = empty(layout), empty(layout)
    for number, sites in enumerate([("dune",), ("birch", "cedar")]):
        middle.merge_partial(f"inner-{number}", travelled(folded(layout, sites)))
    top.merge_partial("north", travelled(middle))
    top.fold("amber", updates(layout)["amber"], WEIGHTS["amber"])
    assert same(top, folded(layout))
    assert isinstance(top, Mergeable)


def test_two_regions_with_sites_of_one_name_combine_in_any_order() -> None:
    layout = layout_of(MIXED, buffers="first")
    payload, other = travelled(folded(layout, ("amber",))), empty(layout)
    other.fold("amber", updates(layout)["birch"], 9)
    parts = {"north": payload, "south": travelled(other)}
    sums = []
    for order in (("north", "south"), ("south", "north")):
        top = empty(layout)
        for region in order:
            top.merge_partial(region, parts[region])
        sums.append(top)
    assert same(*sums)
    with pytest.raises(ValueError, match="in the sum already"):
        sums[0].merge_partial("north", payload)


def test_golden_bytes() -> None:
    """What an older region sends is read for ever. A change of these bytes is a new magic."""
    layout = layout_of(
        [("w", "float32", (3,), "parameter"), ("n", "int16", (3,), "buffer"), ("m", "bool", (1,), "buffer")]
    )
    total = RoundSum(layout, num_sites=3, max_weight=8, bound=BOUND)
    base = {"w": torch.zeros(3), "n": torch.zeros(3, dtype=torch.int16), "m": torch.zeros(1, dtype=torch.bool)}
    for number, site in enumerate(("site-2", "site-1"), start=1):
        moved = {"w": torch.tensor([0.5, -1.0, 3.0]) * number, "n": torch.tensor([1, -2, number], dtype=torch.int16)}
        total.fold(site, encoded(layout, base, {**moved, "m": torch.ones(1, dtype=torch.bool)}), number)
    assert travelled(total) == GOLDEN.read_bytes()


def limb(value: int, index: int = 0) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        struct.pack_into("<q", data, PARTIAL_HEADER_BYTES + 8 * index, value)

    return change


def field(offset: int, form: str, value: float | bytes) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(form, data, offset, value)


MEANS = layout_of(MIXED).means
NUM_VALUES = sum(entry.num_values for entry in MEANS)
SCALE = 1 << (62 - 2 - 1)  # 2 sites of 4 at full weight make at most 2 * 2^60; these two weigh a fifth of that


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda data: data.pop(), "sum"),
        (lambda data: data.extend(bytes(8)), "sum"),
        (lambda data: data.clear(), "sum"),
        (field(0, "8s", b"ATOLLUP1"), "header"),
        (field(8, "32s", bytes(32)), "header"),
        (field(40, "<Q", 5), "num_sites"),
        (field(48, "<Q", 120), "max_weight"),
        (field(56, "<d", 2048.0), "bound"),
        (field(56, "<d", float("nan")), "bound"),
        (field(64, "<Q", 0), "num_updates"),
        (field(64, "<Q", 3), "num_updates"),
        (field(64, "<Q", 2**64 - 1), "num_updates"),
        (field(72, "<Q", 0), "weight"),
        (field(72, "<Q", 2**64 - 1), "weight"),
        (field(80, "<B", 0), "first_site"),
        (field(80, "<B", 64), "first_site"),
        (field(81, "5s", b"AMBER"), "first_site"),
        (field(81, "5s", b"\xff" * 5), "first_site"),
        (field(140, "<B", 1), "header"),
        (field(190, "<B", 1), "header"),
        (limb(2**63 - 1), MEANS[0].spec.name),
        (limb(-(2**63)), MEANS[0].spec.name),
        (limb(SCALE), MEANS[0].spec.name),
        (limb(-SCALE), MEANS[0].spec.name),
        (limb(SCALE, NUM_VALUES - 1), MEANS[-1].spec.name),
        (limb((2 << 60) + 1, NUM_VALUES), "wide"),
        (lambda data: data.__setitem__(-6, 1), "padding"),
    ],
)  # fmt: skip
def test_a_hostile_sum_is_refused_and_says_why(change: Callable[[bytearray], None], word: str) -> None:
    layout = layout_of(MIXED)
    part, top = folded(layout, REGIONS[0]), empty(layout)
    data = bytearray(travelled(part))
    change(data)
    with pytest.raises(BadUpdate) as caught:
        top.check_partial(data, part.sum_weights, num_sites=2, site="north", round=3)
    assert caught.value.field == word
    assert (caught.value.site, caught.value.round) == ("north", 3)
    assert top.num_updates == 0


def test_what_values_may_not_hold_is_refused_in_a_sum_too() -> None:
    layout = layout_of(MIXED, buffers="first")
    part = folded(layout, REGIONS[0])
    for name, value, size in (("mask", 2, "<B"), ("norm.running_mean", float("nan"), "<f")):
        data = bytearray(travelled(part))
        place = next(place for entry, place in part._partial.raws if entry.spec.name == name)
        struct.pack_into(size, data, place.start, value)
        with pytest.raises(BadUpdate) as caught:
            empty(layout).check_partial(data, part.sum_weights, num_sites=2)
        assert caught.value.field == name


def test_a_sum_of_more_sites_or_another_weight_than_was_said() -> None:
    part = folded(layout_of(MIXED), REGIONS[0])
    for weight, num_sites, word in ((part.sum_weights, 1, "num_updates"), (part.sum_weights + 1, 2, "weight")):
        with pytest.raises(BadUpdate) as caught:
            empty(part.layout).check_partial(travelled(part), weight, num_sites=num_sites)
        assert caught.value.field == word


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_honest_sum_passes(codec: str, sign: int) -> None:
    layout = layout_of([("w", "float32", (300,), "parameter"), ("x", "float64", (3,), "parameter")], codec)
    base = {"w": torch.zeros(300), "x": torch.zeros(3, dtype=torch.float64)}
    moved = {name: torch.full_like(tensor, sign * 1000.1) for name, tensor in base.items()}
    for weights in ((3, 7, 9), (9, 9, 9)):
        total = RoundSum(layout, num_sites=3, max_weight=9, bound=1000.1)
        for number, weight in enumerate(weights):
            total.fold(f"site-{number}", encoded(layout, base, moved, bound=1000.1), weight)
        top = RoundSum(layout, num_sites=3, max_weight=9, bound=1000.1)
        top.check_partial(travelled(total), sum(weights), num_sites=3)
