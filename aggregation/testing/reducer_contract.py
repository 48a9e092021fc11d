"""What every reducer must do, whatever its formula, as a class of tests. Whoever writes a reducer runs it through them:

    import pytest
    from atoll.aggregation.testing.reducer_contract import ReducerCase, ReducerContract

    @pytest.mark.parametrize("case", [ReducerCase(kind="mine", options={"share": 0.1})])
    class TestMine(ReducerContract): ...

The distribution that registers the kind has to be installed. A `closed_form`, where there is one, is compared too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.parts import build
from atoll.aggregation.reducers.reduction import Mergeable, Reducer, Reduction, RoundTerms
from atoll.aggregation.testing.updates import (
    BOUND,
    CODECS,
    SMALL,
    decoded,
    encoded,
    layout_of,
    random_state,
    whole_mean,
)
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadUpdate

WEIGHTS: Final = {"amber": 7, "birch": 120, "cedar": 33, "dune": 120}

ClosedForm = Callable[[Sequence[float], Sequence[int]], float]  # values of one coordinate and weights, by site


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerCase:
    """`closed_form` is None where a coordinate's result depends on the others."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    closed_form: ClosedForm | None = None
    tolerance: float = 1e-12  # largest error of a coordinate whose values are of the order of 1

    def made(self) -> Reducer:
        reducer: Reducer = build("reducer", self.kind, self.options)
        return reducer


def updates(layout: UpdateLayout, sites: Iterable[str] = WEIGHTS) -> dict[str, bytes]:
    base = random_state(layout.manifest, 0)
    return {
        site: encoded(layout, base, random_state(layout.manifest, number), site=site)
        for number, site in enumerate(sites, start=1)
    }


def reduced(
    case: ReducerCase,
    layout: UpdateLayout,
    payloads: Mapping[str, bytes],
    weights: Mapping[str, int] = WEIGHTS,
    *,
    num_sites: int = len(WEIGHTS),
    max_weight: int | None = None,
) -> Reduction:
    terms = RoundTerms(num_sites=num_sites, max_weight=max_weight or max(weights.values()), bound=BOUND)
    reduction = case.made().init(layout, terms)
    for site, payload in payloads.items():
        reduction.check(payload, weights[site])
        reduction.fold(site, payload, weights[site], {"loss": (2.0, 4.0)})
    return reduction


def same(one: Reduction, other: Reduction) -> bool:
    """Whether two reductions give the same bits."""
    raws = all(torch.equal(one.raw(e.spec.name), other.raw(e.spec.name)) for e in one.layout.raws)
    return raws and torch.equal(bits(whole_mean(one)), bits(whole_mean(other)))


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int64)


