"""`atoll.join`: a training loop that exists takes part in a run whose schedule counts optimizer steps.

Hooks of the script's own optimizers count its steps. After as many as the schedule says, the parameters are exchanged: the
update is written, and the next version takes their place, inside the call of `optimizer.step()`. The loop, the data, the
learning rates and the state of the optimizers stay the script's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.cluster.messages import Train
from atoll.cluster.parallel.clipping import clip_gradients
from atoll.cluster.script.overflow import agree_on_overflow
from atoll.cluster.script.part import Part, open_part
from atoll.wire.errors import AppFailed, ConfigError

PROGRESS_EVERY_S = 0.2

Examples = int | Callable[[], int]


def join(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    examples: Examples,
    clip: float | None = None,
) -> Joined:
    """Takes part in the run of the `atoll site exec` around this script; does nothing where there is none.

    Returns when the run has begun, with the newest version in `model`. Every process of the script calls it, after
    `init_process_group` and once the model is wrapped.

    Args:
        optimizers: those of the loop. A step counts when each has made one since the last that counted.
        examples: that a step of this process counts, over all batches that it accumulates; or what says so after each
            step. A callable may count at most `strategy.work.batch_size` of the job a step, over all processes.
        clip: bound of the 2-norm of each optimizer's whole gradient, over shards and after averaging. Without an agent it
            does nothing, as all else.

    Raises:
        ConfigError: the run's schedule does not count steps, or an argument is out of bounds.
        BadManifest: the model has other tensors than the run's.
        NotAllowed: the script is another one than the run's.
        RunEnded: the run ended before it began here.
    """
    given = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    every = tuple(_innermost(optimizer) for optimizer in given)
    _check(every, examples, clip)
    part = open_part()
    return Joined(part, model, every, examples, clip)


class Joined:
    """A loop that has joined. As a context manager, it leaves at the end of the block."""

    def __init__(
        self,
        part: Part | None,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        examples: Examples,
        clip: float | None,
    ) -> None:
        self._part = part
        self._optimizers, self._examples, self._clip = optimizers, examples, clip
        self._stepped: set[int] = set()
        self._hooks: list[Callable[[], None]] = []
        self._steps = self._count = self._weight = 0
        self._told_s = 0.0
        if part is None:
            return
        self._require_counted(part)
        part.take(model)
        part.ready(self._max_weight(part))
        self._begin(part, part.next_round())
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before).remove)
            self._hooks.append(optimizer.register_step_post_hook(self._after).remove)
        self._hooks.append(agree_on_overflow(optimizers))

    @property
    def active(self) -> bool:
        """Whether there is a run around this script, in which it takes part."""
        return self._part is not None

    @property
    def round(self) -> int:
        """The round that the steps belong to, from 1; 0 without a run."""
        return self._task.round if self._part is not None else 0

    def leave(self) -> None:
        """Take no more part. The steps since the last exchange are lost; other processes end at their next one."""
        for remove in self._hooks:
            remove()
        self._hooks.clear()
        if self._part is not None:
            self._part.channel.leave()
            self._part = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    # --- what the optimizers call -----------------------------------------------------------------------------------

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clip. Of a step with a closure there are no gradients yet: the closure makes them, maybe several times."""
        if self._clip is None:
            return None
        where = next((n for n, value in enumerate(args) if callable(value) and not isinstance(value, Optimizer)), None)
        closure = kwargs.get("closure") if where is None else args[where]
        if closure is None:
            self._clip_gradients(optimizer)
            return None

        def clipped() -> Any:
            loss = closure()
            self._clip_gradients(optimizer)
            return loss

        if where is None:
            return args, {**kwargs, "closure": clipped}
        return (*args[:where], clipped, *args[where + 1 :]), kwargs

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        part = self._part
        if part is None or _is_skipped(optimizer):
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self._count += 1
        self._weight += self._counted()
        if self._count == self._steps:
            self._exchange(part)
        elif time.monotonic() - self._told_s > PROGRESS_EVERY_S:
            self._told_s = time.monotonic()
            part.progress(self._task, self._count, self._steps)

    # ---------------------------------------------------------------------------------------------------------------

    def _exchange(self, part: Part) -> None:
        task = part.arrive(self._task, self._count)
        if task is not None:
            part.write(task, weight=self._weight, metrics={})
        self._begin(part, part.next_round())

    def _begin(self, part: Part, task: Train) -> None:
        part.load(task)
        self._task, self._count, self._weight = task, 0, 0
        self._steps = _steps_of(part, task.round)

    def _clip_gradients(self, optimizer: Optimizer) -> None:
        assert self._clip is not None
        bound = self._clip
        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer under GradScaler, which unscales itself
        if isinstance(scale, Tensor):
            bound *= float(scale)
        clip_gradients([p for group in optimizer.param_groups for p in group["params"]], bound)

    def _counted(self) -> int:
        found = self._examples if isinstance(self._examples, int) else self._examples()
        if not isinstance(found, int) or found < 0:
            raise AppFailed(f"examples() gave {found!r}, wanted a whole number, 0 or more", field="examples")
        return found

    def _max_weight(self, part: Part) -> int:
        """Of this process in any round. A callable's is that of the job's batches, which the first process promises."""
        weights = []
        for stage in part.whole.stages:
            steps = _steps_of(part, stage.from_round)
            of_job = part.strategy(stage.from_round).work.batch_size if part.channel.rank == 0 else 0
            weights.append(steps * (self._examples if isinstance(self._examples, int) else of_job))
        return max(weights)

    def _require_counted(self, part: Part) -> None:
        for stage in part.whole.stages:
            strategy = part.strategy(stage.from_round)
            if strategy.exchange.steps is None:
                schedule = part.schedule(stage.from_round)
                part.fail(
                    ConfigError(
                        f"strategy.schedule.kind = {schedule!r}: atoll.join() exchanges after so many steps, which this "
                        "schedule does not count; take every_steps, or `for round in atoll.connect().rounds()` in the script",
                        key="strategy.schedule.kind",
                        value=schedule,
                        bound="every_steps",
                    )
                )


def _innermost(optimizer: Any) -> Any:
    """The optimizer inside what accelerate or Lightning put around it, whose step is the one that is made."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _steps_of(part: Part, round_: int) -> int:
    steps = part.strategy(round_).exchange.steps
    assert steps is not None  # looked at when the script joined
    return steps


def _is_skipped(optimizer: Optimizer) -> bool:
    """Whether an optimizer that skips by itself, as fused ones do under GradScaler, has found an overflow."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.to(torch.float32).sum().item() > 0)


def _check(optimizers: Sequence[Any], examples: Any, clip: Any) -> None:
    """Raises ConfigError for arguments that cannot be meant: without an agent too, so that a mistake shows at once."""
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "nothing"
        raise ConfigError(f"optimizers = {kinds}: wanted one torch.optim.Optimizer or several", key="optimizers")
    if isinstance(examples, bool) or not (callable(examples) or (isinstance(examples, int) and examples >= 0)):
        text = f"examples = {examples!r}: wanted the examples of a step, 0 or more, or a function that says it"
        raise ConfigError(text, key="examples", value=repr(examples), bound="0 or more")
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ConfigError(f"clip = {clip!r}: wanted a norm above 0", key="clip", value=repr(clip), bound="above 0")
