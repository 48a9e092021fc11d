"""How the combined difference moves the model: the optimizers of torch.optim, with the difference as -gradient.

They work on any block of the flat vector of parameters: all of them are elementwise, so blocks equal the whole, bit
for bit. Precision: float32 for parameters of up to 32 bits and float64 for wider ones, as torch.optim would on such a
vector; plain SGD, which keeps no state, in float64 throughout. The model's own dtype is reached by one rounding, when
the new value is stored (`next_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from atoll.aggregation.lanes import Share
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.lr_schedules import LearningRate
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.wire.job import Part, Strict

Blocks = Mapping[str, Tensor]  # state of one block by name, each as long as the block


class ServerOptimizer(Protocol):
    @property
    def name(self) -> str: ...

    def precision(self, *, wide: bool) -> torch.dtype:
        """The dtype in which parameters are moved: `wide` ones are float64 or complex128."""
        ...

    def init(self, layout: UpdateLayout) -> OptimizerState:
        """The state at version 0."""
        ...

    def step(self, parameters_P: Tensor, difference_P: Tensor, state: Blocks, num_steps: int) -> Blocks:
        """Moves a block of parameters in place, after `num_steps` versions; gives the block's new state."""
        ...


@runtime_checkable
class Sharing(Protocol):
    """An optimizer whose state is a mean over all members of the run, of whom a round moves some."""

    def in_round(self, share: Share) -> ServerOptimizer:
        """The optimizer of a round whose sites are this part of all."""
        ...


def is_wide(dtype: str) -> bool:
    return dtype in ("float64", "complex128")


def initial_state(optimizer: ServerOptimizer, layout: UpdateLayout) -> OptimizerState:
    """The state at version 0, for an optimizer's `init`: counts the parameters of each precision that it moves."""
    num_parameters: dict[str, int] = {}
    for entry in layout.means:
        if entry.spec.role == "parameter":
            precision = precision_name(optimizer, entry.spec.dtype)
            num_parameters[precision] = num_parameters.get(precision, 0) + entry.num_values
    schema_hash = layout.manifest.schema_hash
    return OptimizerState(optimizer=optimizer.name, schema_hash=schema_hash, num_parameters=num_parameters)


def precision_name(optimizer: ServerOptimizer, dtype: str) -> str:
    """The optimizer's precision for parameters of `dtype`, as the manifest names dtypes."""
    return str(optimizer.precision(wide=is_wide(dtype))).removeprefix("torch.")


class _Options(Strict):
    """What all of them take besides their own."""

    lr_schedule: Part | None = None  # of torch.optim.lr_scheduler; a step is a version

    @field_validator("lr_schedule")
    @classmethod
    def _is_known(cls, schedule: Part | None) -> Part | None:
        LearningRate(1.0, schedule)
        return schedule

    @property
    def own(self) -> dict[str, Any]:
        """Options of the optimizer itself, but for its learning rate."""
        return self.model_dump(exclude={"lr", "lr_schedule"})


class _TorchOptimizer:
    """One optimizer of torch.optim, applied by blocks."""

    def __init__(self, name: str, lr: LearningRate, make: Callable[[Tensor, float], torch.optim.Optimizer]) -> None:
        self.name = name
        self.lr = lr
        self._make = make

    def precision(self, *, wide: bool) -> torch.dtype:
        return torch.float64 if wide else torch.float32

    def init(self, layout: UpdateLayout) -> OptimizerState:
        return initial_state(self, layout)

    def step(self, parameters_P: Tensor, difference_P: Tensor, state: Blocks, num_steps: int) -> Blocks:
        parameters_P.grad = difference_P.neg()
        optimizer = self._make(parameters_P, self.lr.at(num_steps))  # 50 us a block, of the 400 that Adam takes
        if num_steps:
            optimizer.state[parameters_P] = {"step": torch.tensor(float(num_steps)), **state}
        optimizer.step()
        parameters_P.grad = None
        return {
            name: value
            for name, value in optimizer.state[parameters_P].items()
            if isinstance(value, Tensor) and value.shape == parameters_P.shape
        }