class ReducerContract:
    """Each method is a test, of a reducer that bears to hear of four sites. Subclass it, and give it its cases."""

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Small tensors on many threads only wait for each other, the more the busier the machine is."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    @pytest.mark.parametrize("codec", CODECS)
    def test_order_of_sites_changes_no_bit(self, case: ReducerCase, codec: str) -> None:
        layout = layout_of(SMALL, codec)
        payloads = updates(layout)
        first = reduced(case, layout, payloads)
        for order in itertools.islice(
            itertools.permutations(payloads), 0, None, 4
        ):  # 6 of 24; each site is first in one
            assert same(first, reduced(case, layout, {site: payloads[site] for site in order}))

    def test_scaling_all_weights_changes_no_bit(self, case: ReducerCase) -> None:
        layout = layout_of(SMALL)
        payloads = updates(layout)
        scaled = {site: 1_000_003 * weight for site, weight in WEIGHTS.items()}
        assert same(reduced(case, layout, payloads), reduced(case, layout, payloads, scaled))

    @pytest.mark.parametrize("codec", CODECS)
    def test_one_site_gives_its_own_difference(self, case: ReducerCase, codec: str) -> None:
        layout = layout_of(SMALL, codec)
        payloads = updates(layout, ["birch"])
        reduction = reduced(case, layout, payloads)
        if case.made().fewest_updates > 1:
            with pytest.raises(BadUpdate, match=case.kind):
                whole_mean(reduction)
            return
        assert (whole_mean(reduction) - decoded(layout, payloads["birch"])).abs().max() <= case.tolerance
        assert (reduction.num_updates, reduction.sum_weights) == (1, WEIGHTS["birch"])

    def test_a_lonely_light_site_counts_in_full(self, case: ReducerCase) -> None:
        layout = layout_of(SMALL)
        payloads = updates(layout, ["amber"])  # 7 of 120: the largest weight belongs to a site that is missing
        reduction = reduced(case, layout, payloads, max_weight=120)
        if case.made().fewest_updates > 1:
            with pytest.raises(BadUpdate, match=case.kind):
                whole_mean(reduction)
            return
        assert (whole_mean(reduction) - decoded(layout, payloads["amber"])).abs().max() <= 20 * case.tolerance

    def test_nothing_folded_has_no_result(self, case: ReducerCase) -> None:
        reduction = reduced(case, layout_of(SMALL), {})
        assert (reduction.num_updates, reduction.sum_weights) == (0, 0)
        with pytest.raises(ValueError, match="no update was folded"):
            whole_mean(reduction)
        with pytest.raises(ValueError, match="no update was folded"):
            reduction.raw("mask")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1025.0, -1025.0])
    def test_a_value_that_is_not_finite_or_beyond_the_bound_changes_nothing(
        self, case: ReducerCase, value: float
    ) -> None:
        layout = layout_of(SMALL)
        payloads = updates(layout)
        reduction = reduced(case, layout, payloads)
        before = whole_mean(reduction)
        entry = next(entry for entry in layout.means if entry.spec.name == "conv.bias")
        bad = bytearray(payloads["amber"])
        bad[entry.offset + 8 : entry.offset + 12] = torch.tensor([value]).numpy().tobytes()
        with pytest.raises(BadUpdate, match=r"conv\.bias") as caught:
            reduction.check(bad, 1, site="amber", round=3)
        assert (caught.value.site, caught.value.round, caught.value.field) == ("amber", 3, "conv.bias")
        assert float(caught.value.value) == pytest.approx(value, rel=0, abs=0, nan_ok=True)
        assert float(caught.value.bound) == BOUND
        assert torch.equal(bits(before), bits(whole_mean(reduction)))

    @pytest.mark.parametrize("weight", [0, -1, 121])
    def test_a_weight_out_of_bounds_is_refused(self, case: ReducerCase, weight: int) -> None:
        layout = layout_of(SMALL)
        payloads = updates(layout, ["amber"])
        with pytest.raises(BadUpdate, match="weight") as caught:
            reduced(case, layout, {}).check(payloads["amber"], weight)
        assert (caught.value.value, caught.value.bound) == (str(weight), "1 to 120")

    def test_an_update_of_another_shape_is_refused(self, case: ReducerCase) -> None:
        layout = layout_of(SMALL)
        other = layout_of([(name, dtype, shape[::-1], role) for name, dtype, shape, role in SMALL])
        payload = updates(other, ["amber"])["amber"]
        assert len(payload) == layout.num_bytes  # only the header tells
        with pytest.raises(BadUpdate, match="another model"):
            reduced(case, layout, {}).check(payload, 1)

    def test_a_truncated_or_longer_update_is_refused(self, case: ReducerCase) -> None:
        layout = layout_of(SMALL)
        payload = updates(layout, ["amber"])["amber"]
        for wrong in (b"", payload[:-1], payload[:64], payload + b"\x00"):
            with pytest.raises(BadUpdate, match=f"{len(wrong)} bytes"):
                reduced(case, layout, {}).check(wrong, 1)

    def test_a_flipped_bit_is_refused_by_the_checksum(self, case: ReducerCase) -> None:
        layout = layout_of(SMALL[:2])
        payload = updates(layout, ["amber"])["amber"]
        reduction = reduced(case, layout, {})
        reduction.check(payload, 1, crc32=crc32_of(payload))
        for position in range(0, 8 * len(payload), 37):
            flipped = bytearray(payload)
            flipped[position // 8] ^= 1 << position % 8
            with pytest.raises(BadUpdate):
                reduction.check(flipped, 1, crc32=crc32_of(payload))

    def test_only_what_sums_travels_up_a_tree_as_a_part(self, case: ReducerCase) -> None:
        """A region sends the part of a reduction; one that needs every update has none that stands for them."""
        reducer = case.made()
        assert reducer.needs in ("sum", "all")
        assert isinstance(reduced(case, layout_of(SMALL), {}), Mergeable) == (reducer.needs == "sum")

    def test_a_site_counts_once(self, case: ReducerCase) -> None:
        layout = layout_of(SMALL)
        payloads = updates(layout)
        reduction = reduced(case, layout, payloads)
        with pytest.raises(ValueError, match=r"birch is in .*already"):
            reduction.fold("birch", payloads["birch"], 1)

    @pytest.mark.parametrize("codec", CODECS)
    def test_blocks_equal_the_whole(self, case: ReducerCase, codec: str) -> None:
        layout = layout_of(SMALL, codec)
        reduction = reduced(case, layout, updates(layout))
        whole = whole_mean(reduction)
        for size in (1, 256, 1000, layout.num_values):
            starts = range(0, layout.num_values, size) if size > 1 else range(0, layout.num_values, 971)
            for start in starts:
                part = torch.empty(min(size, layout.num_values - start), dtype=torch.float64)
                reduction.difference(start, part)
                assert torch.equal(bits(part), bits(whole[start : start + len(part)]))

    @pytest.mark.parametrize("codec", CODECS)
    def test_merged_parts_equal_one_fold(self, case: ReducerCase, codec: str) -> None:
        layout = layout_of(SMALL, codec)
        payloads = updates(layout)
        whole = reduced(case, layout, payloads)
        for split in range(len(payloads) + 1):
            names = list(payloads)
            left, right = names[:split], names[split:]
            for one, two in ((left, right), (right, left)):
                merged = reduced(case, layout, {site: payloads[site] for site in one})
                merged.merge(reduced(case, layout, {site: payloads[site] for site in two}))
                assert same(whole, merged)
                assert (merged.num_updates, merged.sum_weights) == (4, sum(WEIGHTS.values()))

    def test_parts_with_a_site_in_common_do_not_merge(self, case: ReducerCase) -> None:
        layout = layout_of(SMALL)
        payloads = updates(layout)
        reduction = reduced(case, layout, payloads)
        with pytest.raises(ValueError, match="amber"):
            reduction.merge(reduced(case, layout, {"amber": payloads["amber"]}))

    @pytest.mark.parametrize("codec", CODECS)
    def test_the_closed_form_of_a_coordinate(self, case: ReducerCase, codec: str) -> None:
        """Where there is one; the formulas over whole vectors are in aggregation/reducers/test_formulas.py."""
        layout = layout_of(SMALL, codec)
        payloads = updates(layout)
        values = {site: decoded(layout, payload) for site, payload in payloads.items()}
        result = whole_mean(reduced(case, layout, payloads))
        for place in range(0, layout.num_values, 613):
            column = [values[site][place].item() for site in payloads]
            if case.closed_form is None:
                assert abs(result[place].item()) <= 4 * max(map(abs, column))
                continue
            wanted = case.closed_form(column, [WEIGHTS[site] for site in payloads])
            assert abs(result[place].item() - wanted) <= case.tolerance

    def test_values_that_travel_as_they_are(self, case: ReducerCase) -> None:
        for buffers, wanted in (("mean", 90), ("first", 11)):
            layout = layout_of([("n", "int64", (), "buffer"), ("w", "float32", (3,), "parameter")], buffers=buffers)  # type: ignore[arg-type]
            base = {"n": torch.tensor(0), "w": torch.zeros(3)}
            payloads = {
                site: encoded(layout, base, {"n": torch.tensor(number), "w": torch.zeros(3)})
                for site, number in (("cedar", 3), ("amber", 11), ("birch", 90))
            }
            assert reduced(case, layout, payloads).raw("n").view(torch.int64).item() == wanted
