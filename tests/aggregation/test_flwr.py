"""Every reducer and server optimizer beside the same one of flwr 1.42: the same arrays and weights, over several rounds.

Both sides start from one model. In each round the sites of each side move the model that this side has by the same
steps, so a difference of one round stays and grows. Where the two compute different things, the cause is in
`DIFFERENCES`, and flwr is run with that cause taken away: then it too gives the same model.

flwr wants an older typer than Atoll, so `make install` puts it into a folder of its own, which only this file reads.
"""

# pyright: reportMissingImports=false
# flwr is in a folder of its own, which only this file puts on its path.
from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.updates import encoded
from numpy.typing import NDArray

from atoll.aggregation import parts
from atoll.aggregation.layout import update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.strategy import resolve
from atoll.wire.job import parse_job
from atoll.wire.manifest import Entry, Manifest
from atoll.wire.tensors import views, write_state

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
sys.path.append(str(Path(sys.prefix) / "flwr"))  # made by `make install`

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy.multikrum import select_multikrum
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # without them no message can be made

Model = Mapping[str, NDArray[Any]]

NUM_ROUNDS = 5
NUM_SITES = 11  # bulyan with two faulty sites needs no fewer
WEIGHTS = (3, 50, 7, 11, 2, 30, 8, 90, 41, 17, 64)
LOSSES = (0.5, 1.5, 0.25, 2.0, 1.0, 0.75, 3.0, 0.1, 0.9, 1.25, 0.6)
SHAPES = {"conv.weight": (6, 5, 3), "conv.bias": (6,), "head.weight": (10, 30)}
TOLERANCE = {"float32": 1e-6, "float64": 1e-9}

DIFFERENCES = {
    "adam": "flwr takes the bias correction of round t + 1 in round t, and adds its epsilon (tau) to the square root of "
    "the second moment before that is corrected; torch.optim, as Kingma and Ba 2014, corrects it first",
    "multi_krum": "flwr weights the chosen updates by examples, so that an attacker who is chosen can claim many; the "
    "paper and Atoll take their plain mean",
    "bulyan": "flwr chooses all N - 2 f updates by the scores of one round of Krum; the paper and Atoll repeat Krum on "
    "those that are left",
}
ABSENT = {  # kinds that flwr 1.42 has not, and where their formula is tested
    "norm_bound": "test_formulas.py",
    "geometric_median": "test_formulas.py",
    "centered_clipping": "test_formulas.py",
    "bucketing": "test_formulas.py",
    "fltrust": "test_formulas.py",
    "adamw": "test_next_model.py",
    "feddyn": "test_feddyn.py",
    "append": "test_append.py",
}


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """flwr collects garbage at each array that it unpacks: half a second each time beside all that torch holds."""
    gc.freeze()
    yield
    gc.unfreeze()


def random_model(seed: int, dtype: str) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def steps(round_: int, dtype: str) -> list[Model]:
    """What each site adds to the model that it got, in one round; two sites go far astray."""
    made: list[Model] = []
    for number in range(NUM_SITES):
        scale = 2.0 if number in (4, 9) else 0.1
        step = random_model(1000 * round_ + number, dtype)
        common = random_model(1000 * round_ + 999, dtype)
        made.append({name: (0.05 * common[name] + scale * step[name]).astype(dtype) for name in SHAPES})
    return made


# --- Atoll ----------------------------------------------------------------------------------------------------------


