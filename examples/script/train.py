"""Handwritten digits in a plain loop of PyTorch, which joins a run where `atoll site exec` starts it.

python train.py data/site-1.npz                           # by itself, as ever
python train.py data/site-1.npz --write-model model.safetensors     # what a run begins with
atoll site exec latest -- python train.py data/site-1.npz
atoll site exec latest -- torchrun --nproc-per-node 2 train.py data/site-1.npz
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import atoll

BATCH = 16  # of each process


def digits(path: Path, split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """Pixels from 0 to 1 and labels, as `python -m atoll_examples.digits.prepare` writes them."""
    with np.load(path) as file:
        return TensorDataset(torch.from_numpy(file[f"x_{split}"]).float(), torch.from_numpy(file[f"y_{split}"]).long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--write-model", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    if options.write_model:
        atoll.save_model(model, options.write_model)
        return
    is_spread = "WORLD_SIZE" in os.environ  # by torchrun
    if is_spread:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    dataset = digits(options.data, "train")
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] | None = (
        DistributedSampler(dataset, drop_last=True) if is_spread else None
    )
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, shuffle=sampler is None, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    atoll.join(model, optimizer, examples=BATCH)  # this is all

    for epoch in range(options.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # of torch
            optimizer.step()
            schedule.step()
    if is_spread:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
