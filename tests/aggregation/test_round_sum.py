from __future__ import annotations

import threading
from fractions import Fraction

import pytest
import torch
from contracts.updates import BOUND, SMALL, encoded, layout_of, random_state, whole_mean
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.aggregation import round_sum
from atoll.aggregation.blocks import blocks
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.round_sum import MAX_WEIGHT, RoundSum, quantum_exponent
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import Entry

FLOAT64: tuple[Entry, ...] = (("w", "float64", (3,), "parameter"), ("z", "complex128", (1,), "parameter"))


def update(layout: UpdateLayout, values: Tensor) -> bytes:
    """An update of one tensor `w` that moves by `values`."""
    return encoded(layout, {"w": torch.zeros_like(values)}, {"w": values}, bound=round_sum.LARGEST_BOUND)


def vector(num_values: int, dtype: str = "float32") -> UpdateLayout:
    return layout_of([("w", dtype, (num_values,), "parameter")])


@pytest.mark.parametrize(
    ("bound", "num_sites", "exponent"),
    [
        (1024, 4096, -40),
        (1024, 4097, -39),
        (1025, 4096, -39),
        (1, 1, -62),
        (1024, 3, -50),
        (0.75, 2, -61),
        (1e30, 1, 38),
    ],
)
def test_the_quantum(bound: float, num_sites: int, exponent: int) -> None:
    assert quantum_exponent(bound, num_sites) == exponent


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(-BOUND, BOUND, width=32), min_size=1, max_size=8),
    weights=st.lists(st.integers(1, MAX_WEIGHT), min_size=8, max_size=8),
)
def test_the_mean_is_the_exact_one_to_the_stated_error(values: list[float], weights: list[int]) -> None:
    weights = weights[: len(values)]
    total = RoundSum(vector(1), num_sites=len(values), max_weight=max(weights), bound=BOUND)
    for number, (value, weight) in enumerate(zip(values, weights, strict=True)):
        total.fold(f"s{number}", update(total.layout, torch.tensor([value])), weight)
    exact = Fraction(sum(Fraction(v) * w for v, w in zip(values, weights, strict=True)), sum(weights))
    # docs/exact-sums.md: half a quantum and 2^-53 for each term, then 2^-52 of the result.
    scale = Fraction(max(weights), sum(weights))
    quantum = Fraction(2) ** quantum_exponent(BOUND, len(values))
    per_term = sum(
        quantum / 2 + abs(Fraction(v)) * w / max(weights) * Fraction(2) ** -51
        for v, w in zip(values, weights, strict=True)
    )
    error = abs(Fraction(whole_mean(total).item()) - exact)
    assert error <= per_term * scale + abs(exact) * Fraction(2) ** -50


@pytest.mark.parametrize("num_sites", [1, 2, 3, 4, 64, 100])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_worst_case_does_not_overflow(num_sites: int, sign: int, dtype: str) -> None:
    total = RoundSum(vector(2, dtype), num_sites=num_sites, max_weight=MAX_WEIGHT, bound=BOUND)
    payload = update(total.layout, torch.full((2,), sign * BOUND, dtype=getattr(torch, dtype)))
    for number in range(num_sites):
        total.check(payload, MAX_WEIGHT)
        total.fold(str(number), payload, MAX_WEIGHT)
    assert whole_mean(total).tolist() == [sign * BOUND] * 2
    assert total._high_V.abs().max().item() <= 2**62


