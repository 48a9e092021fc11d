"""A site's personal model in the one module that a worker holds: trained after the global one, judged after it.

It is kept as tensors among the site's state, so nothing of it is in what the site sends, and a round that is done again
trains it again from where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.aggregation.rules.personal import Personal
from atoll.cluster.batches import Work
from atoll.cluster.seeds import training_seed
from atoll.cluster.site_state import Kept
from atoll.wire.names import PERSONAL
from atoll.wire.tensors import state_of

_PREFIX = "personal/"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonalWork:
    """What a site does for its personal model: of which kind it is, and how long it is trained."""

    kind: Personal
    work: Work


def personal_seed(job_seed: int, site: str, round: int) -> int:
    """Seed of everything random in the training of a site's personal model; no site has such a name."""
    return training_seed(job_seed, f"{site}/personal", round)


def put(model: nn.Module, kept: Kept) -> bool:
    """Writes the personal model over the tensors of `model`; False where the site has none yet, and nothing is done."""
    own = {name.removeprefix(_PREFIX): value for name, value in kept.tensors.items() if name.startswith(_PREFIX)}
    with torch.no_grad():
        for name, (tensor, _) in state_of(model).items():
            if name in own:
                tensor.copy_(own[name])
    return bool(own)


def taken(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model` as the site keeps its personal one."""
    return {_PREFIX + name: tensor.detach() for name, (tensor, _) in state_of(model).items()}


def named(metrics: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Metric sums of a personal model, under names of its own."""
    return {PERSONAL + name: sums for name, sums in metrics.items()}
