"""Seeds of a run: each is a function of the job's seed and of what it is for, the same on every machine.

These seeds order data and draw dropout masks. They are no secret and protect nothing: the randomness of rounding
and of masks derives from secrets elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def model_seed(job_seed: int) -> int:
    """Seed of the first model's weights."""
    return _derive("model", job_seed)


def training_seed(job_seed: int, site: str, round: int) -> int:
    """Seed of everything random in one site's training of one round: order of the data, dropout, augmentation."""
    return _derive("train", job_seed, site, round)


def share_seed(seed: int, share: int) -> int:
    """Seed of what is random in one process's share of the batches, where a site has several (`[parallel]`)."""
    return _derive("share", seed, share)


@contextmanager
def seeded(seed: int, device: torch.device | None = None, *, restores: bool = True) -> Iterator[None]:
    """Python's, numpy's and torch's generators (CPU and `device`) start from `seed`; afterwards they go on as before.

    Without `restores` they go on from where they are: reading and setting numpy's takes 50 us.
    """
    if not restores:
        _seed(seed, device)
        yield
        return
    # torch keeps one generator for all of MPS, and fork_rng cannot put that one back.
    devices = [device] if device is not None and device.type not in ("cpu", "mps") else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        _seed(seed, device)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _seed(seed: int, device: torch.device | None) -> None:
    if device is None or device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack for each absent accelerator
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _derive(*parts: str | int) -> int:
    """63 bits of SHA-256 over the parts, kept apart by JSON."""
    digest = hashlib.sha256(b"atoll/seed/1\n" + json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8]) >> 1