def test_the_worst_remainder_does_not_overflow() -> None:
    # t = 0.5 exactly is the largest remainder of the second limb.
    num_sites = 64
    total = RoundSum(vector(1, "float64"), num_sites=num_sites, max_weight=1, bound=BOUND)
    half_quantum = 2.0 ** (quantum_exponent(BOUND, num_sites) - 1)
    for number in range(num_sites):
        total.fold(str(number), update(total.layout, torch.tensor([half_quantum], dtype=torch.float64)), 1)
    assert whole_mean(total).item() == half_quantum
    assert total._low_L.abs().max().item() == 2**62


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=6), st.sampled_from([1e-12, 1.0, 1000.0]))
def test_float64_keeps_its_precision_whatever_the_quantum(values: list[float], scale: float) -> None:
    values = [value * scale for value in values]
    total = RoundSum(vector(1, "float64"), num_sites=4096, max_weight=1, bound=BOUND)
    for number, value in enumerate(values):
        total.fold(str(number), update(total.layout, torch.tensor([value], dtype=torch.float64)), 1)
    exact = Fraction(sum(Fraction(value) for value in values), len(values))
    largest = max(abs(value) for value in values)
    # One limb would be wrong by 2^-41, about 5e-13.
    assert abs(Fraction(whole_mean(total).item()) - exact) <= 2.0**-51 * largest + 2.0**-90


def test_three_sites_with_one_full_batch_step_equal_one_central_step() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(60, 7, generator=generator, dtype=torch.float64)
    targets = torch.randn(60, 1, generator=generator, dtype=torch.float64)
    weights = {"a": 11, "b": 30, "c": 19}
    start = torch.randn(7, 1, generator=generator, dtype=torch.float64)

    def step(rows: slice) -> Tensor:
        w = start.clone().requires_grad_()
        torch.nn.functional.mse_loss(inputs[rows] @ w, targets[rows]).backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        return start - 0.1 * w.grad

    layout = layout_of([("w", "float64", (7, 1), "parameter")])
    total = RoundSum(layout, num_sites=3, max_weight=30, bound=BOUND)
    begin = 0
    for site, count in weights.items():
        total.fold(site, encoded(layout, {"w": start}, {"w": step(slice(begin, begin + count))}), count)
        begin += count
    assert (start + whole_mean(total).view(7, 1) - step(slice(0, 60))).abs().max() < 1e-15


def sum_of_three(layout: UpdateLayout) -> tuple[Tensor, Tensor]:
    """Both limbs after three updates."""
    total = RoundSum(layout, num_sites=3, max_weight=9, bound=BOUND)
    base = random_state(layout.manifest, 0)
    for number, weight in enumerate((2, 9, 5)):
        total.fold(f"s{number}", encoded(layout, base, random_state(layout.manifest, number + 1)), weight)
    return total._high_V, total._low_L


