"""Where a worker computes, and how torch is set up for it. The only place that asks which accelerators there are."""

from __future__ import annotations

import os

import torch

from atoll.wire.errors import ConfigError, DeviceMissing
from atoll.wire.job import TrainingSection


def choose_device(job_wish: str, machine_wish: str | None = None) -> torch.device:
    """The device to train on. What the machine's settings say stands before the job, unless that is "auto".

    "auto" is the accelerator that torch finds, else the CPU.

    Raises:
        DeviceMissing: a device is asked for by name and is not there. Never falls back in silence.
        ConfigError: no name of a device.
    """
    wish = machine_wish if machine_wish not in (None, "auto") else job_wish
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wish == "auto":
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    try:
        device = torch.device(str(wish))
    except RuntimeError:
        raise ConfigError(
            f'device = {wish!r} is no device; wanted "auto", "cpu", "cuda", "cuda:1" or "mps"',
            key="training.device",
            value=str(wish),
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    num_devices = torch.accelerator.device_count() if accelerator and accelerator.type == device.type else 0
    index = device.index or 0
    if index >= num_devices:
        raise DeviceMissing(
            f"device {wish!r} was asked for and this machine has {num_devices} of type {device.type!r}; "
            'set device = "auto" or "cpu" in [training] of the job or in [devices] of the site'
        )
    return torch.device(device.type, index)


def set_up_torch(training: TrainingSection, device: torch.device, *, trains: bool = True) -> None:
    """Threads and determinism of this process, before anything is computed.

    Under `deterministic` equal seeds give equal bytes on the same machine; an operation that cannot promise that
    raises and names itself. The number of threads is part of the result: sums over threads are rounded in their order.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; cuBLAS demands it
    if training.threads is not None:
        torch.set_num_threads(training.threads)
    if trains:
        torch.use_deterministic_algorithms(training.deterministic)
    else:  # the same switch, but without importing torch's compiler: 2.5 s and 70 MB that optimizers cost anyway
        torch.set_deterministic_debug_mode("error" if training.deterministic else "default")
    # A debugging aid that costs a pass over every new tensor; torch's stubs do not know it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not training.deterministic