def atoll_models(section: Mapping[str, Any], dtype: str, weights: Sequence[int]) -> list[Model]:
    """The model after each round, by the objects that a server and its sites use."""
    table = {"job": {"name": "x", "app": "x", "rounds": NUM_ROUNDS}, "strategy": dict(section)}
    table["strategy"]["schedule"] = {"kind": "rounds", "min": NUM_SITES}
    strategy = resolve(parse_job(table))
    entries: list[Entry] = [(name, dtype, shape, "parameter") for name, shape in SHAPES.items()]
    manifest = Manifest.build(entries)
    layout = update_layout(manifest, strategy.codec, strategy.buffers)
    data = bytearray(manifest.num_bytes)
    write_state(manifest, {name: torch.from_numpy(value) for name, value in random_model(0, dtype).items()}, data)
    state, models = strategy.optimizer.init(layout), list[Model]()
    for round_ in range(1, NUM_ROUNDS + 1):
        base = {name: tensor.clone() for name, tensor in views(manifest, data, writable=True).items()}
        terms = RoundTerms(num_sites=NUM_SITES, max_weight=max(weights), bound=strategy.bound)
        reduction = strategy.reducer.init(layout, terms)
        for number, step in enumerate(steps(round_, dtype)):
            trained = {name: base[name] + torch.from_numpy(step[name]) for name in base}
            payload, metrics = encoded(layout, base, trained), {"loss": (LOSSES[number], 1.0)}
            reduction.check(payload, weights[number], metrics=metrics)
            reduction.fold(f"site-{number:02d}", payload, weights[number], metrics)
        out = bytearray(manifest.num_bytes)
        state = next_model(reduction, optimizer=strategy.optimizer, state=state, base=data, out=out, manifest=manifest)
        data = out
        models.append({name: value.numpy() for name, value in views(manifest, out, writable=True).items()})
    return models


# --- flwr -----------------------------------------------------------------------------------------------------------


class Nodes:
    """As much of a flwr grid as a strategy looks at."""

    def get_node_ids(self) -> list[int]:
        return list(range(NUM_SITES))


Before = Callable[[Any, int], int]  # may set up the strategy for a round; gives the round to name to it


def flwr_models(
    strategy: Any, dtype: str, weights: Sequence[int], before: Before = lambda strategy, round_: round_
) -> list[Model]:
    """The model after each round, by a strategy of flwr's: through its messages, as its server would."""
    model, models = random_model(0, dtype), list[Model]()
    for round_ in range(1, NUM_ROUNDS + 1):
        named = before(strategy, round_)
        arrays = ArrayRecord({name: Array(value) for name, value in model.items()})
        asked = strategy.configure_train(named, arrays, ConfigRecord(), Nodes())
        by_node = sorted(asked, key=lambda message: message.metadata.dst_node_id)
        replies = []
        for number, (message, step) in enumerate(zip(by_node, steps(round_, dtype), strict=True)):
            trained = {name: Array(model[name] + step[name]) for name in model}
            metrics = MetricRecord({"num-examples": weights[number], "train_loss": LOSSES[number]})
            content = RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics})
            replies.append(Message(content, reply_to=message))
        made, _ = strategy.aggregate_train(named, replies)
        model = {name: array.numpy().astype(dtype) for name, array in made.items()}  # q-FedAvg's come as float64
        models.append(model)
    return models


# --- where they compute different things ----------------------------------------------------------------------------


def corrected_as_torch(strategy: Any, round_: int) -> int:
    """FedAdam with the correction of this round, and with tau where torch has eps."""
    strategy.tau = 1e-3 * math.sqrt(1 - strategy.beta_2**round_)
    return round_ - 1  # of which flwr takes the next


def repeated_krum(contents: list[RecordDict], num_malicious: int, num_chosen: int) -> list[RecordDict]:
    """The first step of Bulyan as its paper has it: Krum again and again on those that are left."""
    left, chosen = list(contents), list[RecordDict]()
    while len(chosen) < num_chosen:
        [best] = select_multikrum(left, num_malicious, 1)
        chosen.append(best)
        left = [content for content in left if content is not best]
    return chosen


