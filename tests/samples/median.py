"""A reducer that needs every update at once, as a plugin would bring it."""

from __future__ import annotations

from typing import Literal, Self

import torch
from torch import Tensor

from atoll.aggregation.blocks import byte_view
from atoll.aggregation.layout import Segment, UpdateLayout
from atoll.aggregation.round_sum import RoundSum
from atoll.wire.job import Strict
from atoll.wire.tensors import Buffer


class Median:
    """The median of each coordinate over the sites, whatever their weights.

    x_j = median_i x_ij (Yin et al. 2018, arXiv:1803.01498, definition 1).
    Breakdown point: 1/2. Memory: the payloads of the round, and the values of a tensor for each site.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name: str = "median"
        self.needs: Literal["sum", "all"] = "all"

    def init(self, layout: UpdateLayout, *, num_sites: int, max_weight: int, bound: float) -> MedianOfRound:
        return MedianOfRound(RoundSum(layout, num_sites=num_sites, max_weight=max_weight, bound=bound))


class MedianOfRound:
    """The payloads of a round. Who is in, what may be, and what travels as it is: as a sum has it."""

    def __init__(self, counted: RoundSum) -> None:
        self._counted = counted
        self._payloads: dict[str, Buffer] = {}

    @property
    def layout(self) -> UpdateLayout:
        return self._counted.layout

    @property
    def num_updates(self) -> int:
        return self._counted.num_updates

    @property
    def sum_weights(self) -> int:
        return self._counted.sum_weights

    def check(self, payload: Buffer, weight: int, *, site: str = "", round: int = 0, crc32: int | None = None) -> None:
        self._counted.check(payload, weight, site=site, round=round, crc32=crc32)

    def fold(self, site: str, payload: Buffer, weight: int) -> None:
        self._counted.fold(site, payload, weight)
        self._payloads[site] = payload

    def merge(self, other: Self) -> None:
        self._counted.merge(other._counted)
        self._payloads |= other._payloads

    def difference(self, index: int, out_P: Tensor) -> None:
        if not self._payloads:
            raise ValueError("no update was folded, so there is no median")
        stop = index + out_P.numel()
        for segment in self.layout.segments:
            start, end = max(index, segment.index), min(stop, segment.index + segment.num_values)
            if start < end:
                values_SP = torch.stack([_decoded(segment, payload) for payload in self._payloads.values()])
                median_P = _median(values_SP[:, start - segment.index : end - segment.index])
                out_P[start - index : end - index] = median_P

    def raw(self, name: str) -> Tensor:
        return self._counted.raw(name)


def _decoded(segment: Segment, payload: Buffer) -> Tensor:
    values_P = torch.empty(segment.num_values, dtype=torch.float64)
    region = byte_view(payload)[segment.offset : segment.offset + segment.num_bytes]
    segment.encoding.decode(region, 0, values_P)
    return values_P


def _median(values_SP: Tensor) -> Tensor:
    """The middle value over the sites S, or the mean of the two in the middle."""
    sorted_SP, count = values_SP.sort(dim=0).values, len(values_SP)
    return (sorted_SP[(count - 1) // 2] + sorted_SP[count // 2]) / 2
