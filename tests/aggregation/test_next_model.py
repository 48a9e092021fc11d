from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from contracts.updates import BOUND, EVERY_DTYPE, SMALL, encoded, layout_of, random_state, whole_mean
from torch import Tensor, nn

from atoll.aggregation.layout import Buffers, UpdateLayout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.parts import build
from atoll.aggregation.round_sum import RoundSum
from atoll.aggregation.server_optimizers import ServerOptimizer
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import load_state, manifest_of, state_of, views, write_state

WEIGHTS = (3, 10, 7)


def optimizer(kind: str = "sgd", **options: object) -> ServerOptimizer:
    made: ServerOptimizer = build("optimizer", kind, options)
    return made


def model_bytes(manifest: Manifest, state: dict[str, Tensor]) -> bytearray:
    data = bytearray(manifest.num_bytes)
    write_state(manifest, state, data)
    return data


def summed(
    layout: UpdateLayout,
    base: dict[str, Tensor],
    trained: Sequence[dict[str, Tensor]],
    weights: Sequence[int] = WEIGHTS,
) -> RoundSum:
    total = RoundSum(layout, num_sites=len(trained), max_weight=max(weights), bound=BOUND)
    for number, (state, weight) in enumerate(zip(trained, weights, strict=False)):
        total.fold(f"s{number}", encoded(layout, base, state, site=f"s{number}"), weight)
    return total


def moved(
    total: RoundSum, base: bytes | bytearray, by: ServerOptimizer, state: OptimizerState | None = None
) -> tuple[bytearray, OptimizerState]:
    manifest = total.layout.manifest
    out = bytearray(b"\xa5" * manifest.num_bytes)
    before = state or by.init(total.layout)
    after = next_model(total, optimizer=by, state=before, base=bytes(base), out=out, manifest=manifest)
    return out, after


def test_sgd_of_one_adds_the_mean_with_one_rounding() -> None:
    layout = layout_of(SMALL)
    base = random_state(layout.manifest, 0)
    total = summed(layout, base, [random_state(layout.manifest, seed) for seed in (1, 2, 3)])
    out, state = moved(total, model_bytes(layout.manifest, base), optimizer())
    new, mean_V = views(layout.manifest, out, writable=False), whole_mean(total)
    for entry in layout.means:
        mean = mean_V[entry.index : entry.index + entry.num_values].view(entry.spec.shape)
        wanted = (base[entry.spec.name].double() + mean).to(base[entry.spec.name].dtype)
        assert torch.equal(new[entry.spec.name], wanted), entry.spec.name
    assert (state.num_steps, dict(state.tensors)) == (1, {})


def test_one_site_that_did_not_train_changes_no_byte() -> None:
    layout = layout_of(EVERY_DTYPE)
    base = random_state(layout.manifest, 0)
    data = model_bytes(layout.manifest, base)
    out, _ = moved(summed(layout, base, [base]), data, optimizer())
    assert out == data


@pytest.mark.parametrize("buffers", ["mean", "local", "first"])
def test_buffers_by_policy(buffers: Buffers) -> None:
    layout = layout_of(SMALL, buffers=buffers)
    base = random_state(layout.manifest, 0)
    trained = [random_state(layout.manifest, seed) for seed in (1, 2, 3)]
    out, _ = moved(summed(layout, base, trained), model_bytes(layout.manifest, base), optimizer(lr=0.5))
    new = views(layout.manifest, out, writable=False)
    name, counter, mask = "norm.running_mean", "norm.num_batches_tracked", "mask"
    if buffers == "mean":  # untouched by the optimizer's lr
        wanted = sum(state[name].double() * weight for state, weight in zip(trained, WEIGHTS, strict=True)) / 20
        assert (new[name] - wanted).abs().max() < 1e-6
        assert new[counter] == max(state[counter] for state in trained)
        assert torch.equal(new[mask], trained[0][mask] | trained[1][mask] | trained[2][mask])
    else:
        source = base if buffers == "local" else trained[0]
        for buffer in (name, counter, mask):
            assert torch.equal(new[buffer], source[buffer])
    assert new[counter].dtype is torch.int64


def test_a_batch_norm_model_loads_strictly() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 5)
            self.norm = nn.BatchNorm1d(5)

    torch.manual_seed(0)
    base, sites = Net(), [Net() for _ in range(3)]
    for number, site in enumerate(sites, start=2):
        site.load_state_dict(base.state_dict())
        for _ in range(number):
            site.norm(torch.randn(4, 5))
    manifest = manifest_of(base)
    layout = layout_of([(spec.name, spec.dtype, spec.shape, spec.role) for spec in manifest])
    tensors = [{name: tensor.detach() for name, (tensor, _) in state_of(net).items()} for net in (base, *sites)]
    out, _ = moved(summed(layout, tensors[0], tensors[1:]), model_bytes(manifest, tensors[0]), optimizer())
    load_state(manifest, out, base)
    assert base.norm.num_batches_tracked is not None
    assert (base.norm.num_batches_tracked.item(), base.norm.num_batches_tracked.dtype) == (4, torch.int64)


