"""Runs that train nothing: one round, in which each site answers a question, with metrics of a model or statistics.

The answers are small, so they stand in the journal: nothing is folded, no version is made, and a server that was killed
has them all when it is back. People see them when the round is closed, and not before: who watched a total grow could
tell each site's part from it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from atoll.aggregation.metrics import MetricRules
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics
from atoll.aggregation.statistics import FeatureStatistics, FeatureSummary, check_statistics, summarise
from atoll.server.round import Round
from atoll.server.round_work import NewVersion
from atoll.wire import control_pb2, runs_pb2
from atoll.wire.errors import BadUpdate, RemoteError
from atoll.wire.job import Job


class Survey:
    """The round of a run that trains nothing. `RoundWork` of a driver."""

    grows = False

    def __init__(self, *, job: Job, fewest: int, crc32: int, num_bytes: int) -> None:
        """`fewest` answers are in a round that closes; `crc32` and `num_bytes` are those of version 0, which stays."""
        self._job = job
        self._rules = MetricRules(job)
        self._fewest = fewest
        self._version_0 = NewVersion(version=0, crc32=crc32, num_bytes=num_bytes)

    def update_bytes(self, round_: int) -> int:
        return 0

    def partial_bytes(self, round_: int) -> int:
        return 0

    def mixed(self, num_updates: int) -> int:
        return 1 if self._job.by_site else num_updates

    def open_round(self, round_: Round) -> None:
        """Nothing is kept of a round but in the journal."""

    def lacks(self, round_: Round) -> tuple[str, ...]:
        return ()

    def check(self, round_: Round, site: str, weight: int, update: memoryview, metrics: Metrics = NO_METRICS) -> None:
        raise BadUpdate("this run asks for no updates", site=site, round=round_.number, field="payloads")

    def fold(self, round_: Round, site: str, weight: int, update: memoryview) -> None:
        raise BadUpdate("this run asks for no updates", site=site, round=round_.number, field="payloads")

    def write_partial(self, round_: Round, path: Path) -> tuple[int, int]:
        raise BadUpdate("a region cannot answer for its sites", round=round_.number, field="job.sites")

    def drop(self, number: int) -> None:
        """Nothing is kept."""

    def make_version(self, round_: Round, current: int) -> NewVersion:
        return self._version_0

    def complete(self, record: runs_pb2.RoundRecord, round_: Round) -> None:
        record.train_metrics.clear()
        section, fewest = self._job.statistics, self._fewest
        metrics = {site: round_.updates[site].metrics for site in round_.closing}
        told = {
            name for sums in metrics.values() for name in sums if sum(name in s for s in metrics.values()) >= fewest
        }
        combined = self._rules.combine(
            {site: {n: sums[n] for n in sums if n in told} for site, sums in metrics.items()}
        )
        for name, (total, count) in combined.items():
            record.evaluate_metrics[name].sum, record.evaluate_metrics[name].count = total, count
        found = {site: unpack_statistics(round_.updates[site].statistics) for site in round_.closing}
        if section is not None:
            record.features.extend(_message(summary) for summary in summarise(found, section, fewest))
        for site in round_.closing if self._job.by_site else ():
            answer = record.by_site.add(site=site)
            for name, (total, count) in metrics[site].items():
                answer.metrics[name].sum, answer.metrics[name].count = total, count
            if section is not None:
                answer.features.extend(_message(summary) for summary in summarise({site: found[site]}, section, 1))


def answer_of(result: control_pb2.Result, job: Job, *, site: str, run: str) -> str:
    """The statistics of a site's answer, as the journal keeps them; "" of an evaluation.

    Raises:
        BadUpdate, TooLarge: the answer is not what the job asks for; names site, feature, value and bound.
    """
    names = [feature.name for feature in result.statistics]
    try:
        if job.statistics is None:
            if names:
                raise BadUpdate("the job asks for no statistics", field="statistics", value=len(names), bound=0)
            return ""
        if result.metrics or len(set(names)) < len(names):
            text = "wanted statistics alone, and each feature once"
            raise BadUpdate(text, field="statistics", value=", ".join(names)[:200], bound="unlike features, no metrics")
        packed = pack_statistics(result)
        check_statistics(unpack_statistics(packed), job.statistics)
    except RemoteError as error:
        error.site, error.run, error.round = site, run, result.round
        raise
    return packed


def pack_statistics(result: control_pb2.Result) -> str:
    """The statistics of a result as text."""
    only = control_pb2.Result(statistics=result.statistics)
    return base64.b85encode(only.SerializeToString(deterministic=True)).decode()


def unpack_statistics(packed: str) -> Mapping[str, FeatureStatistics]:
    """By feature, from the text of `pack_statistics`."""
    result = control_pb2.Result.FromString(base64.b85decode(packed))
    return {
        feature.name: FeatureStatistics(
            count=feature.count,
            total=feature.sum,
            total_low=feature.sum_low,
            squares=feature.squares,
            stops=tuple(feature.stops),
            counts=tuple(feature.counts),
        )
        for feature in result.statistics
    }


def _message(summary: FeatureSummary) -> runs_pb2.FeatureSummary:
    return runs_pb2.FeatureSummary(
        name=summary.name,
        num_sites=summary.num_sites,
        num_withheld=summary.num_withheld,
        count=summary.count,
        mean=summary.mean,
        variance=summary.variance,
        edges=summary.edges,
        least=summary.least,
        most=summary.most,
        quantiles=[
            runs_pb2.QuantileSummary(q=found.q, value=found.value, lower=found.lower, upper=found.upper)
            for found in summary.quantiles
        ],
    )
