"""Handwritten digits by Hugging Face's Trainer, which joins a run when its training begins.

python trainer.py data/site-1.npz --write-model model.safetensors
atoll site exec latest -- python trainer.py data/site-1.npz
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import atoll

BATCH = 16


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Join(TrainerCallback):  # type: ignore[misc]  # of a library without types
    """The one line, where the Trainer has made its optimizer."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        atoll.join(given["model"], given["optimizer"], examples=BATCH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--write-model", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Digits()
    if options.write_model:
        atoll.save_model(model, options.write_model)
        return
    with np.load(options.data) as file:
        dataset: Any = [
            {"x": torch.from_numpy(x).float(), "labels": int(y)}
            for x, y in zip(file["x_train"], file["y_train"], strict=True)
        ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            dataloader_drop_last=True,
            num_train_epochs=1000,
            learning_rate=0.01,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=dataset, callbacks=[Join()]).train()


if __name__ == "__main__":
    main()
