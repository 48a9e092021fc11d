"""Codecs that send few values: which ones, how far off they are, and that nothing is lost for good."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from contracts.updates import BOUND, SMALL, decoded, layout_of, random_state
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.aggregation.codecs.encoding import Encoding
from atoll.aggregation.codecs.sparse import GROUP, RandomKEncoding, TopKEncoding
from atoll.aggregation.encode import Carried, encode_update
from atoll.aggregation.layout import UpdateLayout, update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.parts import build
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.round_sum import RoundSum
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import views

FRACTIONS = (0.0003, 0.01, 0.5)
LENGTHS = (1, 5, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 17)


def rounding(round: int = 1) -> Rounding:
    return Rounding(rounding_key(bytes(32), round))


def passed(encoding: Encoding, values: Tensor, *, round: int = 1, index: int = 0) -> Tensor:
    """What a server reads, float64."""
    region, out = torch.zeros(encoding.num_bytes(len(values)), dtype=torch.uint8), torch.empty(len(values)).double()
    encoding.encode(values, region, 0, rounding(round), index)
    assert encoding.magnitude(region, 0, len(values)) <= values.abs().max() * encoding.gain
    encoding.decode(region, 0, out)
    return out


def groups_of(values: Tensor) -> list[Tensor]:
    return [values[start : start + GROUP] for start in range(0, len(values), GROUP)]


def normal(num_values: int, seed: int = 0) -> Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("num_values", LENGTHS)
def test_top_k_sends_the_largest_of_each_group_unchanged(fraction: float, num_values: int) -> None:
    values = normal(num_values)
    found = passed(TopKEncoding(fraction), values)
    for group, there in zip(groups_of(values), groups_of(found), strict=True):
        k = math.ceil(fraction * len(group))
        kept = group.abs().topk(k).indices.sort().values
        assert torch.equal(there.nonzero().flatten(), kept)
        assert torch.equal(there[kept], group[kept].double())
        left = ((group - there) ** 2).sum()
        assert left <= (1 - k / len(group)) * (group.double() ** 2).sum()


@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=1, max_size=40), st.sampled_from([0.1, 0.3, 0.5])
)
def test_top_k_of_equals_sends_the_first(numbers: list[float], fraction: float) -> None:
    values, k = torch.tensor(numbers), math.ceil(fraction * len(numbers))
    order = sorted(range(len(numbers)), key=lambda place: (-abs(numbers[place]), place))[:k]
    wanted = torch.zeros(len(numbers)).double()
    wanted[order] = values[order].double()
    assert torch.equal(passed(TopKEncoding(fraction), values), wanted)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("num_values", LENGTHS)
def test_random_k_sends_k_of_each_group(fraction: float, num_values: int) -> None:
    values = normal(num_values)
    found = passed(RandomKEncoding(fraction), values)
    scaled = passed(RandomKEncoding(fraction, scaled=True), values)
    for group, there, more in zip(groups_of(values), groups_of(found), groups_of(scaled), strict=True):
        kept, k = there.nonzero().flatten(), math.ceil(fraction * len(group))
        assert len(kept) == k
        assert torch.equal(there[kept], group[kept].double())
        torch.testing.assert_close(more[kept], group[kept].double() * len(group) / k, rtol=2**-22, atol=0)
        assert torch.equal(more.nonzero().flatten(), kept)


@pytest.mark.parametrize("scaled", [False, True])
def test_random_k_keeps_to_the_formulas_of_mean_and_error(scaled: bool) -> None:
    """E C(x) = x and E ||x - C(x)||^2 = (n / k - 1) ||x||^2 where scaled; (k / n) x and (1 - k / n) ||x||^2 where not."""
    n, k, draws = 40, 4, 1000
    values, total, error = normal(n), torch.zeros(n).double(), 0.0
    for round in range(draws):
        found = passed(RandomKEncoding(k / n, scaled=scaled), values, round=round)
        total += found
        error += float(((found - values) ** 2).sum()) / draws
    factor = n / k if scaled else 1.0
    # Each value travels with probability k / n: its mean has a deviation of factor |x| sqrt(k / n (1 - k / n) / draws).
    deviation = factor * values.abs().double() * math.sqrt(k / n * (1 - k / n) / draws)
    assert bool(((total / draws - factor * k / n * values.double()).abs() <= 5 * deviation).all())
    wanted = ((n / k - 1) if scaled else (1 - k / n)) * float((values.double() ** 2).sum())
    assert error == pytest.approx(wanted, rel=0.1)


def test_random_k_draws_anew_for_each_round_and_tensor_and_the_same_on_a_retry() -> None:
    values, encoding = normal(GROUP), RandomKEncoding(0.01)
    first = passed(encoding, values)
    assert torch.equal(first, passed(encoding, values))
    assert not torch.equal(first, passed(encoding, values, round=2))
    assert not torch.equal(first, passed(encoding, values, index=GROUP))
    assert not torch.equal(first, passed(encoding, normal(2 * GROUP))[GROUP:])


@pytest.mark.parametrize("make", [TopKEncoding, RandomKEncoding])
def test_blocks_are_written_and_read_one_by_one(make: Callable[[float], Encoding]) -> None:
    encoding, values = make(0.01), normal(3 * GROUP + 17)
    whole = torch.zeros(encoding.num_bytes(len(values)), dtype=torch.uint8)
    pieces = torch.zeros_like(whole)
    encoding.encode(values, whole, 0, rounding(), 5)
    for start in (2 * GROUP, 0):  # in any order, as ranks of a site do
        stop = min(start + 2 * GROUP, len(values))
        encoding.encode(values[start:stop], pieces, start, rounding(), 5 + start)
    assert torch.equal(whole, pieces)
    found, piece = torch.empty(len(values)).double(), torch.empty(GROUP).double()
    encoding.decode(whole, 0, found)
    encoding.decode(whole, GROUP, piece)
    assert torch.equal(piece, found[GROUP : 2 * GROUP])


def test_bytes_a_value() -> None:
    assert TopKEncoding(0.01).num_bytes(GROUP) == 41 * 6
    assert RandomKEncoding(0.01).num_bytes(GROUP) == 16 + 41 * 4
    assert TopKEncoding(0.01).num_bytes(10 * GROUP + 1) == 411 * 6
    assert TopKEncoding(0.01).num_bytes(0) == RandomKEncoding(0.01).num_bytes(0) == 0


@pytest.mark.parametrize(
    ("place", "data", "what"),
    [
        (0, b"\x00\x00\xc0\x7f", "nan"),
        (0, b"\x00\x00\x80\x44", None),  # 1024: the bound itself
        (0, b"\x01\x00\x80\x44", "bound is 1024"),
        (12, b"\x02\x00", "places that do not rise"),
        (16, b"\x2c\x01", "a place beyond the last value"),  # 300 of 300
        (16, b"\xff\xff", "a place beyond the last value"),
    ],
)
def test_places_that_are_never_written_are_refused(place: int, data: bytes, what: str | None) -> None:
    layout = layout_of([("w", "float32", (300,), "parameter")], "top_k")
    payload = bytearray(layout.header + bytes(12) + b"\x01\x00\x02\x00\x05\x00")
    assert len(payload) == layout.num_bytes == 64 + 3 * 6
    total = RoundSum(layout, num_sites=1, max_weight=1, bound=BOUND)
    total.check(payload, 1)
    payload[64 + place : 64 + place + len(data)] = data
    if what is None:
        total.check(payload, 1)
        return
    with pytest.raises(BadUpdate, match=what) as caught:
        total.check(payload, 1)
    assert caught.value.field == "w"


def test_statistics_travel_whole() -> None:
    """A running mean that is sent in parts would be made up for again and again: see layout.py."""
    layout = layout_of(SMALL, "top_k")
    names = {entry.spec.name: entry.encoding.name for entry in layout.means}
    assert names["norm.running_mean"] == "float32"
    assert names["conv.weight"] == "top_k/4096/0.01"


def test_the_fraction_is_part_of_the_layout() -> None:
    manifest = Manifest.build([("w", "float32", (10,), "parameter")])
    one, other = (update_layout(manifest, build("codec", "top_k", {"fraction": f}), "mean") for f in (0.1, 0.09))
    assert one.num_bytes == other.num_bytes
    assert one.header != other.header


def test_what_random_k_scales_stays_within_the_bound() -> None:
    layout = layout_with({"kind": "random_k", "fraction": 0.3, "error_feedback": False}, 10)
    out = bytearray(layout.num_bytes)
    reach = 1024 * 0.3 * (1 - 2**-21)
    for value in (reach, -reach):
        values = {"w": torch.full((10,), value)}
        encode_update(layout, {"w": torch.zeros(10)}, values, out, rounding=rounding(), bound=BOUND)
        RoundSum(layout, num_sites=1, max_weight=1, bound=BOUND).check(out, 1)
        assert decoded(layout, bytes(out)).abs().max() == pytest.approx(1024, rel=1e-5)
    with pytest.raises(BadUpdate, match=r"the bound is 307\.2"):
        encode_update(
            layout, {"w": torch.zeros(10)}, {"w": torch.full((10,), 308.0)}, out, rounding=rounding(), bound=BOUND
        )


# --- convergence ----------------------------------------------------------------------------------------------------


def layout_with(codec: dict[str, object], num_values: int) -> UpdateLayout:
    options = {name: value for name, value in codec.items() if name != "kind"}
    manifest = Manifest.build([("w", "float32", (num_values,), "parameter")])
    return update_layout(manifest, build("codec", str(codec["kind"]), options), "mean")


def distance_after(
    codec: dict[str, object], *, carried: Literal["none", "error", "difference"], rounds: int, lr: float
) -> float:
    """Distance from the optimum, as a share of that at the begin, of f(x) = mean_i ||x - a_i||^2 / 2 over two sites.

    Their optima a_i agree but in one coordinate, where they pull by 20 in opposite ways: what is largest at each site
    cancels in the mean. Each round a site sends one gradient step; the server adds the mean, or adds up the means.
    """
    size = 100
    layout = layout_with(codec, size)
    shared, apart = 1 + normal(size, 1) / 4, 20 * torch.nn.functional.one_hot(torch.tensor(7), size)
    optima = (shared + apart, shared - apart)
    memories: list[dict[str, Tensor]] = [{}, {}]
    model, step_sum = torch.zeros(size).double(), torch.zeros(size).double()
    for round in range(1, rounds + 1):
        sent = torch.zeros(size).double()
        for site, optimum in enumerate(optima):
            base, payload, after = model.float(), bytearray(layout.num_bytes), torch.zeros(size)
            encode_update(
                layout,
                {"w": base},
                {"w": base + lr * (optimum - base)},
                payload,
                rounding=Rounding(rounding_key(bytes([site]) * 32, round)),
                bound=BOUND,
                carried=None if carried == "none" else Carried(kind=carried, before=memories[site], after={"w": after}),
            )
            memories[site] = {"w": after}
            sent += decoded(layout, bytes(payload)) / len(optima)
        step_sum = step_sum + sent if carried == "difference" else sent
        model += step_sum
    return float((model - shared).norm() / shared.norm())


def test_top_1_percent_converges_with_error_feedback_and_not_without() -> None:
    """Karimireddy et al. 2019, arXiv:1901.09847, section 3: without it what is largest wins for ever."""
    codec: dict[str, object] = {"kind": "top_k", "fraction": 0.01}
    assert distance_after(codec, carried="error", rounds=600, lr=0.01) < 0.1
    assert distance_after(codec, carried="none", rounds=600, lr=0.01) > 0.9


def test_difference_coding_reaches_the_optimum() -> None:
    """EF21 (arXiv:2106.05203, theorem 1): with all sites and a fixed step the error goes to zero."""
    codec: dict[str, object] = {"kind": "top_k", "fraction": 0.05}
    assert distance_after(codec, carried="difference", rounds=300, lr=0.05) < 1e-5
    assert distance_after(codec, carried="none", rounds=300, lr=0.05) > 0.5


@pytest.mark.parametrize(("codec", "most"), [({"kind": "int4"}, 0.1), ({"kind": "random_k", "fraction": 0.1}, 0.2)])
def test_what_these_leave_out_comes_in_the_end(codec: dict[str, object], most: float) -> None:
    assert distance_after(codec, carried="error", rounds=200, lr=0.05) < most


def test_a_server_of_momentum_1_adds_up_what_sites_note() -> None:
    """After each round the server's momentum is the mean of the sites' memories, so that is what the model moves by."""
    layout = layout_with({"kind": "top_k", "fraction": 0.1, "difference": True}, 50)
    optimizer = build("optimizer", "sgd", {"lr": 0.5, "momentum": 1})
    state, model, memories = optimizer.init(layout), bytearray(layout.manifest.num_bytes), [{}, {}]  # type: ignore[var-annotated]
    for round in range(1, 5):
        base = views(layout.manifest, bytes(model), writable=False)["w"]
        total = RoundSum(layout, num_sites=2, max_weight=3, bound=BOUND)
        for site, weight in enumerate((1, 3)):
            payload, after = bytearray(layout.num_bytes), torch.zeros(50)
            carrying = Carried(kind="difference", before=memories[site], after={"w": after})
            trained = {"w": base + normal(50, 10 * round + site)}
            encode_update(
                layout, {"w": base}, trained, payload, rounding=rounding(round), bound=BOUND, carried=carrying
            )
            memories[site] = {"w": after}
            total.check(payload, weight)
            total.fold(str(site), payload, weight)
        out = bytearray(len(model))
        state = next_model(
            total, optimizer=optimizer, state=state, base=bytes(model), out=out, manifest=layout.manifest
        )
        moved = views(layout.manifest, bytes(out), writable=False)["w"] - base
        noted = (memories[0]["w"] + 3 * memories[1]["w"]) / 4
        torch.testing.assert_close(moved, noted / 2, rtol=0, atol=1e-6)
        model = out


def test_updates_can_be_summed_whichever_values_they_hold() -> None:
    layout = layout_of(SMALL, "top_k")
    total = build("reducer", "mean", {}).init(layout, RoundTerms(num_sites=2, max_weight=1, bound=BOUND))
    base, expected = random_state(layout.manifest, 0), torch.zeros(layout.num_values).double()
    for site in (1, 2):
        payload = bytearray(layout.num_bytes)
        encode_update(layout, base, random_state(layout.manifest, site), payload, rounding=rounding(site), bound=BOUND)
        total.fold(str(site), payload, 1)
        expected += decoded(layout, bytes(payload)) / 2
    mean = torch.empty(layout.num_values).double()
    total.difference(0, mean)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
