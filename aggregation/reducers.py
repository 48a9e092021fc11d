"""How the updates of a round combine: the protocol of reducers, and the weighted mean.

A reducer makes a `Reduction` for each round. One that needs "sum" takes each update in and forgets it, so memory does
not grow with the number of sites. One that needs "all" keeps the payloads that it was given (mapped files, which the
server leaves in place until the version is made) and works on them block by block when asked.
"""

from __future__ import annotations

from typing import Literal, Protocol, Self, runtime_checkable

from torch import Tensor

from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.round_sum import RoundSum
from atoll.wire.job import Strict
from atoll.wire.tensors import Buffer


class Reduction(Protocol):
    """What one round makes of its updates. The order in which they come changes no bit of the result."""

    @property
    def layout(self) -> UpdateLayout: ...

    @property
    def num_updates(self) -> int: ...

    @property
    def sum_weights(self) -> int: ...

    def check(self, payload: Buffer, weight: int, *, site: str = "", round: int = 0, crc32: int | None = None) -> None:
        """Returns where the update can be folded; changes nothing. Raises BadUpdate."""
        ...

    def fold(self, site: str, payload: Buffer, weight: int) -> None:
        """Takes in an update that passed `check`. Raises ValueError for a site that is in already."""
        ...

    def merge(self, other: Self) -> None:
        """Takes in all updates of `other`, which has no site in common."""
        ...

    def difference(self, index: int, out_P: Tensor) -> None:
        """Writes values from `index` on of the combined difference (float64). Raises ValueError where empty."""
        ...

    def raw(self, name: str) -> Tensor:
        """The combined bytes of a tensor that travels as values. Raises ValueError where empty."""
        ...


@runtime_checkable
class Mergeable(Protocol):
    """A reduction of a reducer that needs "sum": what a region has of it travels up a tree as a payload of its own."""

    @property
    def partial_bytes(self) -> int: ...

    def write_partial(self, out: Buffer) -> None:
        """Writes all that was taken in so far into `out`."""
        ...

    def check_partial(self, payload: Buffer, weight: int, *, num_sites: int, site: str = "", round: int = 0) -> None:
        """Returns where the part of a region of up to `num_sites` sites can be added. Raises BadUpdate."""
        ...

    def merge_partial(self, region: str, payload: Buffer) -> None:
        """Takes in a part that passed `check_partial`, as if the region's sites were here."""
        ...


class Reducer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Literal["sum", "all"]: ...

    def init(self, layout: UpdateLayout, *, num_sites: int, max_weight: int, bound: float) -> Reduction:
        """An empty reduction for a round of at most `num_sites` updates (see RoundSum for the arguments)."""
        ...


class Mean:
    """The mean of differences, weighted by examples, summed exactly.

    x = sum_i w_i x_i / sum_i w_i (McMahan et al. 2016, arXiv:1602.05629, algorithm 1).
    Breakdown point: 0; one site can move it anywhere within the bound. Memory: 2 float32 models.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name: str = "mean"
        self.needs: Literal["sum", "all"] = "sum"

    def init(self, layout: UpdateLayout, *, num_sites: int, max_weight: int, bound: float) -> Reduction:
        return RoundSum(layout, num_sites=num_sites, max_weight=max_weight, bound=bound)
