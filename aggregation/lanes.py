"""Lanes: what a local rule has travel beside the model, as tensors of the run's manifest with the role "control".

A version carries its lanes and an update their differences, so whatever sums, encodes, stores or sends a model does so
with them, and each of them is a function of the same journal. The server optimizer moves none of them.

* A **control** lane has a tensor for each parameter that is averaged, named "LANE/PARAMETER". Sites keep a value each,
  and the server's is their mean, weighted as the updates are, over all members: c = sum_i w_i c_i / sum_i w_i.
* A **factor** lane is one number, named "LANE". Its mean in a round multiplies the mean difference of the parameters.

Invariant: the lanes of a manifest follow from its model, the rule and the patterns of `local`, so that researcher,
server and sites need not tell each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

from atoll.aggregation.codecs.casts import SUMMABLE
from atoll.aggregation.layout import MeanEntry, UpdateLayout, matching
from atoll.wire.manifest import Entry, Manifest, TensorSpec

FACTOR_UNIT: Final = 2.0**-20
"""What travels of a factor of 1: a billion stays below the usual bound of sums, 1024, and float64 keeps every digit."""

_SEPARATOR = "/"  # torch allows it in no name of a module
_WIDENED = {"float64": "float64", "complex128": "complex128", "complex64": "complex64", "complex32": "complex64"}


@dataclass(frozen=True, slots=True)
class Lane:
    name: str  # the first part of its tensors' names: printable, without "/"
    kind: Literal["control", "factor"]

    def tensor(self, parameter: str) -> str:
        """Name of the tensor of a control lane that belongs to a parameter."""
        return f"{self.name}{_SEPARATOR}{parameter}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What part of all members the sites of a round are, by weight. Members are all who ever joined the run.

    The mean over all members of values c_i, of which those of the cohort move by x_i in a round, becomes
    `before` c + `cohort` (mean of x_i over the cohort): who joins in between brings c_i = 0.
    """

    cohort: float = 1.0  # |S| / N
    before: float = 1.0  # the members at the version before over those of now: below 1 where somebody has joined


ALL: Final = Share()


def run_manifest(model: Manifest, lanes: Sequence[Lane], local: Sequence[str] = ()) -> Manifest:
    """The manifest of a run: the model's tensors, then what its rule has travel beside them.

    Args:
        local: patterns of names of tensors that stay at their site, and have nothing beside them.

    Raises:
        ConfigError: a pattern matches no tensor.
        BadManifest: there are too many tensors, or a name becomes too long.
    """
    if not lanes:
        return model
    at_site = matching(model, local)
    entries: list[Entry] = [(spec.name, spec.dtype, spec.shape, spec.role) for spec in model]
    for lane in lanes:
        if lane.kind == "factor":
            entries.append((lane.name, "float64", (), "control"))
        else:
            averaged = (spec for spec in model if is_averaged(spec) and spec.name not in at_site)
            for spec in averaged:
                entries.append((lane.tensor(spec.name), _WIDENED.get(spec.dtype, "float32"), spec.shape, "control"))
    return Manifest.build(entries, model.frozen)


def is_averaged(spec: TensorSpec) -> bool:
    """Whether a tensor is a parameter whose differences are summed, where it travels."""
    return spec.role == "parameter" and spec.dtype in SUMMABLE


def lane_of(spec: TensorSpec, lanes: Sequence[Lane]) -> Lane:
    """The lane that a control belongs to.

    Raises:
        ValueError: none of these.
    """
    name = spec.name.partition(_SEPARATOR)[0]
    for lane in lanes:
        if lane.name == name:
            return lane
    raise ValueError(f'control "{spec.name}" belongs to none of the lanes {", ".join(lane.name for lane in lanes)}')


def factors_in(layout: UpdateLayout, lanes: Sequence[Lane]) -> tuple[MeanEntry, ...]:
    """The factors that updates of a layout hold, in their order; each is one value."""
    controls = (entry for entry in layout.means if entry.spec.role == "control")
    return tuple(entry for entry in controls if lane_of(entry.spec, lanes).kind == "factor")


def lane_values(tensors: Mapping[str, Tensor], lanes: Sequence[Lane]) -> dict[str, dict[str, Tensor]]:
    """The control lanes among the tensors of a version: by lane, then by parameter."""
    found: dict[str, dict[str, Tensor]] = {lane.name: {} for lane in lanes if lane.kind == "control"}
    for name, tensor in tensors.items():
        lane, separator, parameter = name.partition(_SEPARATOR)
        if separator and lane in found:
            found[lane][parameter] = tensor
    return found
