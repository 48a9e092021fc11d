"""The sum of masked inputs against a naive one in Python's own integers, bit for bit, whoever drops out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from samples.masked_run import MANIFEST, NUM_VALUES, LightSite, job_of, levels_of, terms_of
from samples.secagg_session import Session, signing_keys

from atoll.aggregation.codecs.casts import Native
from atoll.aggregation.layout import update_layout
from atoll.privacy.secagg.agreement import Counted, Terms, counters
from atoll.server import masked_sum
from atoll.server.masked_sum import MaskedSum, require_maskable
from atoll.wire.errors import BadUpdate, ConfigError
from atoll.wire.manifest import Manifest

LAYOUT = update_layout(MANIFEST, Native(Native.Options()), "mean")


Inputs = dict[int, list[NDArray[np.unsignedinteger]]]


def inputs_of(terms: Terms, sites: Mapping[str, LightSite]) -> Inputs:
    found: Inputs = {}
    for index, (name, site) in enumerate(sorted(sites.items())):
        exact = counters(terms, site.weight, {"loss": (site.weight / 4, site.weight)})
        found[index] = [np.array(exact, dtype="<u8"), levels_of(terms, name, 1, site.weight)]
    return found


def summed(terms: Terms, values: Inputs, sharing: set[int], surviving: set[int]) -> MaskedSum:
    """Of a whole session, whose masked inputs come in some order."""
    session = Session(terms.plan, keys=signing_keys(terms.num_sites))
    session.advertise(sharing)
    session.share(sharing)
    session.send_inputs(surviving, values)
    session.confirm(surviving)
    session.unmask(surviving)
    total = MaskedSum(LAYOUT, terms)
    order = sorted(surviving)
    random.Random(len(surviving)).shuffle(order)
    for site in order:
        total.add(b"".join(lane.tobytes() for lane in session.masked[site]))
    total.unmask(session.result()[1].masks)
    return total


def require_naive(terms: Terms, total: MaskedSum, values: Inputs, surviving: set[int]) -> None:
    width = terms.bits // 8
    levels = [
        sum(column) for column in zip(*(values[s][1].view(f"<i{width}").tolist() for s in surviving), strict=True)
    ]
    weight = sum(int(values[site][0][0]) for site in surviving)
    assert total.sum_weights == weight
    assert total.counted == Counted(weight=weight, clipped=0, metrics={"loss": (weight / 4, weight)})
    found = torch.empty(NUM_VALUES, dtype=torch.float64)
    total.difference(0, found)
    factor = terms.quantum * (terms.max_weight / weight)
    assert found.tolist() == [level * factor for level in levels]
    part = torch.empty(17, dtype=torch.float64)
    total.difference(100, part)
    assert part.tolist() == found[100:117].tolist()


PATTERNS = [
    (set(sharing), set(surviving))
    for size in (3, 4, 5)
    for sharing in itertools.combinations(range(5), size)
    for few in range(3, size + 1)
    for surviving in itertools.combinations(sharing, few)
]


def test_every_pattern_of_drops_of_five_sites() -> None:
    terms, sites = terms_of(5)
    values = inputs_of(terms, sites)
    for sharing, surviving in PATTERNS:
        require_naive(terms, summed(terms, values, sharing, surviving), values, surviving)


@pytest.mark.parametrize("bits", [16, 32])
def test_random_drops_of_twenty_sites(bits: int) -> None:
    terms, sites = terms_of(20, bits=bits, corrupt=0.1)
    values = inputs_of(terms, sites)
    lot = random.Random(bits)
    sharing = set(lot.sample(range(20), 18))
    surviving = set(lot.sample(sorted(sharing), 14))
    require_naive(terms, summed(terms, values, sharing, surviving), values, surviving)


def test_blocks_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_sum, "PART_VALUES", 64)
    terms, sites = terms_of(5)
    values = inputs_of(terms, sites)
    require_naive(terms, summed(terms, values, {0, 1, 2, 3, 4}, {0, 2, 3}), values, {0, 2, 3})


def test_a_mask_too_many_is_seen_in_the_exact_lane() -> None:
    """The control of the tests above: what they compare would be another number."""
    terms, sites = terms_of(5)
    values = inputs_of(terms, sites)
    session = Session(terms.plan, keys=signing_keys(5))
    everybody = set(range(5))
    session.advertise(everybody)
    session.share(everybody)
    session.send_inputs(everybody, values)
    session.confirm(everybody)
    session.unmask(everybody)
    total = MaskedSum(LAYOUT, terms)
    for site in range(4):  # one of them is missing
        total.add(b"".join(lane.tobytes() for lane in session.masked[site]))
    with pytest.raises(BadUpdate):
        total.unmask(session.result()[1].masks)


def test_before_it_is_unmasked_a_sum_says_nothing() -> None:
    terms, _ = terms_of(5)
    total = MaskedSum(LAYOUT, terms)
    with pytest.raises(ValueError, match="masked still"):
        total.difference(0, torch.empty(1, dtype=torch.float64))
    with pytest.raises(BadUpdate, match="wanted"):
        total.add(bytes(10))


def test_what_cannot_be_added_is_refused_at_planning() -> None:
    section = job_of().secure_aggregation
    assert section is not None
    require_maskable(section, 3, LAYOUT)
    counted = Manifest.build([("w", "float32", (4,), "parameter"), ("batches", "int64", (), "buffer")])
    with pytest.raises(ConfigError, match=r'tensor "batches" of int64 .*buffers = local'):
        require_maskable(section, 3, update_layout(counted, Native(Native.Options()), "mean"))
    require_maskable(section, 3, update_layout(counted, Native(Native.Options()), "local"))
    with pytest.raises(ConfigError, match="shares are needed"):
        require_maskable(section.model_copy(update={"corrupt": 0.9}), 3, LAYOUT)
    with pytest.raises(ConfigError, match="bits"):
        require_maskable(section.model_copy(update={"bits": 16}), 20_000, LAYOUT)
