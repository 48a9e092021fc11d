"""What a reducer is: how the updates of a round combine.

A reducer makes a `Reduction` for each round. One that needs "sum" takes each update in and forgets it, so memory does
not grow with the number of sites. One that needs "all" keeps the updates in files and works on them block by block when
asked (`spooled.py`), so that only the disk holds as many models as there are sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, Protocol, Self, runtime_checkable

from torch import Tensor

from atoll.aggregation.layout import UpdateLayout
from atoll.wire.tensors import Buffer

Metrics = Mapping[str, tuple[float, float]]  # name -> (sum, count)
NO_METRICS: Final[Metrics] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTerms:
    """What is known of a round before its first update comes."""

    num_sites: int  # updates that there are at most
    max_weight: int  # of each
    bound: float  # largest magnitude of a value
    seed: int = 0  # of what a reducer draws by lot; another one each round
    spool: Path | None = None  # folder for updates that are kept; None keeps them in memory


class Reduction(Protocol):
    """What one round makes of its updates. The order in which they come changes no bit of the result."""

    @property
    def layout(self) -> UpdateLayout: ...

    @property
    def num_updates(self) -> int: ...

    @property
    def sum_weights(self) -> int: ...

    def check(
        self,
        payload: Buffer,
        weight: int,
        *,
        site: str = "",
        round: int = 0,
        crc32: int | None = None,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        """Returns where the update, with the metrics that came with it, can be folded; changes nothing.

        Raises:
            BadUpdate: names tensor or metric, value and bound.
        """
        ...

    def fold(
        self, site: str, payload: Buffer, weight: int, metrics: Metrics = NO_METRICS, *, scale: float = 1.0
    ) -> None:
        """Takes in an update that passed `check`.

        Args:
            metrics: that came with it.
            scale: of its values, from 0 to 1, where it is stale; its weight stays. Always 1 for one that needs "all".

        Raises:
            ValueError: the site is in already.
            DiskFull: there is no room to keep it.
        """
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

    @property
    def fewest_updates(self) -> int:
        """Updates without which it promises nothing; a job whose rounds may close with fewer is refused."""
        ...

    def mixed(self, num_updates: int) -> int:
        """Updates that are mixed, at least, in every value of what it makes of so many: what sites are promised."""
        ...

    def init(self, layout: UpdateLayout, terms: RoundTerms) -> Reduction:
        """An empty reduction for one round."""
        ...
