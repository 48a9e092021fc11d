"""Models mixed by weights, against the same sums written by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from atoll.aggregation.codecs.casts import Native
from atoll.aggregation.layout import Buffers, UpdateLayout, update_layout
from atoll.aggregation.mixing import Share, distance, mix
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import views, write_state

MANIFEST = Manifest.build(
    [
        ("wide", "float64", (5,), "parameter"),
        ("weight", "float32", (300, 130), "parameter"),
        ("half", "bfloat16", (40,), "parameter"),
        ("mean", "float32", (4,), "buffer"),
        ("steps", "int64", (2,), "buffer"),
        ("seen", "bool", (3,), "buffer"),
    ]
)
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def layout(buffers: Buffers = "mean") -> UpdateLayout:
    return update_layout(MANIFEST, Native(Native.Options()), buffers)


def model(seed: int) -> tuple[dict[str, Tensor], bytearray]:
    made = torch.Generator().manual_seed(seed)
    tensors = {
        "wide": torch.randn(5, generator=made, dtype=torch.float64),
        "weight": torch.randn(300, 130, generator=made),
        "half": torch.randn(40, generator=made).bfloat16(),
        "mean": torch.randn(4, generator=made),
        "steps": torch.randint(0, 100, (2,), generator=made),
        "seen": torch.randint(0, 2, (3,), generator=made).bool(),
    }
    data = bytearray(MANIFEST.num_bytes)
    write_state(MANIFEST, tensors, data)
    return tensors, data


MODELS = {site: model(seed) for seed, site in enumerate(WEIGHTS)}


def shares(*order: str) -> list[Share]:
    return [Share(site=site, weight=WEIGHTS[site], model=MODELS[site][1]) for site in order]


def mixed(of: UpdateLayout, found: list[Share]) -> bytearray:
    out = bytearray(MANIFEST.num_bytes)
    mix(of, found, out)
    return out


@pytest.mark.parametrize("buffers", ["mean", "first"])
def test_mixing_is_the_weighted_sum(buffers: Buffers) -> None:
    found = views(MANIFEST, mixed(layout(buffers), shares("a", "b", "c")), writable=False)
    for name in ("wide", "weight", "half", *(["mean"] if buffers == "mean" else [])):
        wanted = sum(weight * MODELS[site][0][name].double() for site, weight in WEIGHTS.items())
        assert isinstance(wanted, Tensor)
        assert torch.equal(found[name], wanted.to(found[name].dtype))
    of = [MODELS[site][0] for site in WEIGHTS]
    if buffers == "first":
        assert all(torch.equal(found[name], of[0][name]) for name in ("mean", "steps", "seen"))
    else:
        assert torch.equal(found["steps"], torch.stack([one["steps"] for one in of]).amax(0))
        assert torch.equal(found["seen"], of[0]["seen"] | of[1]["seen"] | of[2]["seen"])


def test_the_order_in_which_models_come_changes_no_byte() -> None:
    assert len({bytes(mixed(layout(), shares(*order))) for order in itertools.permutations("abc")}) == 1


def test_a_model_that_is_not_finite_is_refused_and_its_site_named() -> None:
    bad = bytearray(MODELS["b"][1])
    views(MANIFEST, bad, writable=True)["weight"][7, 3] = float("nan")
    found = [*shares("a", "c"), Share(site="b", weight=0.3, model=bad)]
    with pytest.raises(BadUpdate, match=r'"weight" of the model of b') as caught:
        mixed(layout(), found)
    assert (caught.value.site, caught.value.field) == ("b", "weight")


def test_what_stays_at_a_site_is_never_mixed() -> None:
    with pytest.raises(ValueError, match="travel whole"):
        mixed(layout("local"), shares("a", "b"))


def test_the_distance_of_two_models_is_over_all_that_is_averaged() -> None:
    one, two = MODELS["a"], MODELS["b"]
    names = ("wide", "weight", "half", "mean")
    wanted = sum(float((one[0][name].double() - two[0][name].double()).square().sum()) for name in names)
    assert distance(layout(), one[1], two[1]) == pytest.approx(wanted, rel=1e-12)
    assert distance(layout(), one[1], one[1]) == 0.0