@pytest.mark.parametrize("kind", ["adam", "adamw", "adagrad", "sgd"])
def test_blocks_of_a_model_equal_torch_optim_on_the_whole_vector(kind: str) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if kind == "sgd" else {}
    adam = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3}
    references: dict[str, tuple[Any, dict[str, Any]]] = {
        "adam": (torch.optim.Adam, adam),
        "adamw": (torch.optim.AdamW, adam),
        "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-3}),
        "sgd": (torch.optim.SGD, {"lr": 1.0, **options}),
    }
    layout = layout_of([entry for entry in SMALL if entry[1] == "float32" and entry[3] == "parameter"])
    manifest, by = layout.manifest, optimizer(kind, **options)
    data, state = model_bytes(manifest, random_state(manifest, 0)), by.init(layout)
    whole = torch.frombuffer(bytearray(data), dtype=torch.float32)
    make, torch_options = references[kind]
    reference = make([whole], **torch_options)
    for round in range(4):
        base = {name: tensor.clone() for name, tensor in views(manifest, data, writable=True).items()}
        trained = [{name: tensor + noise[name] * 0.1 for name, tensor in base.items()} for noise in (
            random_state(manifest, 10 * round + seed) for seed in (1, 2, 3))]  # fmt: skip
        total = summed(layout, base, trained)
        whole.grad = -whole_mean(total).float()
        reference.step()
        data, state = moved(total, data, by, state)
        assert torch.equal(torch.frombuffer(data, dtype=torch.int32), whole.view(torch.int32))
    assert state.num_steps == 4


def test_widths_keep_their_own_precision() -> None:
    layout = layout_of(EVERY_DTYPE)
    base = random_state(layout.manifest, 0)
    total = summed(layout, base, [random_state(layout.manifest, seed) for seed in (1, 2, 3)])
    _, state = moved(total, model_bytes(layout.manifest, base), optimizer("adam"))
    num_wide = 15 + 30
    assert state.num_parameters == {"float64": num_wide, "float32": 15 * 7 + 30 + 30}
    assert {name: (tensor.dtype, tensor.numel()) for name, tensor in state.tensors.items()} == {
        f"{precision}.{name}": (getattr(torch, precision), state.num_parameters[precision])
        for precision in ("float64", "float32")
        for name in ("exp_avg", "exp_avg_sq")
    }


def test_nothing_it_was_given_is_changed() -> None:
    layout = layout_of(SMALL)
    base = random_state(layout.manifest, 0)
    data, by = model_bytes(layout.manifest, base), optimizer("adam")
    total = summed(layout, base, [random_state(layout.manifest, seed) for seed in (1, 2, 3)])
    once, first = moved(total, data, by)
    kept = {name: tensor.clone() for name, tensor in first.tensors.items()}
    twice, second = moved(total, once, by, first)
    again, third = moved(total, once, by, first)
    assert data == model_bytes(layout.manifest, base)
    assert twice == again
    assert all(torch.equal(second.tensors[name], third.tensors[name]) for name in kept)
    assert all(torch.equal(first.tensors[name], kept[name]) for name in kept)
    assert (first.num_steps, second.num_steps) == (1, 2)


def test_a_value_beyond_the_dtype_is_no_model() -> None:
    layout = layout_of([("half", "float16", (3,), "parameter")])
    base = {"half": torch.full((3,), 65000.0, dtype=torch.float16)}
    total = summed(layout, base, [{"half": torch.full((3,), 65504.0, dtype=torch.float16)}])
    with pytest.raises(BadUpdate, match='tensor "half" of the next model') as caught:
        moved(total, model_bytes(layout.manifest, base), optimizer(lr=2.0))
    assert float(caught.value.bound) == 65504


def test_buffers_of_another_length_or_state_of_another_model() -> None:
    layout, other = layout_of(SMALL), layout_of(SMALL[:2])
    base = random_state(layout.manifest, 0)
    total, data, by = summed(layout, base, [base]), model_bytes(layout.manifest, base), optimizer()
    with pytest.raises(ValueError, match="must belong to the manifest"):
        moved(total, data[:-1], by)
    with pytest.raises(ValueError, match="must belong to the manifest"):
        moved(total, data, by, by.init(other))


def test_without_updates_there_is_no_next_model() -> None:
    layout = layout_of(SMALL)
    total = RoundSum(layout, num_sites=1, max_weight=1, bound=BOUND)
    with pytest.raises(ValueError, match="no update was folded"):
        moved(total, bytearray(layout.manifest.num_bytes), optimizer())
