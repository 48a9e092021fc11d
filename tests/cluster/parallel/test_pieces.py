"""The parts that need no other process: shares of a batch, blocks, plans, stages, models without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples.parallel_models import Encoder, Llama, Spread
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from atoll.cluster.app import build_app
from atoll.cluster.parallel.blocks import blocks_of
from atoll.cluster.parallel.pipeline import split_points
from atoll.cluster.parallel.shares import bounds, num_examples, part
from atoll.cluster.parallel.skeleton import build_skeleton
from atoll.cluster.parallel.steps import pieces
from atoll.cluster.parallel.tensor_plan import _automatic
from atoll.wire.errors import AppFailed
from atoll.wire.parallel_section import ParallelSection


@pytest.mark.parametrize(("count", "num_parts"), [(7, 3), (2, 4), (8, 4), (1, 1)])
def test_parts_are_as_equal_as_can_be_and_leave_nothing_out(count: int, num_parts: int) -> None:
    found = [bounds(count, num_parts, index) for index in range(num_parts)]
    assert [i for start, stop in found for i in range(start, stop)] == list(range(count))
    lengths = [stop - start for start, stop in found]
    assert max(lengths) - min(lengths) <= 1


def test_a_batch_is_divided_in_all_its_parts() -> None:
    batch = {"words": torch.arange(10).view(5, 2), "more": (torch.arange(5), 3)}
    assert num_examples(batch) == 5
    own = part(batch, 1, 3)
    assert torch.equal(own["words"], torch.tensor([[2, 3], [4, 5]]))
    assert torch.equal(own["more"][0], torch.tensor([1, 2]))
    assert own["more"][1] == 3


@pytest.mark.parametrize(
    "batch", [(torch.zeros(3), torch.zeros(4)), (torch.zeros(()),), (torch.zeros(3), ["a", "b", "c"])]
)
def test_a_batch_that_cannot_be_divided_says_so(batch: Any) -> None:
    with pytest.raises(AppFailed, match=r"\[parallel\]"):
        num_examples(batch)


def test_a_share_without_examples_weighs_nothing() -> None:
    app = build_app(Spread, {}, {})
    piece = pieces(app, (torch.zeros(2, 6), torch.zeros(2)), 3)
    assert [(len(piece(i).batch[0]), piece(i).weight) for i in range(3)] == [(1, 1), (1, 1), (1, 0)]


def test_blocks_are_the_members_of_the_outermost_lists() -> None:
    assert list(blocks_of(Llama(3))) == ["layers.0", "layers.1", "layers.2"]
    assert list(blocks_of(Encoder(2))) == ["encoder.layers.0", "encoder.layers.1"]
    mlp = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert list(blocks_of(mlp)) == ["0", "2"]
    assert blocks_of(nn.Linear(2, 2)) == {}


def test_the_automatic_plan_divides_whole_heads() -> None:
    model = Llama(1)
    plan = _automatic(model, 3)
    assert {name for name, style in plan.items() if isinstance(style, ColwiseParallel)} == {
        f"layers.0.{name}" for name in ("w1", "w3", "attention.wq", "attention.wk", "attention.wv")
    }
    assert {name for name, style in plan.items() if isinstance(style, RowwiseParallel)} == {
        "layers.0.w2",
        "layers.0.attention.wo",
    }
    assert vars(model.get_submodule("layers.0.attention"))["n_heads"] == 4
    with pytest.raises(AppFailed, match="n_heads = 12 is no multiple of tp = 5"):
        _automatic(Llama(1), 5)


def test_stages_are_balanced_by_parameters() -> None:
    section = ParallelSection.model_validate({"pp": 2})
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert split_points(model, section, 2) == ("1",)
    with pytest.raises(AppFailed, match="the model has 4 blocks, and 5 stages want one each"):
        split_points(model, section, 5)
    named = ParallelSection.model_validate({"pp": 2, "pipeline": {"split_points": ["3"]}})
    assert split_points(model, named, 2) == ("3",)
    with pytest.raises(AppFailed, match="wanted 2 modules of the model"):
        split_points(model, named, 3)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("angles", torch.arange(2.0), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight


class Attribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.ones(2)


class Reading(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.largest = float(self.weight.max())


@pytest.mark.parametrize(
    ("model", "is_meta"), [(Rotary, False), (Tied, False), (Attribute, False), (Reading, False), (nn.Bilinear, True)]
)
def test_a_model_is_made_without_values_where_a_version_has_them_all(model: type[nn.Module], is_meta: bool) -> None:
    class Other(Spread):
        def model(self) -> nn.Module:
            return model(2, 2, 2) if model is nn.Bilinear else model()

    made = build_skeleton(build_app(Other, {}, {}), 3)
    assert {tensor.is_meta for tensor in made.parameters()} == {is_meta}
    assert not any(isinstance(value, Tensor) and value.is_meta for value in vars(made).values())
    assert not any(
        tensor.is_meta for tensor in build_skeleton(build_app(Other, {}, {}), 3, needs_values=True).parameters()
    )
