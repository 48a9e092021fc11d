"""Batches of a TensorDataset, without the machinery of a DataLoader, which costs a small model as much as its training.

They are those that `DataLoader(dataset, sampler=BatchSampler(RandomSampler(...)), batch_size=None)` gives, and draw the
same numbers from the generator.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

GATHER_BYTES = 1 << 20  # fits the second-level cache


def tensor_batches(
    dataset: TensorDataset, *, batch_size: int, shuffle: bool, generator: torch.Generator
) -> Iterator[list[Tensor]]:
    """The batches of one pass; copies, so that an app may write to them. Several are gathered at once where they are small."""
    num_examples = len(dataset)
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # the loader's seed for its workers
    if not shuffle:
        for start in range(0, num_examples, batch_size):
            yield [tensor[start : start + batch_size].clone() for tensor in dataset.tensors]
        return
    order = torch.randperm(num_examples, generator=generator)
    at_once = batch_size * max(1, GATHER_BYTES // max(1, batch_size * _example_bytes(dataset)))
    for start in range(0, num_examples, at_once):
        picked = order[start : start + at_once]
        gathered = [tensor.index_select(0, picked) for tensor in dataset.tensors]
        for first in range(0, len(picked), batch_size):
            yield [tensor[first : first + batch_size] for tensor in gathered]
    torch.randperm(num_examples, generator=generator)  # the sampler's, at its end


def _example_bytes(dataset: TensorDataset) -> int:
    return sum(tensor[:1].nbytes for tensor in dataset.tensors)
