"""A masked sum as the part of a tree: what it stands for, in the quanta of the whole round's exact sum.

Levels are integers of another unit than quanta, so each value is rounded once, to half a quantum: some thousand times
finer than what the sites' own rounding costs (docs/exact-sums.md). Where differences travel in float64 the remainder
goes into the second limb. Equal sums give equal bytes.
"""

from __future__ import annotations

import math

import torch

from atoll.aggregation.blocks import blocks, byte_view
from atoll.aggregation.partial import Part, PartialLayout, SumTerms
from atoll.aggregation.quantum import SUM_BITS, bits, quantum_exponent
from atoll.server.masked_sum import MaskedSum
from atoll.wire.tensors import Buffer


def write_partial(total: MaskedSum, terms: SumTerms, first: str, out: Buffer) -> None:
    """Writes an unmasked sum into `out`, of `PartialLayout.num_bytes`, as a region sends it up.

    Args:
        terms: of the whole round's sum, whose largest weight is at least that of the session.
        first: the name that sorts first among the sites of the sum.

    Raises:
        ValueError: the sum is masked still, or `out` has another length.
    """
    layout = PartialLayout(total.layout)
    data = byte_view(out)
    if data.numel() != layout.num_bytes or total.terms.max_weight > terms.max_weight:
        raise ValueError(f"a sum of weights up to {total.terms.max_weight} into {data.numel()} bytes of {terms}")
    part = Part(weight=total.sum_weights, num_sites=total.num_updates, first=first)
    header = layout.header(terms, part)
    data.zero_()
    data[: len(header)].copy_(byte_view(header))
    high_V, low_L = data[layout.high].view(torch.int64), data[layout.low].view(torch.int64)
    exponent = quantum_exponent(terms.bound, terms.num_sites)
    factor = math.ldexp(total.terms.max_weight / terms.max_weight, -exponent)
    finer = 2.0 ** (SUM_BITS + 1 - bits(terms.num_sites))
    for segment in total.layout.segments:
        for start, stop in blocks(segment.num_values):
            value_P = torch.empty(stop - start, dtype=torch.float64)
            index = segment.index + start
            total.weighted(index, value_P)
            value_P.mul_(factor)
            whole_P = value_P.round()
            high_V[index : index + stop - start].copy_(whole_P)
            if segment.encoding.two_limbs:
                low = segment.low_index + start
                low_L[low : low + stop - start].copy_(value_P.sub_(whole_P).mul_(finer).round_())
