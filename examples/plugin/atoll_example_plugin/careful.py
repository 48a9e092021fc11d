"""A strategy is a table of parts, those of this plugin among them."""

from atoll.aggregation.compositions import Composition

careful = Composition(
    summary="Rounds of more and more sites, whose longest updates are shortened to the median length.",
    parts={"schedule": {"kind": "growing", "first": 0.5}, "reducer": {"kind": "median_length"}},
)
