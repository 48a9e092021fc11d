"""Batches of a TensorDataset, without the machinery of a DataLoader, which costs a small model as much as its training.

They are those that `DataLoader(dataset, sampler=BatchSampler(RandomSampler(...)), batch_size=None)` gives, and draw the
same numbers from the generator.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


def tensor_batches(
    dataset: TensorDataset, *, batch_size: int, shuffle: bool, generator: torch.Generator
) -> Iterator[list[Tensor]]:
    """The batches of one pass; copies, so that an app may write to them."""
    num_examples = len(dataset)
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # the loader's seed for its workers
    if not shuffle:
        for start in range(0, num_examples, batch_size):
            yield [tensor[start : start + batch_size].clone() for tensor in dataset.tensors]
        return
    order = torch.randperm(num_examples, generator=generator)
    for start in range(0, num_examples, batch_size):
        picked = order[start : start + batch_size]
        yield [tensor[picked] for tensor in dataset.tensors]
    torch.randperm(num_examples, generator=generator)  # the sampler's, at its end
