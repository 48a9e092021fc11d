"""Batches of tensors are those of a DataLoader, over several passes from one generator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from atoll.cluster.tensor_batches import tensor_batches


def loaded(dataset: TensorDataset, batch_size: int, shuffle: bool, generator: torch.Generator) -> DataLoader[Any]:
    order = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
    batches = BatchSampler(order, batch_size, drop_last=False)
    return DataLoader(dataset, sampler=batches, batch_size=None, generator=generator)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_examples", [1, 10, 23])
def test_three_passes_give_the_batches_of_a_loader(num_examples: int, shuffle: bool) -> None:
    dataset = TensorDataset(torch.randn(num_examples, 3), torch.arange(num_examples))
    one, other = (torch.Generator().manual_seed(5) for _ in range(2))
    found = [b for _ in range(3) for b in tensor_batches(dataset, batch_size=5, shuffle=shuffle, generator=one)]
    wanted = [b for _ in range(3) for b in loaded(dataset, 5, shuffle, other)]
    assert len(found) == len(wanted)
    for mine, theirs in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(one.get_state(), other.get_state())


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_app_may_write_to_a_batch(shuffle: bool) -> None:
    dataset = TensorDataset(torch.ones(4, 2), torch.zeros(4))
    for batch in tensor_batches(dataset, batch_size=2, shuffle=shuffle, generator=torch.Generator()):
        batch[0].zero_()
    assert torch.equal(dataset.tensors[0], torch.ones(4, 2))
