"""Rounds whose updates come masked: what is folded is the sum of a session (`SecureRounds`), never an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics
from atoll.privacy.secagg.agreement import Opening
from atoll.privacy.secagg.parameters import parameters
from atoll.server.masked_sum import MaskedSum
from atoll.server.pipeline import OpenSum, Pipeline
from atoll.server.round import Round
from atoll.wire import runs_pb2, secure_pb2
from atoll.wire.errors import BadUpdate
from atoll.wire.privacy_section import SecureAggregationSection


class SecurePipeline(Pipeline):
    """`RoundWork` of a run with secure aggregation."""

    def __init__(self, section: SecureAggregationSection, **terms: Any) -> None:
        """`terms` are those of `Pipeline`."""
        super().__init__(**terms)
        self._section = section
        self._under_way: dict[int, Opening] = {}  # by round

    @property
    def layout(self) -> UpdateLayout:
        """Of the values that are masked."""
        return self._layout

    def mixed(self, num_updates: int) -> int:
        """What a session publishes has as many inputs, of as many organisations, at least."""
        return self._section.fewest_survivors

    def open_round(self, round_: Round) -> None:
        """Nothing comes before the round's session."""

    def session_opened(self, round_: Round, opening: Opening) -> None:
        """From here on a site that goes is one that dropped out of the session; its update is not lost to the round."""
        self._under_way[round_.number] = opening

    def put(self, round_: Round, total: MaskedSum, sites: tuple[str, ...]) -> None:
        """The sum of a round, unmasked, over `sites`."""
        self._open[round_.number, None] = OpenSum(
            reduction=total, num_sites=len(sites), max_weight=total.terms.max_weight, folded=set(sites)
        )

    def lacks(self, round_: Round) -> tuple[str, ...]:
        """Updates that would be lost with their sites: all, as long as no session has begun."""
        return () if round_.number in self._under_way else tuple(sorted(round_.updates))

    def is_whole(self, round_: Round) -> bool:
        """Whether the sum of a closing round is there."""
        known = self._open.get((round_.number, None))
        return known is not None and known.folded == set(round_.closing)

    def drop(self, number: int) -> None:
        super().drop(number)
        self._under_way.pop(number, None)

    def check(self, round_: Round, site: str, weight: int, update: memoryview, metrics: Metrics = NO_METRICS) -> None:
        raise _plain(round_, site)

    def fold(self, round_: Round, site: str, weight: int, update: memoryview) -> None:
        raise _plain(round_, site)

    def write_partial(self, round_: Round, path: Path) -> tuple[int, int]:
        raise _plain(round_, "")

    def complete(self, record: runs_pb2.RoundRecord, round_: Round) -> None:
        """What is known of the sites together, and how it was protected."""
        secured = round_.secured
        assert secured is not None  # the round is closing with its sum
        record.weight = secured.weight
        for name, (total, count) in secured.metrics.items():
            record.train_metrics[name].sum, record.train_metrics[name].count = total, count
        num_sites = len(self._under_way[round_.number].sites)
        section = self._section
        terms = parameters(num_sites, corrupt=section.corrupt, dropped=section.dropped, threat=section.threat)
        record.secure.CopyFrom(
            secure_pb2.SecureRecord(
                threat=section.threat,
                num_sites=num_sites,
                threshold=terms.threshold,
                num_corrupt=terms.num_corrupt,
                fewest_survivors=section.fewest_survivors,
                sessions=secured.session,
                dropped=secured.dropped,
                liars=secured.liars,
            )
        )


def _plain(round_: Round, site: str) -> BadUpdate:
    text = "this run takes no update that is not masked within a session of secure aggregation"
    return BadUpdate(text, site=site, round=round_.number, field="payloads")