ADAM = {"lr": 0.02, "betas": [0.9, 0.99], "eps": 1e-3}
FLWR_ADAM = {"eta": 0.02, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
EQUAL = (1,) * NUM_SITES


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind on both sides. `plain` is flwr's own way where that differs, with the cause in `DIFFERENCES`."""

    part: str
    kind: str
    options: Mapping[str, Any]
    made: Callable[[], Any]  # flwr's
    weights: Sequence[int] = WEIGHTS
    before: Before = lambda strategy, round_: round_
    plain: Callable[[], Any] | None = None

    @property
    def section(self) -> dict[str, Any]:
        return {self.part: {"kind": self.kind, **self.options}}


CASES = (
    Case(part="reducer", kind="mean", options={}, made=flower.FedAvg),
    Case(part="reducer", kind="median", options={}, made=flower.FedMedian),
    Case(
        part="reducer",
        kind="trimmed_mean",
        options={"fraction": 0.2},
        made=lambda: flower.FedTrimmedAvg(beta=0.2),
    ),
    Case(
        part="reducer",
        kind="krum",
        options={"faulty": 2},
        made=lambda: flower.Krum(num_malicious_nodes=2),
    ),
    Case(
        part="reducer",
        kind="multi_krum",
        options={"faulty": 2, "select": 5},
        made=lambda: flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=5),
        weights=EQUAL,
        plain=lambda: flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=5),
    ),
    Case(
        part="reducer",
        kind="bulyan",
        options={"faulty": 2},
        made=lambda: flower.Bulyan(num_malicious_nodes=2, selection_rule=repeated_krum),
        plain=lambda: flower.Bulyan(num_malicious_nodes=2),
    ),
    Case(
        part="reducer",
        kind="qfedavg",
        options={"q": 0.7, "lr": 1.0},
        made=lambda: flower.QFedAvg(client_learning_rate=1.0, q=0.7),
    ),
    Case(
        part="optimizer",
        kind="sgd",
        options={"lr": 0.5},
        made=lambda: flower.FedAvgM(server_learning_rate=0.5),
    ),
    Case(
        part="optimizer",
        kind="sgd",
        options={"lr": 0.5, "momentum": 0.9},
        made=lambda: flower.FedAvgM(server_learning_rate=0.5, server_momentum=0.9),
    ),
    Case(
        part="optimizer",
        kind="adagrad",
        options={"lr": 0.02, "eps": 1e-3},
        made=lambda: flower.FedAdagrad(eta=0.02, tau=1e-3),
    ),
    Case(part="optimizer", kind="yogi", options=ADAM, made=lambda: flower.FedYogi(**FLWR_ADAM)),
    Case(
        part="optimizer",
        kind="adam",
        options=ADAM,
        made=lambda: flower.FedAdam(**FLWR_ADAM),
        before=corrected_as_torch,
        plain=lambda: flower.FedAdam(**FLWR_ADAM),
    ),
)


def apart(ours: Sequence[Model], theirs: Sequence[Model]) -> float:
    """The largest difference of a value in any round."""
    return max(
        float(np.abs(one[name] - other[name]).max()) for one, other in zip(ours, theirs, strict=True) for name in SHAPES
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{len(case.options)}")
def test_the_models_of_every_round_are_flwrs(case: Case, dtype: str) -> None:
    ours = atoll_models(case.section, dtype, case.weights)
    theirs = flwr_models(case.made(), dtype, case.weights, case.before)
    assert apart(ours, theirs) <= TOLERANCE[dtype]
    assert apart(ours[1:], ours[:-1]) > 1e-3  # the model moves at all


@pytest.mark.parametrize("case", [case for case in CASES if case.plain], ids=lambda case: case.kind)
def test_a_difference_that_is_explained_is_there(case: Case) -> None:
    assert case.plain is not None
    ours = atoll_models(case.section, "float64", WEIGHTS)
    assert apart(ours, flwr_models(case.plain(), "float64", WEIGHTS)) > 1e-4
    assert case.kind in DIFFERENCES


def test_every_kind_is_compared_or_flwr_has_none_like_it() -> None:
    """A new reducer or optimizer gets a case here, or a line in ABSENT that says where its formula is tested."""
    compared = {case.kind for case in CASES}
    assert compared | ABSENT.keys() == {*parts.BUILT_IN["reducer"], *parts.BUILT_IN["optimizer"]}
    assert not compared & ABSENT.keys()
    assert {case.kind for case in CASES if case.plain} == DIFFERENCES.keys()


def test_the_differences_are_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    section = page.partition("## Beside Flower")[2].partition("\n## ")[0]
    assert all(f"`{kind}`" in section for kind in DIFFERENCES)