class Sgd(_TorchOptimizer):
    """Gradient descent with the difference as -gradient; lr = 1 without momentum adds the mean difference exactly.

    w <- w + lr x (McMahan et al. 2016, arXiv:1602.05629); with momentum v <- momentum v + x, w <- w + lr v (Hsu et
    al. 2019, arXiv:1909.06335), or w <- w + lr (x + momentum v) where nesterov. momentum = 1 adds up what sites that
    code differences send (codecs/feedback.py).
    Memory: none; one model of state with momentum.
    """

    class Options(_Options):
        lr: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
        momentum: float = Field(default=0.0, ge=0, le=1)
        nesterov: bool = False

        @model_validator(mode="after")
        def _needs_momentum(self) -> Sgd.Options:
            if self.nesterov and not 0 < self.momentum < 1:
                raise ValueError("nesterov needs momentum above 0 and below 1")
            return self

    def __init__(self, options: Options) -> None:
        lr = LearningRate(options.lr, options.lr_schedule)
        super().__init__("sgd", lr, lambda p, lr: torch.optim.SGD([p], lr, **options.own, foreach=False))
        self.momentum = options.momentum
        self._stateless = options.momentum == 0
        self.adds = options == Sgd.Options()  # the mean difference as it is

    def step(self, parameters_P: Tensor, difference_P: Tensor, state: Blocks, num_steps: int) -> Blocks:
        if not self._stateless:
            return super().step(parameters_P, difference_P, state, num_steps)
        parameters_P.add_(
            difference_P, alpha=self.lr.at(num_steps)
        )  # what torch computes, without an optimizer made for each block
        return {}

    def precision(self, *, wide: bool) -> torch.dtype:
        # Without state there is nothing to save by float32, and base + mean is then rounded once.
        return torch.float64 if self._stateless else super().precision(wide=wide)


class Adam(_TorchOptimizer):
    """Adam on the server, as torch.optim computes it (with bias correction).

    w <- w + lr m / (sqrt(v) + eps) (Reddi et al. 2020, arXiv:2003.00295, algorithm 2, which leaves out the bias
    correction; defaults as in its section 5). Memory: two models of state.
    """

    class Options(_Options):
        lr: float = Field(default=0.01, gt=0, le=1e6, allow_inf_nan=False)
        betas: tuple[float, float] = (0.9, 0.99)
        eps: float = Field(default=1e-3, gt=0, le=1, allow_inf_nan=False)

        @model_validator(mode="after")
        def _in_range(self) -> Adam.Options:
            if not all(0 <= beta < 1 for beta in self.betas):
                raise ValueError("betas are at least 0 and below 1")
            return self

    def __init__(self, options: Options) -> None:
        lr = LearningRate(options.lr, options.lr_schedule)
        super().__init__("adam", lr, lambda p, lr: torch.optim.Adam([p], lr, **options.own, foreach=False))


class AdamW(_TorchOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2).

    w <- (1 - lr weight_decay) w + lr m / (sqrt(v) + eps). Memory: two models of state.
    """

    class Options(Adam.Options):
        weight_decay: float = Field(default=0.01, ge=0, le=1)

    def __init__(self, options: Options) -> None:
        lr = LearningRate(options.lr, options.lr_schedule)
        super().__init__("adamw", lr, lambda p, lr: torch.optim.AdamW([p], lr, **options.own, foreach=False))


class Adagrad(_TorchOptimizer):
    """Adagrad on the server.

    v <- v + x^2, w <- w + lr x / (sqrt(v) + eps) (Reddi et al. 2020, arXiv:2003.00295, algorithm 2).
    Memory: one model of state.
    """

    class Options(_Options):
        lr: float = Field(default=0.01, gt=0, le=1e6, allow_inf_nan=False)
        eps: float = Field(default=1e-3, gt=0, le=1, allow_inf_nan=False)

    def __init__(self, options: Options) -> None:
        lr = LearningRate(options.lr, options.lr_schedule)
        super().__init__("adagrad", lr, lambda p, lr: torch.optim.Adagrad([p], lr, **options.own, foreach=False))


class Yogi:
    """Adam whose second moment moves by the sign of its error, so that it forgets slowly; not in torch.optim.

    m <- b1 m + (1 - b1) x, v <- v - (1 - b2) sign(v - x^2) x^2, w <- w + lr m / (sqrt(v) + eps), without bias correction
    (Zaheer et al. 2018; Reddi et al. 2020, arXiv:2003.00295, algorithm 2), from m = v = 0. Memory: two models of state.
    """

    class Options(Adam.Options):
        pass

    def __init__(self, options: Options) -> None:
        self.name = "yogi"
        self.lr = LearningRate(options.lr, options.lr_schedule)
        self._options = options

    def precision(self, *, wide: bool) -> torch.dtype:
        return torch.float64 if wide else torch.float32

    def init(self, layout: UpdateLayout) -> OptimizerState:
        return initial_state(self, layout)

    def step(self, parameters_P: Tensor, difference_P: Tensor, state: Blocks, num_steps: int) -> Blocks:
        beta1, beta2 = self._options.betas
        zeros_P = torch.zeros_like(difference_P)
        first_P, second_P = state.get("exp_avg", zeros_P), state.get("exp_avg_sq", zeros_P)
        square_P = difference_P.square()
        first_P = first_P * beta1 + difference_P * (1 - beta1)
        second_P = second_P - (second_P - square_P).sign() * square_P * (1 - beta2)
        parameters_P += first_P * self.lr.at(num_steps) / (second_P.sqrt() + self._options.eps)
        return {"exp_avg": first_P, "exp_avg_sq": second_P}
