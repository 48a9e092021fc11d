from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from atoll.cluster.device import choose_device, set_up_torch
from atoll.wire.errors import ConfigError, DeviceMissing
from atoll.wire.job import TrainingSection

HAS_ACCELERATOR = torch.accelerator.is_available()


def test_auto_takes_what_there_is() -> None:
    assert (choose_device("auto").type == "cpu") is not HAS_ACCELERATOR
    assert choose_device("auto", "auto") == choose_device("auto")


def test_the_machines_wish_stands_before_the_jobs() -> None:
    assert choose_device("cuda", "cpu") == torch.device("cpu")
    assert choose_device("cpu", "auto") == torch.device("cpu")


@pytest.mark.parametrize("wish", ["cuda:63", "xpu:63", "mps:1"])
def test_an_absent_device_is_never_replaced_in_silence(wish: str) -> None:
    with pytest.raises(DeviceMissing, match=f"'{wish}' was asked for and this machine has"):
        choose_device("auto", wish)


@pytest.mark.parametrize("wish", ["", "gpu", "cuda:x", "cpu:"])
def test_a_name_that_is_no_device(wish: str) -> None:
    with pytest.raises(ConfigError, match="wanted"):
        choose_device(wish)


def test_sets_up_threads_and_determinism() -> None:
    set_up_torch(TrainingSection(threads=1), torch.device("cpu"))
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    set_up_torch(TrainingSection(deterministic=False), torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()


def test_evaluation_is_deterministic_without_the_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from atoll.cluster.device import set_up_torch\n"
        "from atoll.wire.job import TrainingSection\n"
        "set_up_torch(TrainingSection(), torch.device('cpu'), trains=False)\n"
        "print(torch.are_deterministic_algorithms_enabled(), 'torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]
