"""Secure aggregation in a simulated run: a closing round's updates come as sums of sessions, as in a deployment.

Updates stay with their sites, as files; nothing of a single one reaches the pipeline. Sessions follow the state table of
`server/secured.py` event by event, so attempts, buckets and groups are those of a deployment. They take no simulated time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics
from atoll.aggregation.stages import Strategies
from atoll.client.mask_order import mask_order
from atoll.client.private_update import Facts
from atoll.cluster.masking import mask_by_strategy
from atoll.cluster.rounding_secret import reproducible_secret
from atoll.privacy.secagg.agreement import Opening, Own, Terms, agree
from atoll.server import secured
from atoll.server.masked_sum import require_maskable
from atoll.server.models import RunModels
from atoll.server.plan import plan_of
from atoll.server.round import Round, Secured
from atoll.server.run_state import RunState
from atoll.server.secure_events import GivenUp, SecureEvent, SessionFailed, SessionOpened, SurvivorsFixed, Unmasked
from atoll.server.secure_pipeline import SecurePipeline, fewest_in_session
from atoll.server.secure_session import At
from atoll.simulations.dropouts import Dropouts
from atoll.simulations.sessions import PlayedSession, SessionSites, Write, member_list
from atoll.wire.errors import ConfigError, RemoteError
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest
from atoll.wire.names import new_run_id

_PHASES: Final = (At.KEYS, At.SHARES, At.INPUTS, At.UNMASKING)


class MaskedWork(SecurePipeline):
    """`SecurePipeline` whose sites are in this process: it keeps their updates for them, and holds their sessions."""

    def __init__(
        self,
        job: Job,
        manifest: Manifest,
        models: RunModels,
        sites: tuple[str, ...],
        *,
        folder: Path,
        seed: int,
        drops: Dropouts,
    ) -> None:
        """
        Args:
            folder: for the updates.
            seed: of the sites' secrets of rounding.
            drops: how likely a site drops out of a session; in which phase is drawn too.

        Raises:
            ConfigError: the job's updates cannot be masked; names the key.
        """
        stages, section = Strategies(job), job.secure_aggregation
        assert section is not None  # the job is one with secure aggregation
        super().__init__(
            section,
            run=new_run_id(),
            strategy=stages.first,
            seed=job.job.seed,
            manifest=manifest,
            models=models,
            stages=stages,
        )
        for stage, fragments in zip(stages, self._fragments, strict=True):
            require_maskable(section, fewest_in_session(section, stage), fragments.whole)
        self._bytes_up = 0
        self._job, self._plan, self._schema_hash = job, plan_of(job), manifest.schema_hash
        # Lots of their own: else who is lucky with its task would be so in its session, where both have one seed.
        self._rounding_seed, self._drops = seed, replace(drops, seed=_lot(f"sessions {drops.seed}"))
        self._folder = folder / "private"
        self._folder.mkdir()
        self._facts: dict[tuple[int, str], tuple[int, Metrics]] = {}  # weight and metrics, by round and site
        self._keys: Mapping[str, Ed25519PrivateKey] = {site: Ed25519PrivateKey.generate() for site in sites}
        self._members = member_list(self._keys)
        self._held: tuple[Opening, PlayedSession] | None = None

    # --- RoundWork --------------------------------------------------------------------------------------------------

    def lacks(self, round_: Round) -> tuple[str, ...]:
        """None: sites of this process lose nothing."""
        return ()

    def check(self, round_: Round, site: str, weight: int, update: memoryview, metrics: Metrics = NO_METRICS) -> None:
        """Leaves the update with its site: it is looked at there, when it is masked."""
        self._facts[round_.number, site] = weight, metrics
        self._private(round_.number, site).write_bytes(update)

    def fold(self, round_: Round, site: str, weight: int, update: memoryview) -> None:
        """Nothing: sums are of sessions."""

    def drop(self, number: int) -> None:
        super().drop(number)
        for key in [key for key in self._facts if key[0] == number]:
            del self._facts[key]
            self._private(*key).unlink()

    # --- sessions ---------------------------------------------------------------------------------------------------

    def take_bytes(self) -> int:
        """Bytes of masked inputs since the last call."""
        taken, self._bytes_up = self._bytes_up, 0
        return taken

    def next_event(self, state: RunState, round_: Round) -> SecureEvent | GivenUp | None:
        """What happens next before a closing round can be committed; None where it can."""
        parts = self.without_sum(round_)
        if not parts:
            return None
        part = parts[0]
        known = round_.secured.get(part, Secured())
        if not known.opening:
            return self._begun(state, round_, part, known)
        assert self._held is not None  # nothing stands between a session's events
        opening, session = self._held
        try:
            if not known.said:
                said = session.fix()
                return SurvivorsFixed(round=round_.number, session=opening.session, said=said, part=part)
            counted, sites, liars = session.finish()
        except RemoteError as error:
            reason = error.message
            return SessionFailed(round=round_.number, session=opening.session, reason=reason, part=part)
        finally:
            self._bytes_up, session.bytes_up = self._bytes_up + session.bytes_up, 0
        self.put(round_.number, part, session.total)
        cohorts = self.parts(round_)
        return Unmasked(
            round=round_.number,
            session=opening.session,
            sites=sites,
            weight=counted.weight,
            metrics=counted.metrics,
            liars=liars,
            part=part,
            num_parts=len(cohorts),
            dropped=tuple(sorted(set(cohorts[part]) & set(round_.closing) - set(sites))),
        )

    def _begun(self, state: RunState, round_: Round, part: int, known: Secured) -> SessionOpened | GivenUp:
        number = round_.number
        if len(known.failed) >= self._section.attempts:
            text = f"round {number}: none of {len(known.failed)} sessions of secure aggregation came to its end"
            return GivenUp(round=number, reason=f"{text}; the last one: {known.failed[-1]}")
        sites = secured.roster(known, set(self.parts(round_)[part]) & set(round_.closing) & state.members.keys())
        try:
            opening = self._next_opening(state, round_, part, sites)
            terms = agree(opening, self._own(number))
        except (ConfigError, RemoteError) as error:
            reason = f"round {number}: no session of secure aggregation can be held: {error}"
            return GivenUp(round=number, reason=reason)
        self.session_opened(round_, part, opening)
        ends = SessionSites(terms, [self._keys[site] for site in sites], self._writer(round_, terms))
        self._held = opening, PlayedSession(terms, ends, self.new_sum(round_, terms), self._drops_of(opening))
        return SessionOpened(round=number, session=opening.session, opening=opening.canonical().decode(), part=part)

    def _next_opening(self, state: RunState, round_: Round, part: int, sites: tuple[str, ...]) -> Opening:
        used = {round_.base_version - round_.staleness(site) for site in sites}
        digests = {
            version: self._digest(version, state.branch_of(self._plan, sites[0], version)) for version in sorted(used)
        }
        return secured.opening(round_, part, sites, run=self._run, members=self._members.version, digests=digests)

    def _own(self, number: int) -> Own:
        return Own(
            job=self._job,
            app_hash="0" * 64,
            schema_hash=self._schema_hash,
            num_values=self.layout_of(number).num_values,
            num_factors=len(self.factors_of(number)),
            members=self._members,
        )

    def _digest(self, version: int, branch: int | None) -> str:
        with self._models.open(version, branch) as model:
            return hashlib.sha256(model.map).hexdigest()

    def _drops_of(self, opening: Opening) -> dict[int, At]:
        """In which phase a site drops out: drawn with the same seed."""
        found: dict[int, At] = {}
        for index, site in enumerate(opening.sites):
            if self._drops.hits(site, opening.round, opening.session):
                lot = _lot(f"{self._drops.seed} {site} {opening.round} {opening.session}")
                found[index] = _PHASES[lot % len(_PHASES)]
        return found

    # --- sites ------------------------------------------------------------------------------------------------------

    def _writer(self, round_: Round, terms: Terms) -> Write:
        """The worker's part: an update as levels of a ring under masks."""
        number, opening = round_.number, terms.opening
        layout, strategy, out = self.layout_of(number), self._at(number), self._folder / "masked"

        def write(index: int, masks: Any) -> bytes:
            site = opening.sites[index]
            weight, metrics = self._facts[number, site]
            base = opening.base_of(site)
            facts = Facts(
                round=round_.updates[site].dispatched or number,
                base_version=base,
                base_digest=opening.digests[base],
                weight=weight,
                metrics=metrics,
                num_values=layout.num_values,
                num_factors=terms.num_factors,
            )
            private = self._private(number, site)
            order = mask_order(f"{site}/{number}", terms, site, facts, masks, private=private, out=out)
            secret = reproducible_secret(self._rounding_seed, self._seed, site)
            mask_by_strategy(strategy, layout, order, secret, on_slice=lambda: None)
            return out.read_bytes()

        return write

    def _private(self, number: int, site: str) -> Path:
        return self._folder / f"{number}.{site}"


def _lot(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
