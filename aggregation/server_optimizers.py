"""How the combined difference moves the model: the optimizers of torch.optim, with the difference as -gradient.

They work on any block of the flat vector of parameters: all of them are elementwise, so blocks equal the whole, bit
for bit. Precision: float32 for parameters of up to 32 bits and float64 for wider ones, as torch.optim would on such a
vector; plain SGD, which keeps no state, in float64 throughout. The model's own dtype is reached by one rounding, when
the new value is stored (`next_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor

from atoll.aggregation.codecs.casts import SUMMABLE
from atoll.aggregation.layout import num_reals
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.wire.job import Strict
from atoll.wire.manifest import Manifest

Blocks = Mapping[str, Tensor]  # state of one block by name, each as long as the block


class ServerOptimizer(Protocol):
    @property
    def name(self) -> str: ...

    def precision(self, *, wide: bool) -> torch.dtype:
        """The dtype in which parameters are moved: `wide` ones are float64 or complex128."""
        ...

    def init(self, manifest: Manifest) -> OptimizerState:
        """The state at version 0."""
        ...

    def step(self, parameters_P: Tensor, difference_P: Tensor, state: Blocks, num_steps: int) -> Blocks:
        """Moves a block of parameters in place, after `num_steps` versions; gives the block's new state."""
        ...


def is_wide(dtype: str) -> bool:
    return dtype in ("float64", "complex128")


def initial_state(optimizer: ServerOptimizer, manifest: Manifest) -> OptimizerState:
    """The state at version 0, for an optimizer's `init`: counts the parameters of each precision."""
    num_parameters: dict[str, int] = {}
    for spec in manifest:
        if spec.role == "parameter" and spec.dtype in SUMMABLE:
            precision = precision_name(optimizer, spec.dtype)
            num_parameters[precision] = num_parameters.get(precision, 0) + num_reals(spec)
    return OptimizerState(optimizer=optimizer.name, schema_hash=manifest.schema_hash, num_parameters=num_parameters)


def precision_name(optimizer: ServerOptimizer, dtype: str) -> str:
    """The optimizer's precision for parameters of `dtype`, as the manifest names dtypes."""
    return str(optimizer.precision(wide=is_wide(dtype))).removeprefix("torch.")


class _TorchOptimizer:
    """One optimizer of torch.optim, applied by blocks."""

    def __init__(self, name: str, make: Callable[[Tensor], torch.optim.Optimizer]) -> None:
        self.name = name
        self._make = make

    def precision(self, *, wide: bool) -> torch.dtype:
        return torch.float64 if wide else torch.float32

    def init(self, manifest: Manifest) -> OptimizerState:
        return initial_state(self, manifest)

    def step(self, parameters_P: Tensor, difference_P: Tensor, state: Blocks, num_steps: int) -> Blocks:
        parameters_P.grad = difference_P.neg()
        optimizer = self._make(parameters_P)  # 50 us a block, of the 400 that Adam takes
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
    al. 2019, arXiv:1909.06335), or w <- w + lr (x + momentum v) where nesterov.
    Memory: none; one model of state with momentum.
    """

    class Options(Strict):
        lr: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
        momentum: float = Field(default=0.0, ge=0, lt=1)
        nesterov: bool = False

        @model_validator(mode="after")
        def _needs_momentum(self) -> Sgd.Options:
            if self.nesterov and not self.momentum:
                raise ValueError("nesterov needs momentum above 0")
            return self

    def __init__(self, options: Options) -> None:
        super().__init__("sgd", lambda p: torch.optim.SGD([p], **options.model_dump(), foreach=False))
        self._stateless = options.momentum == 0
        self._lr = options.lr

    def step(self, parameters_P: Tensor, difference_P: Tensor, state: Blocks, num_steps: int) -> Blocks:
        if not self._stateless:
            return super().step(parameters_P, difference_P, state, num_steps)
        parameters_P.add_(difference_P, alpha=self._lr)  # what torch computes, without an optimizer made for each block
        return {}

    def precision(self, *, wide: bool) -> torch.dtype:
        # Without state there is nothing to save by float32, and base + mean is then rounded once.
        return torch.float64 if self._stateless else super().precision(wide=wide)


class Adam(_TorchOptimizer):
    """Adam on the server, as torch.optim computes it (with bias correction).

    w <- w + lr m / (sqrt(v) + eps) (Reddi et al. 2020, arXiv:2003.00295, algorithm 2, which leaves out the bias
    correction; defaults as in its section 5). Memory: two models of state.
    """

    class Options(Strict):
        lr: float = Field(default=0.01, gt=0, le=1e6, allow_inf_nan=False)
        betas: tuple[float, float] = (0.9, 0.99)
        eps: float = Field(default=1e-3, gt=0, le=1, allow_inf_nan=False)

        @model_validator(mode="after")
        def _in_range(self) -> Adam.Options:
            if not all(0 <= beta < 1 for beta in self.betas):
                raise ValueError("betas are at least 0 and below 1")
            return self

    def __init__(self, options: Options) -> None:
        super().__init__("adam", lambda p: torch.optim.Adam([p], **options.model_dump(), foreach=False))


class AdamW(_TorchOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2).

    w <- (1 - lr weight_decay) w + lr m / (sqrt(v) + eps). Memory: two models of state.
    """

    class Options(Adam.Options):
        weight_decay: float = Field(default=0.01, ge=0, le=1)

    def __init__(self, options: Options) -> None:
        super().__init__("adamw", lambda p: torch.optim.AdamW([p], **options.model_dump(), foreach=False))


class Adagrad(_TorchOptimizer):
    """Adagrad on the server.

    v <- v + x^2, w <- w + lr x / (sqrt(v) + eps) (Reddi et al. 2020, arXiv:2003.00295, algorithm 2).
    Memory: one model of state.
    """

    class Options(Strict):
        lr: float = Field(default=0.01, gt=0, le=1e6, allow_inf_nan=False)
        eps: float = Field(default=1e-3, gt=0, le=1, allow_inf_nan=False)

    def __init__(self, options: Options) -> None:
        super().__init__("adagrad", lambda p: torch.optim.Adagrad([p], **options.model_dump(), foreach=False))
