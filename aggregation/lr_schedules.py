"""The learning rate of a server optimizer over the versions of a run: the schedules of torch.optim.lr_scheduler."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)

from atoll.wire.job import Part

SCHEDULES: Final[Mapping[str, Callable[..., LRScheduler]]] = {
    "step": StepLR,
    "multi_step": MultiStepLR,
    "exponential": ExponentialLR,
    "cosine": CosineAnnealingLR,
    "linear": LinearLR,
    "constant": ConstantLR,
    "polynomial": PolynomialLR,
}

MOST_LOOKED_AT = 10_000  # versions whose rate is looked at when a job is planned: 50 ms


class LearningRate:
    """The rate at each version: a function of the number of versions made before it.

    Args:
        schedule: kind and options as torch.optim.lr_scheduler has them; a step is a version. None keeps `base`.

    Raises:
        ValueError: the schedule or an option of it is unknown, or torch refuses its value; says what is known.
    """

    def __init__(self, base: float, schedule: Part | None) -> None:
        self._rates = [base]
        self._lock = threading.Lock()
        self._scheduler: LRScheduler | None = None
        if schedule is not None:
            self._scheduler = _made(base, schedule)
            self._rates = [float(self._scheduler.get_last_lr()[0])]

    def require_usable(self, num_versions: int) -> None:
        """Returns where the rate is finite and not below 0 at each of so many versions (of very many, the first ones).

        Raises:
            ValueError: names the version and the rate.
        """
        for version in range(min(num_versions, MOST_LOOKED_AT)):
            rate = self.at(version)
            if not 0 <= rate < math.inf:
                raise ValueError(f"the learning rate of version {version + 1} would be {rate:g}; wanted 0 or more")

    def at(self, num_steps: int) -> float:
        """The rate after `num_steps` versions."""
        if self._scheduler is None:
            return self._rates[0]
        with self._lock:  # blocks of a model ask from several threads
            while len(self._rates) <= num_steps:
                self._scheduler.optimizer.step()
                self._scheduler.step()
                self._rates.append(float(self._scheduler.get_last_lr()[0]))
        return self._rates[num_steps]


def _made(base: float, schedule: Part) -> LRScheduler:
    kind = SCHEDULES.get(schedule.kind)
    if kind is None:
        raise ValueError(f"{schedule.kind!r} is not known; known: {', '.join(SCHEDULES)}")
    known = sorted(inspect.signature(kind).parameters.keys() - {"self", "optimizer", "last_epoch"})
    if unknown := sorted(schedule.options.keys() - set(known)):
        raise ValueError(f"{schedule.kind} has no option {unknown[0]!r}; it takes {', '.join(known)}")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
    options: dict[str, Any] = schedule.options
    try:
        made = kind(optimizer, **options)
        for _ in range(2):  # some options are only used, and found wrong, at a step
            optimizer.step()
            made.step()
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{schedule.kind} cannot be used: {error}") from None
    fresh = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
    return kind(fresh, **options)
