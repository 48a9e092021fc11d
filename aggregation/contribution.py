"""What a site makes of its update before it is masked: what a reducer does to each update, and the server cannot any more.

A sum of masked updates can stand for a reducer where all that it does to one update depends on that update alone. The
site then does it, and the server is left with an addition. It cannot look whether the site did: masks hide that too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.reducers.bucketing import Bucketing
from atoll.aggregation.reducers.central import CenteredClipping
from atoll.aggregation.reducers.mean import Mean, NormBound, norm_of
from atoll.wire.tensors import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What an update brings into a masked sum."""

    norm: float | None = None  # Euclidean length that it is shortened to; None: it goes in as it is
    weighted: bool = True  # it counts by its examples; else each update counts the same

    def shortening(self, layout: UpdateLayout, update: Buffer) -> float:
        """The factor, above 0 and at most 1, that brings an update to `norm`: of its values, not of its weight."""
        if self.norm is None:
            return 1.0
        length = norm_of(layout, update)
        return min(1.0, self.norm / length) if 0 < length < math.inf else 1.0  # else nothing masks it: an error


PLAIN: Final = Contribution()


def contribution_of(reducer: Any) -> Contribution | None:
    """What sites bring into the sums that this reducer is made of; None where no such sums make it.

    Centered clipping of one step begins at the base version, so an update is pulled to within the radius by itself.
    """
    if type(reducer) is Mean:
        return PLAIN
    if type(reducer) is NormBound:
        return Contribution(norm=reducer.norm)
    if type(reducer) is CenteredClipping and reducer.options.iterations == 1:
        return Contribution(norm=reducer.options.radius, weighted=False)
    if type(reducer) is Bucketing:
        return Contribution(weighted=False)
    return None
