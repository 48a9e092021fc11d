"""Blocks that stay in a core's cache, and flat views of bytes. Everything that folds or moves a model goes by these.

Invariant: block boundaries depend only on positions in a vector, so results cannot depend on how work was cut.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from atoll.wire.tensors import Buffer

# 2^15 numbers: one float64 and one int64 scratch block are 256 KiB each, which fits the second-level cache (1 MiB)
# beside input and accumulator. It is also the largest block that torch does not split over threads (its grain is
# 32,768 elements): threads come from folding several updates at once.
BLOCK_VALUES = 1 << 15
MAX_THREADS = 4  # one pass over a model is bound by memory well before more of them are busy

Item = TypeVar("Item")

# All pages at once, before the first update comes: one by one, between busy threads, they took seconds. Linux only.
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def byte_view(buffer: Buffer) -> Tensor:
    """A flat uint8 tensor over `buffer`, without a copy. Nothing may write to it where the buffer is read-only."""
    data = memoryview(buffer).cast("B")
    if data.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if not data.readonly:
        return torch.frombuffer(data, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch says once a process that it has no read-only tensors; the docstring above says what follows from it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)


def whole_vector(num_values: int, dtype: torch.dtype) -> Tensor:
    """Zeros of a model's length in memory of their own, which the system has back as soon as the vector is gone.

    From malloc's heap, small buffers settle in the place of a vector that was freed, and the next one makes the heap
    grow: after a few rounds it held three of them.
    """
    if num_values == 0:
        return torch.zeros(0, dtype=dtype)
    memory = mmap.mmap(-1, num_values * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE)
    return torch.frombuffer(memory, dtype=dtype)


def blocks(num_values: int, size: int = BLOCK_VALUES) -> Iterator[tuple[int, int]]:
    """Start and stop of consecutive blocks of `size` values; the last one may be shorter."""
    for start in range(0, num_values, size):
        yield start, min(start + size, num_values)


def for_each(items: Iterable[Item], work: Callable[[Item], None]) -> None:
    """Calls `work` on each item, from as many threads as there are cores (at most MAX_THREADS); raises its first error.

    For blocks that do not touch each other: torch and numpy release the interpreter lock in each of them.
    """
    remaining, lock, failed = iter(items), threading.Lock(), threading.Event()

    def go_on() -> None:
        while not failed.is_set():
            with lock:
                item = next(remaining, None)
            if item is None:
                return
            try:
                work(item)
            except BaseException:
                failed.set()
                raise

    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="blocks") as pool:
        for done in [pool.submit(go_on) for _ in range(num_threads)]:
            done.result()


def reals(tensor: Tensor) -> Tensor:
    """The numbers of `tensor` in order, flat; a complex one gives real and imaginary part in turn."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().reshape(-1)


def largest_magnitude(values_P: Tensor) -> float:
    """The largest absolute value, NaN where there is one; 0 of nothing."""
    if values_P.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values_P)  # hands NaN through; 20 GB/s, where isfinite().all() makes 0.9
    return float("nan") if math.isnan(low.item()) else max(-low.item(), high.item())
