"""A batch divided among processes and micro-batches, along the first dim of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from atoll.wire.errors import AppFailed


def num_examples(batch: Any) -> int:
    """Length of the first dim of the batch's tensors.

    Raises:
        AppFailed: it has none, or they differ, or it holds what cannot be divided.
    """
    lengths = {len(tensor) if tensor.dim() else -1 for tensor in _tensors(batch)}
    if len(lengths) != 1 or -1 in lengths:
        raise AppFailed(
            f"a batch of the app has tensors of {sorted(lengths)} examples; [parallel] divides a batch along the first "
            "dim of its tensors: give all of them one entry an example in data() or loader(), or remove [parallel]",
            field="batch",
            value=sorted(lengths),
            bound="one length",
        )
    return lengths.pop()


def part(batch: Any, start: int, stop: int) -> Any:
    """The batch's examples from `start` to `stop`, as views."""
    if isinstance(batch, Tensor):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return {name: part(value, start, stop) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(part(value, start, stop) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(part(value, start, stop) for value in batch)
    return batch


def bounds(count: int, num_parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` of `count` examples: the first parts are one longer where they do not divide."""
    size, longer = divmod(count, num_parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
    elif batch is not None and not isinstance(batch, bool | int | float):
        raise AppFailed(
            f"a batch of the app holds {type(batch).__name__}, which [parallel] cannot divide among processes; give "
            "tensors in data() or loader(), or remove [parallel]",
            field="batch",
            value=type(batch).__name__,
            bound="tensors",
        )
