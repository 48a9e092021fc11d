"""What a server optimizer keeps from one version to the next, as a value and as a file.

Invariant: a state belongs to one model version and is never changed. Making a version gives a new state, so a commit
that failed can be tried again from the old one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import safetensors
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from atoll.aggregation.layout import UpdateLayout
from atoll.wire.errors import DiskFull, LocalError
from atoll.wire.model_file import fsync_folder
from atoll.wire.room import NO_ROOM

_METADATA_KEY: Final = "atoll.optimizer"


class Initial(Protocol):
    """An optimizer, as far as its state is concerned."""

    def init(self, layout: UpdateLayout) -> OptimizerState: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """State after `num_steps` versions.

    `tensors` are flat, one value for each parameter of a precision, and named "<precision>.<name>", for example
    "float32.exp_avg"; none before the first step. `num_parameters` says how many each precision has.
    """

    optimizer: str  # name of the optimizer that it belongs to
    schema_hash: str  # of the model
    num_parameters: Mapping[str, int]
    num_steps: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Makes the state durable at `path` (safetensors), whole or not at all.

        Raises:
            DiskFull: there is no room.
            LocalError: the file cannot be written for another reason.
        """
        about = {
            "optimizer": self.optimizer,
            "schema_hash": self.schema_hash,
            "num_parameters": dict(self.num_parameters),
            "num_steps": self.num_steps,
        }
        draft = path.with_name(f".{path.name}.draft")
        try:
            safetensors.torch.save_file(dict(self.tensors), draft, {_METADATA_KEY: json.dumps(about, sort_keys=True)})
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            draft.replace(path)
            fsync_folder(path.parent)
        except (OSError, SafetensorError) as error:
            draft.unlink(missing_ok=True)
            # safetensors gives the number of the operating system's error only in its text.
            full = getattr(error, "errno", None) in NO_ROOM or any(
                f"os error {number})" in str(error) for number in NO_ROOM
            )
            raise (DiskFull if full else LocalError)(f"{path}: optimizer state cannot be written: {error}") from None

    @classmethod
    def load(cls, path: Path, optimizer: Initial, layout: UpdateLayout) -> OptimizerState:
        """The state in a file that `save` wrote.

        Raises:
            LocalError: the file is missing, damaged, or belongs to another optimizer or model.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about: dict[str, Any] = json.loads((file.metadata() or {})[_METADATA_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = cls(**about, tensors=tensors)
            whole = state.num_steps >= 0 and all(state._fits(name, tensor) for name, tensor in tensors.items())
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise LocalError(f"{path}: optimizer state cannot be read: {error}") from None
        fresh = optimizer.init(layout)
        if not whole or replace(state, num_steps=0, tensors={}) != fresh:
            raise LocalError(
                f"{path}: holds the state of {state.optimizer!r} for {dict(state.num_parameters)} parameters of model "
                f"{state.schema_hash:.12}; this run needs {fresh.optimizer!r}, {dict(fresh.num_parameters)}, "
                f"{fresh.schema_hash:.12}"
            )
        return state

    def _fits(self, name: str, tensor: Tensor) -> bool:
        precision = name.partition(".")[0]
        return str(tensor.dtype) == f"torch.{precision}" and tensor.shape == (self.num_parameters[precision],)
