"""Rounds whose updates come masked: what is folded are sums of sessions (`SecureRounds`), never an update.

A round has one session for each cohort that has a sum of its own: a group, a bucket, or all of its sites (`parts`). What
regions send are sums already, each of sessions in the region; they are added as in any run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.aggregation.contribution import contribution_of
from atoll.aggregation.lanes import factors_in
from atoll.aggregation.layout import MeanEntry
from atoll.aggregation.reducers.bucketing import Bucketing, whole_buckets
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics, Reduction
from atoll.aggregation.round_sum import RoundSum
from atoll.aggregation.strategy import Strategy
from atoll.cluster.update_file import create_update
from atoll.privacy.secagg.agreement import Opening, Terms
from atoll.privacy.secagg.parameters import parameters
from atoll.server.bucket_sums import BucketSums
from atoll.server.masked_partial import write_partial
from atoll.server.masked_sum import MaskedSum
from atoll.server.pipeline import OpenSum, Pipeline
from atoll.server.round import Round
from atoll.wire import runs_pb2, secure_pb2
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadUpdate
from atoll.wire.privacy_section import SecureAggregationSection


class SecurePipeline(Pipeline):
    """`RoundWork` of a run with secure aggregation."""

    def __init__(self, section: SecureAggregationSection, **terms: Any) -> None:
        """`terms` are those of `Pipeline`."""
        super().__init__(**terms)
        self._section = section
        self._openings: dict[tuple[int, int], Opening] = {}  # by round and part
        self._sums: dict[tuple[int, int], MaskedSum] = {}

    def mixed(self, num_updates: int) -> int:
        """What a session publishes has as many inputs, of as many organisations, at least."""
        return self._section.fewest_survivors

    def factors_of(self, round_: int) -> tuple[MeanEntry, ...]:
        """The values of a round that are counted exactly."""
        return factors_in(self.layout_of(round_), self._strategy.lanes)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def parts(self, round_: Round) -> Mapping[int, tuple[str, ...]]:
        """The cohorts of a closing round that have a sum each; none where all that it has are sums of regions.

        Buckets are dealt by the job's seed alone, so that from round to round they are as alike as their sites are:
        sums over ever new buckets tell more of one site.
        """
        sites = tuple(sorted(site for site in round_.updates if site not in round_.regions))
        if not sites:
            return {}
        if round_.branches:
            return {branch: round_.in_branch(branch) for branch in sorted(round_.branch_weights)}
        reducer = self._at(round_.number).reducer
        if isinstance(reducer, Bucketing):
            return dict(enumerate(whole_buckets(sites, reducer.size, bucket_seed(self._seed))))
        return {0: sites}

    def without_sum(self, round_: Round) -> list[int]:
        """Parts of a closing round whose sum is not here."""
        number, secured = round_.number, round_.secured
        known = [part for part, one in secured.items() if one.sites and (number, part) in self._sums]
        return [part for part in self.parts(round_) if part not in known]

    def session_opened(self, round_: Round, part: int, opening: Opening) -> None:
        """From here on a site that goes is one that dropped out of the session; its update is not lost to the round."""
        self._openings[round_.number, part] = opening

    def new_sum(self, round_: Round, terms: Terms) -> MaskedSum:
        """An empty sum for a session."""
        number = round_.number
        contribution = contribution_of(self._at(number).reducer)
        assert contribution is not None  # planning has refused all others
        factors = self.factors_of(number)
        return MaskedSum(self.layout_of(number), terms, weighted=contribution.weighted, factors=factors)

    def put(self, number: int, part: int, total: MaskedSum) -> None:
        """The sum of a session, unmasked. It counts once the journal says whose it is."""
        self._sums[number, part] = total

    def is_whole(self, round_: Round) -> bool:
        """Whether all that makes a closing round's version is here: the sums of its parts, and those of its regions."""
        return not self.without_sum(round_) and not set(self._lacking_regions(round_)) & set(round_.closing)

    # --- RoundWork --------------------------------------------------------------------------------------------------

    def open_round(self, round_: Round) -> None:
        """Nothing comes before the round's sessions but sums of regions; an abandoned one of its number is forgotten."""
        if not round_.updates:
            self.drop(round_.number)
        if round_.regions:
            super().open_round(round_)

    def lacks(self, round_: Round) -> tuple[str, ...]:
        """Updates that would be lost with their sites: all, as long as no session has begun."""
        lacking = self._lacking_regions(round_)
        if not any(number == round_.number for number, _ in list(self._openings)):
            lacking += tuple(site for site in round_.updates if site not in round_.regions)
        return tuple(sorted(lacking))

    def _lacking_regions(self, round_: Round) -> tuple[str, ...]:
        return tuple(site for site in super().lacks(round_) if site in round_.regions)

    def check(self, round_: Round, site: str, weight: int, update: memoryview, metrics: Metrics = NO_METRICS) -> None:
        if site not in round_.regions:
            raise _plain(round_, site)
        super().check(round_, site, weight, update, metrics)

    def fold(self, round_: Round, site: str, weight: int, update: memoryview) -> None:
        if site not in round_.regions:
            raise _plain(round_, site)
        super().fold(round_, site, weight, update)

    def write_partial(self, round_: Round, path: Path) -> tuple[int, int]:
        total = self._as_one(round_).sum
        with create_update(path, total.partial_bytes) as out:
            total.write_partial(out)
            return total.partial_bytes, crc32_of(out)

    def drop(self, number: int) -> None:
        super().drop(number)
        for table in (self._openings, self._sums):
            for key in [key for key in list(table) if key[0] == number]:
                table.pop(key, None)

    def _reduction(self, round_: Round, branch: int | None) -> Reduction:
        reducer, number = self._at(round_.number).reducer, round_.number
        if isinstance(reducer, Bucketing):
            sums = {"+".join(round_.secured[part].sites): self._sums[number, part] for part in self.parts(round_)}
            return BucketSums(sums, reducer.inner, seed=bucket_seed(self._seed) + number)
        return self._as_one(round_).reduction if round_.regions else self._sums[number, branch or 0]

    def _as_one(self, round_: Round) -> OpenSum:
        """The sums of the round's sessions beside those of its regions, in the terms of the whole round's sum."""
        known = self._opened(round_, None)
        whole = known.reduction
        assert isinstance(whole, RoundSum)  # planning has refused regions to all else
        for part in self.parts(round_):
            sites, total = round_.secured[part].sites, self._sums[round_.number, part]
            if known.folded.isdisjoint(sites):
                partial = bytearray(whole.partial_bytes)
                write_partial(total, whole.terms, min(sites), partial)
                whole.merge_partial(min(sites), partial)
                known.folded.update(sites)
        return known

    def complete(self, record: runs_pb2.RoundRecord, round_: Round) -> None:
        """What is known of the sites together, and how it was protected."""
        secured = {part: round_.secured[part] for part in self.parts(round_)}
        if not secured:
            return
        for one in secured.values():
            record.weight += one.weight
            for name, (total, count) in one.metrics.items():
                record.train_metrics[name].sum += total
                record.train_metrics[name].count += count
        section = self._section
        rosters = [len(self._openings[round_.number, part].sites) for part in secured]
        terms = [
            parameters(num_sites, corrupt=section.corrupt, dropped=section.dropped, threat=section.threat)
            for num_sites in rosters
        ]
        record.secure.CopyFrom(
            secure_pb2.SecureRecord(
                threat=section.threat,
                num_sites=sum(rosters),
                threshold=min(one.threshold for one in terms),
                num_corrupt=min(one.num_corrupt for one in terms),
                fewest_survivors=section.fewest_survivors,
                sessions=max(one.session for one in secured.values()),
                dropped=sorted(site for one in secured.values() for site in one.dropped),
                liars={site: what for one in secured.values() for site, what in one.liars.items()},
                parts=len(secured) if len(secured) > 1 else 0,
            )
        )


def fewest_in_session(section: SecureAggregationSection, strategy: Strategy) -> int:
    """Sites that a session of a run has at least: of regions, which have their own, a round may close with fewer."""
    reducer = strategy.reducer
    fewest = reducer.size if isinstance(reducer, Bucketing) else strategy.schedule.fewest_updates
    return max(section.fewest_survivors, fewest)


def bucket_seed(seed: int) -> int:
    """Of what the job's seed says about buckets."""
    return int.from_bytes(hashlib.sha256(f"masked buckets {seed}".encode()).digest()[:7], "little")


def _plain(round_: Round, site: str) -> BadUpdate:
    text = "this run takes no update that is not masked within a session of secure aggregation"
    return BadUpdate(text, site=site, round=round_.number, field="payloads")