@pytest.mark.parametrize("size", [256, 768, 4096, 1 << 15])
@pytest.mark.parametrize("codec", ["native", "int8"])
def test_block_size_changes_no_bit(size: int, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of([*SMALL, ("d", "float64", (5000,), "parameter")], codec)
    wanted = sum_of_three(layout)
    monkeypatch.setattr(round_sum, "blocks", lambda num_values: blocks(num_values, size))
    assert all(torch.equal(*pair) for pair in zip(sum_of_three(layout), wanted, strict=True))


def test_thread_count_changes_no_bit() -> None:
    layout = layout_of([*SMALL, ("d", "float64", (40_000,), "parameter")])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = sum_of_three(layout)
        torch.set_num_threads(4)
        assert all(torch.equal(*pair) for pair in zip(sum_of_three(layout), wanted, strict=True))
    finally:
        torch.set_num_threads(before)


def test_updates_can_be_checked_and_folded_from_many_threads() -> None:
    layout = layout_of(SMALL, "int8")
    base = random_state(layout.manifest, 0)
    payloads = {f"s{n}": encoded(layout, base, random_state(layout.manifest, n + 1), site=f"s{n}") for n in range(8)}
    alone, together = (RoundSum(layout, num_sites=8, max_weight=8, bound=BOUND) for _ in range(2))
    for number, (site, payload) in enumerate(payloads.items(), start=1):
        alone.fold(site, payload, number)
    start = threading.Barrier(len(payloads))

    def work(site: str, payload: bytes, weight: int) -> None:
        start.wait()
        together.check(payload, weight)
        together.fold(site, payload, weight)

    threads = [
        threading.Thread(target=work, args=(site, payload, weight))
        for weight, (site, payload) in enumerate(payloads.items(), start=1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(whole_mean(alone), whole_mean(together))
    assert together.sites == frozenset(payloads)


def test_a_read_only_mapping_is_folded_as_it_is() -> None:
    layout = vector(1000)
    payload = update(layout, torch.ones(1000))
    total = RoundSum(layout, num_sites=1, max_weight=1, bound=BOUND)
    total.check(memoryview(payload), 1)
    total.fold("s", memoryview(payload), 1)
    assert whole_mean(total).tolist() == [1.0] * 1000


def test_updates_that_were_never_checked_are_not_folded() -> None:
    layout = vector(10)
    total = RoundSum(layout, num_sites=1, max_weight=5, bound=BOUND)
    payload = update(layout, torch.ones(10))
    for weight, wrong in ((0, payload), (6, payload), (1, payload[:-1])):
        with pytest.raises(ValueError, match="folded unchecked"):
            total.fold("s", wrong, weight)
    total.fold("s", payload, 5)
    with pytest.raises(ValueError, match="room for 1 sites"):
        total.fold("t", payload, 5)


def test_sums_of_other_terms_do_not_merge() -> None:
    layout = vector(10)
    total = RoundSum(layout, num_sites=2, max_weight=5, bound=BOUND)
    for other in (
        RoundSum(layout, num_sites=3, max_weight=5, bound=BOUND),
        RoundSum(layout, num_sites=2, max_weight=6, bound=BOUND),
        RoundSum(layout, num_sites=2, max_weight=5, bound=2 * BOUND),
        RoundSum(vector(11), num_sites=2, max_weight=5, bound=BOUND),
    ):
        with pytest.raises(ValueError, match="different terms"):
            total.merge(other)


@pytest.mark.parametrize(
    ("num_sites", "max_weight", "bound"),
    [
        (0, 1, 1.0),
        (2**33, 1, 1.0),
        (1, 0, 1.0),
        (1, 2**54, 1.0),
        (1, 1, 0.0),
        (1, 1, float("inf")),
        (1, 1, float("nan")),
    ],
)
def test_terms_out_of_range(num_sites: int, max_weight: int, bound: float) -> None:
    with pytest.raises(ValueError, match="a sum of"):
        RoundSum(vector(1), num_sites=num_sites, max_weight=max_weight, bound=bound)


def test_integers_of_every_kind_take_the_maximum() -> None:
    dtypes = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
    layout = layout_of([(dtype, dtype, (50,), "buffer") for dtype in dtypes])
    states = [random_state(layout.manifest, seed) for seed in range(3)]
    total = RoundSum(layout, num_sites=3, max_weight=1, bound=BOUND)
    for number, state in enumerate(states):
        total.fold(str(number), encoded(layout, states[0], state), 1)
    for dtype in dtypes:
        stack = torch.stack([state[dtype].to(torch.int64) for state in states])
        assert total.raw(dtype).view(getattr(torch, dtype)).to(torch.int64).tolist() == stack.amax(dim=0).tolist()


def test_a_bool_is_nought_or_one() -> None:
    layout = layout_of([("mask", "bool", (4,), "buffer")])
    mask = torch.tensor([True, False, True, False])
    payload = bytearray(encoded(layout, {"mask": mask}, {"mask": mask}))
    payload[-1] = 2
    with pytest.raises(BadUpdate, match="bool"):
        RoundSum(layout, num_sites=1, max_weight=1, bound=BOUND).check(payload, 1)


def test_complex_parts_are_summed_apart() -> None:
    layout = layout_of(FLOAT64)
    base = random_state(layout.manifest, 0)
    states = [random_state(layout.manifest, seed) for seed in (1, 2)]
    total = RoundSum(layout, num_sites=2, max_weight=1, bound=BOUND)
    for number, state in enumerate(states):
        total.fold(str(number), encoded(layout, base, state), 1)
    entry = next(entry for entry in layout.means if entry.spec.name == "z")
    wanted = (states[0]["z"] + states[1]["z"]) / 2 - base["z"]
    found = torch.view_as_complex(whole_mean(total)[entry.index : entry.index + 2].view(1, 2))
    assert (found - wanted).abs().max() < 1e-15
