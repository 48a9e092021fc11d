"""The sum of a round's masked inputs: folded as they come, and unmasked once it is known whose masks are in it.

One number of each lane is kept, whatever the number of sites. All arithmetic is that of the lanes' rings, so neither
order nor blocks nor threads change a bit, and what a site had sent cannot be told from random numbers before `unmask`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.aggregation.blocks import byte_view, for_each, whole_vector
from atoll.aggregation.layout import MeanEntry, UpdateLayout
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics
from atoll.privacy.secagg.agreement import Counted, Terms, read_counters
from atoll.privacy.secagg.fixed_point import total
from atoll.privacy.secagg.keys import Mask
from atoll.privacy.secagg.levels import largest_level
from atoll.privacy.secagg.masks import add_masks
from atoll.privacy.secagg.parameters import parameters
from atoll.wire.errors import BadUpdate, ConfigError
from atoll.wire.privacy_section import SecureAggregationSection
from atoll.wire.tensors import Buffer

Lane = NDArray[np.unsignedinteger[Any]]

PART_VALUES = 1 << 20  # of a lane, that one thread works on: 4 MB, and 16 blocks of key stream for each mask
_DTYPES = {16: torch.int16, 32: torch.int32, 64: torch.int64}  # torch sums no unsigned integers; the bits are the same


class MaskedSum:
    """The sum over the survivors of a session. `Reduction` of `next_model` once it is unmasked.

    Memory: 4 or 2 bytes a value.
    """

    def __init__(
        self, layout: UpdateLayout, terms: Terms, *, weighted: bool = True, factors: Sequence[MeanEntry] = ()
    ) -> None:
        """
        Args:
            weighted: updates count by their weights; else each counts the same.
            factors: values of the layout that are counted in the exact lane.
        """
        if layout.num_values != terms.num_values or layout.raws or len(factors) != terms.num_factors:
            raise ValueError("a masked sum holds values that are averaged, and those of its terms")
        self.layout = layout
        self.terms = terms
        self.num_updates = 0
        self._weighted = weighted
        self._factors = [entry.index for entry in factors]
        self._counted: Counted | None = None
        self._lanes: list[Lane] = [
            whole_vector(lane.num_values, _DTYPES[lane.bits]).numpy().view(f"<u{lane.bits // 8}")
            for lane in terms.plan.lanes
        ]
        self._lock = threading.Lock()

    def add(self, masked: Buffer) -> None:
        """Adds a masked input: the lanes one after the other. Raises BadUpdate where it has another length."""
        data = memoryview(masked).cast("B")
        if data.nbytes != self.terms.plan.num_bytes:
            raise BadUpdate(
                f"masked input has {data.nbytes} bytes, wanted {self.terms.plan.num_bytes}",
                field="masked",
                value=data.nbytes,
                bound=self.terms.plan.num_bytes,
            )
        inputs = lanes_of(self.terms, data)

        def fold(part: tuple[int, int, int]) -> None:
            lane, start, stop = part
            sums = self._lanes[lane][start:stop]
            np.add(sums, inputs[lane][start:stop], out=sums)

        with self._lock:
            for_each(self._parts(), fold)
            self.num_updates += 1

    def unmask(self, masks: Sequence[Sequence[Mask]]) -> Counted:
        """Adds the masks that take all others off (`aggregator.unmasking`); what the exact lane says.

        Raises:
            BadUpdate: the sum is none of inputs that keep their bounds.
        """

        def take_off(part: tuple[int, int, int]) -> None:
            lane, start, stop = part
            add_masks(self._lanes[lane][start:stop], start, masks[lane])

        with self._lock:
            for_each(self._parts(), take_off)
            self._counted = read_counters(self.terms, [int(value) for value in self._lanes[0]])
            return self._counted

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Lane, start and stop of pieces that do not touch each other."""
        for number, lane in enumerate(self.terms.plan.lanes):
            for start in range(0, lane.num_values, PART_VALUES):
                yield number, start, min(start + PART_VALUES, lane.num_values)

    @property
    def counted(self) -> Counted:
        """The exact lane of the sum. Raises ValueError before it is unmasked."""
        if self._counted is None:
            raise ValueError("the sum is masked still")
        return self._counted

    # --- Reduction --------------------------------------------------------------------------------------------------

    @property
    def sum_weights(self) -> int:
        return self.counted.weight

    def difference(self, index: int, out_P: Tensor) -> None:
        """Writes values from `index` on of the mean of differences: level x quantum x w_max / sum of weights.

        Of updates that count the same: level x quantum / number of updates.

        Raises:
            ValueError: the sum is masked still.
        """
        weight = self.counted.weight
        share = self.terms.max_weight / weight if self._weighted else 1 / self.num_updates
        self._write(index, out_P, self.terms.quantum * share, weight)

    def weighted(self, index: int, out_P: Tensor) -> None:
        """Writes values from `index` on of the sum of differences, each times its weight over w_max of the session.

        Raises:
            ValueError: the sum is masked still, or its updates have no weights.
        """
        if not self._weighted:
            raise ValueError("updates that count the same have no weighted sum")
        self._write(index, out_P, self.terms.quantum, self.terms.max_weight)

    def _write(self, index: int, out_P: Tensor, of_level: float, weight: int) -> None:
        counted = self.counted
        levels = total(self._lanes[1][index : index + out_P.numel()])
        out_P.copy_(torch.from_numpy(levels)).mul_(of_level)
        for place, factor in zip(self._factors, counted.factors, strict=True):
            if index <= place < index + out_P.numel():
                out_P[place - index] = factor / weight

    def raw(self, name: str) -> Tensor:
        raise ValueError(f"{name} is not averaged, and nothing else is in a masked sum")

    def check(
        self,
        payload: Buffer,
        weight: int,
        *,
        site: str = "",
        round: int = 0,
        crc32: int | None = None,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        raise BadUpdate("updates of this run come masked, within a session alone", site=site, round=round)

    def fold(
        self, site: str, payload: Buffer, weight: int, metrics: Metrics = NO_METRICS, *, scale: float = 1.0
    ) -> None:
        raise ValueError("updates of this run come masked, within a session alone")

    def merge(self, other: Self) -> None:
        raise ValueError("sums of two sessions have masks of their own")


def require_maskable(section: SecureAggregationSection, fewest: int, layout: UpdateLayout) -> None:
    """Returns where updates of a layout can be masked, in rounds that close with `fewest` sites at least.

    Raises:
        ConfigError: a tensor cannot be added, or no threshold exists for so few sites; names it and what would help.
    """
    if layout.raws:
        spec = layout.raws[0].spec
        raise ConfigError(
            f'privacy.secure_aggregation with strategy.buffers = {layout.buffers!r}: tensor "{spec.name}" of '
            f"{spec.dtype} is not averaged, and the server learns sums alone; set strategy.buffers = local",
            key="strategy.buffers",
            value=layout.buffers,
            bound="local",
        )
    if layout.num_values == 0:
        raise ConfigError("privacy.secure_aggregation: the model has no values that are averaged", key="strategy.local")
    parameters(fewest, corrupt=section.corrupt, dropped=section.dropped, threat=section.threat)
    try:
        largest_level(fewest, section.bits)
    except ValueError as error:
        key = "privacy.secure_aggregation.bits"
        raise ConfigError(f"{key} = {section.bits}: {error}", key=key, value=str(section.bits)) from None


def lanes_of(terms: Terms, data: memoryview) -> list[Lane]:
    """The lanes of a masked input, without a copy."""
    found: list[Lane] = []
    start = 0
    for lane in terms.plan.lanes:
        part = byte_view(data[start : start + lane.num_bytes]).numpy()
        found.append(part.view(f"<u{lane.bits // 8}"))
        start += lane.num_bytes
    return found
