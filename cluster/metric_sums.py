"""Sums and counts of metrics over batches: what leaves a site in place of a metric of each example."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from atoll.wire.errors import BadUpdate

Sums = Mapping[str, tuple[float, float]]

FLUSH_BATCHES = 64  # on an accelerator each flush waits for its queue; once in 64 batches is under 1 % of the time


class MetricSums:
    """Adds up without waiting for the device at each batch; sums are float64 on the CPU."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._waiting: dict[str, list[tuple[Tensor, float]]] = {}

    def add(self, name: str, value: Tensor | float, count: float) -> None:
        """Adds a batch's sum and count."""
        self._add(name, value, 1.0, count)

    def add_mean(self, name: str, mean: Tensor | float, count: float) -> None:
        """Adds a batch's mean over `count` examples."""
        self._add(name, mean, float(count), count)

    def result(self, total: Callable[[Sums], Sums] = lambda sums: sums) -> dict[str, tuple[float, float]]:
        """Sum and count by name.

        Args:
            total: adds up those of several processes, which then all find the same to be wrong, or none does.

        Raises:
            BadUpdate: one of them is not finite.
        """
        for name in self._counts:
            self._fold(name)
        sums = total({name: (self._sums[name], self._counts[name]) for name in sorted(self._sums)})
        for name, pair in sums.items():
            for value in pair:
                if not math.isfinite(value):
                    raise _not_finite(name, value)
        return dict(sums)

    def _add(self, name: str, value: Tensor | float, scale: float, count: float) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + float(count)
        waiting = self._waiting.setdefault(name, [])
        waiting.append((torch.as_tensor(value).detach(), scale))
        if len(waiting) >= FLUSH_BATCHES:
            self._fold(name)
            if not math.isfinite(self._sums[name]):
                raise _not_finite(name, self._sums[name])

    def _fold(self, name: str) -> None:
        waiting = self._waiting.pop(name, [])
        total = self._sums.get(name, 0.0)
        if waiting:
            values = torch.stack([value for value, _ in waiting]).cpu().double()
            total += float(values @ torch.tensor([scale for _, scale in waiting], dtype=torch.float64))
        self._sums[name] = total


def _not_finite(name: str, value: float) -> BadUpdate:
    return BadUpdate(
        f"metric {name!r} is {value} after training or evaluation; lower the learning rate or look at the data",
        field=name,
        value=value,
        bound="finite",
    )
