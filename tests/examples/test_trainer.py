"""Hugging Face's Trainer joins by one line in a callback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from samples.script_run import STEPS, ScriptRun
from torch import nn

from atoll.cluster.messages import Trained
from atoll.cluster.script.messages import SOCKET_VARIABLE

SCRIPT = Path(__file__).parents[2] / "examples" / "script" / "trainer.py"
ROUNDS = 3


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    model.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return model


@pytest.mark.chaos  # it loads transformers
def test_the_trainer_exchanges_after_its_steps(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x_train=random.random((64, 64)), y_train=random.integers(0, 10, 64))
    with ScriptRun(tmp_path, build).served() as run:
        run.script = SCRIPT
        environment = os.environ | {SOCKET_VARIABLE: str(run.socket), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [sys.executable, SCRIPT, tmp_path / "data.npz"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                run.begin()
                for number in range(1, ROUNDS + 1):
                    run.ask(run.train(number))
                    assert run.answer(Trained).weight == STEPS * 16
                    assert all(bool(difference.any()) for difference in run.difference(number).values())
                run.end()
                text, _ = process.communicate(timeout=60)
                assert process.returncode == 0, text
            finally:
                process.kill()
