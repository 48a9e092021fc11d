from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contracts.updates import FLOATS, SMALL, layout_of
from safetensors.torch import load_file

from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.parts import build
from atoll.wire.errors import LocalError

LAYOUT = layout_of(FLOATS)
ADAM, SGD = build("optimizer", "adam", {}), build("optimizer", "sgd", {})


def some_state() -> OptimizerState:
    names = ("float32.exp_avg", "float32.exp_avg_sq")
    tensors = {name: torch.randn(320, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate(names)}
    return OptimizerState(
        optimizer="adam",
        schema_hash=LAYOUT.manifest.schema_hash,
        num_parameters={"float32": 320},
        num_steps=7,
        tensors=tensors,
    )


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state, path = some_state(), tmp_path / "7.safetensors"
    state.save(path)
    found = OptimizerState.load(path, ADAM, LAYOUT)
    assert (found.optimizer, found.num_steps, found.num_parameters) == ("adam", 7, {"float32": 320})
    assert found.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(found.tensors[name], state.tensors[name]) for name in state.tensors)
    assert load_file(path).keys() == state.tensors.keys()
    assert [file.name for file in tmp_path.iterdir()] == ["7.safetensors"]


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        some_state().save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("optimizer", [ADAM, SGD])
def test_a_fresh_state_has_a_file_too(tmp_path: Path, optimizer: object) -> None:
    fresh = optimizer.init(layout_of(SMALL))  # type: ignore[attr-defined]
    fresh.save(tmp_path / "0")
    assert OptimizerState.load(tmp_path / "0", optimizer, layout_of(SMALL)) == fresh  # type: ignore[arg-type]


def test_a_state_of_another_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    some_state().save(path)
    with pytest.raises(LocalError, match=r"holds the state of 'adam' .* needs 'sgd'"):
        OptimizerState.load(path, SGD, LAYOUT)
    with pytest.raises(LocalError, match="holds the state"):
        OptimizerState.load(path, ADAM, layout_of(SMALL))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    some_state().save(path)
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:20],
        whole[:-1],
        whole.replace(b"num_steps", b"num_stepz"),
        whole.replace(b"F32", b"I32"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(LocalError, match=r"optimizer state|holds the state"):
            OptimizerState.load(path, ADAM, LAYOUT)
    with pytest.raises(LocalError, match="cannot be read"):
        OptimizerState.load(tmp_path / "absent", ADAM, LAYOUT)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be written"):
        some_state().save(tmp_path / "absent" / "state")
