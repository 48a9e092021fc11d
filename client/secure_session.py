"""The sessions of secure aggregation that one update of this site goes through, on the site's own terms.

::

    plan          -> policy, member list, base version, what is out already -> begun, durable -> advertised
    keys (, ring) -> signed by members of the pinned list                   -> shared
    shares        -> whom to mask with -> the worker masks -> durable       -> input
    survivors     -> enough, and the same as of any sum that is out         -> confirmation
    confirmations -> of the same survivors -> that it is out is durable     -> unmasked
    end           -> all of the session is erased

What sites say to each other is `privacy/secagg/site.py`; here is what this site holds against its own records, and the
disk. Invariants: nothing is said before the state that follows from it is durable; asked the same again, the site
answers with the same bytes, and asked otherwise it leaves the session; what it once has left, it never enters again.
Does no work of the worker's and nothing on the network; blocks on the disk.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from atoll.client.mask_order import mask_order
from atoll.client.party import Agreed, Party
from atoll.client.private_update import Facts, PrivateUpdate
from atoll.client.refusal import as_refusal, without_values
from atoll.client.sealed import erase
from atoll.client.session_state import SessionState, digest_of
from atoll.cluster.messages import Mask, Masked
from atoll.privacy.secagg import site
from atoll.privacy.secagg.agreement import Opening, Terms, agree, counters, payload_name
from atoll.privacy.secagg.levels import effective_bits
from atoll.privacy.secagg.messages import Survivors, read_bitmap
from atoll.privacy.secagg.site import Secrets, SiteState
from atoll.transport.durable import sync_file
from atoll.transport.tasks import Key
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import AtollError, DiskFull, Malformed, NotAllowed, Stale, to_detail
from atoll.wire.members_pb2 import MemberList
from atoll.wire.secure_pb2 import SecureInput, SecureShared

_log = logging.getLogger(__name__)
audit = logging.getLogger("atoll.client.audit")
"""One line for each phase of each session that this site takes part in, and for each that it leaves."""

FEWEST_BITS = 12.0  # of the largest value; below, a warning says that weights are far apart
_SESSION = "session.sealed"


class SecureSession:
    """The sessions of the update of one task; one thread at a time."""

    def __init__(self, key: Key, folder: Path, party: Party) -> None:
        """`folder` is that of the task's result in the outbox. Reads what an earlier process has left there."""
        self._key, self._folder, self._party = key, folder, party
        self._update = PrivateUpdate(folder, party.sealer)
        self._state: SessionState | None = None
        self._terms: Terms | None = None
        if (data := party.sealer.read(folder / _SESSION)) is not None:
            self._state = SessionState.decode(data)

    def masked_path(self, session: int) -> Path:
        return self._folder / f"{payload_name(session)}.payload"

    def take(self, step: pb.SecureStep, agreed: Agreed) -> pb.SecureAnswer | Mask | None:
        """What this site says to a step; what its worker has to do first; or nothing, at the end.

        An error is an answer too: the site leaves the session, unless it was not asked about this one.

        Raises:
            DiskFull: nothing was said, and the step may be taken again.
        """
        try:
            if step.WhichOneof("step") == "end":
                self.end(step)
                return None
            return self._answer(step, agreed)
        except DiskFull:
            raise
        except AtollError as error:
            return self.leave(step, error)

    def masked(self, step: pb.SecureStep, masked: Masked) -> pb.SecureAnswer:
        """What this site says once its worker has written the masked input. Raises DiskFull as `take`."""
        try:
            state, terms = self._require(step), self._require_terms()
            sync_file(self.masked_path(step.session))
            if masked.num_bytes != terms.plan.num_bytes:
                raise Malformed(f"the masked input has {masked.num_bytes} bytes, wanted {terms.plan.num_bytes}")
            root = bytes.fromhex(masked.sha256_hex)
            after = self._with_shares(state, terms, step)
            after = site.send_input(terms.plan, after, root, self._party.signing_key)
            answer = SecureInput(declared=after.input, crc32=masked.crc32)
            self._audit(step, f"input of {masked.num_bytes} bytes, masked with {len(after.sharing) - 1} sites")
            return self._say(step, after, pb.SecureAnswer(input=answer))
        except DiskFull:
            raise
        except AtollError as error:
            return self.leave(step, error)

    @property
    def declared(self) -> tuple[str, pb.SecureAnswer] | None:
        """The masked input that this site has declared: name of its payload, and the answer."""
        state = self._state
        if state is None or state.left or "shares" not in state.answered:
            return None
        return payload_name(state.session), pb.SecureAnswer.FromString(state.answered["shares"][1])

    def leave(self, step: pb.SecureStep, error: AtollError) -> pb.SecureAnswer:
        """The answer that this site takes no part (any more), and why; durable where the session is the one of now."""
        refusal = without_values(as_refusal(error, site=self._party.name, run=self._key.run), self._party.name)
        answer = self._addressed(step, pb.SecureAnswer(refused=to_detail(refusal)))
        self._audit(step, f"refused: {error}")
        state = self._state
        if state is not None and state.session == step.session and not state.left and not isinstance(error, Stale):
            nothing = Secrets(sealing_key=b"", masking_key=b"", seed=b"", ring_nonce=b"")
            bare = SiteState(site=state.site.site, secrets=nothing)
            try:
                self._keep(replace(state, site=bare, answered={}, left=answer.SerializeToString(deterministic=True)))
            except AtollError as fault:
                _log.error("task %s: that this site has left a session cannot be kept: %s", self._key, fault)
                self._state = None
                erase(self._folder / _SESSION)
        return answer

    # --- steps ------------------------------------------------------------------------------------------------------

    def _answer(self, step: pb.SecureStep, agreed: Agreed) -> pb.SecureAnswer | Mask:
        kind, digest = str(step.WhichOneof("step")), digest_of(step)
        if kind == "plan" and (self._state is None or self._state.session != step.session):
            return self._begin(step, agreed)
        state = self._require(step)
        if state.left:
            return pb.SecureAnswer.FromString(state.left)
        if (known := state.answered.get(kind)) is not None:
            # What is revealed is the same whoever confirmed it; all else that was said is said once.
            if known[0] != digest and kind != "confirmations":
                raise NotAllowed(f"the server says something else than before ({kind}); a session has one of each")
            return pb.SecureAnswer.FromString(known[1])
        if kind == "plan" and step.plan.opening == state.opening:  # what was begun could not be kept on a full disk
            return self._say(step, state.site, pb.SecureAnswer(advertised=state.site.advertised))
        if self._terms is None:
            members = MemberList.FromString(state.members)
            own = agreed.own(self._update.facts(), members)
            self._terms = agree(Opening.decode(state.opening), own)
        match kind:
            case "keys":
                return self._take_keys(step, state.site, self._terms)
            case "ring":
                return self._take_ring(step, state.site, self._terms)
            case "shares":
                return self._order(step, state, self._terms)
            case "survivors":
                return self._confirm(step, state.site, self._terms)
            case "confirmations":
                return self._unmask(step, state.site, self._terms)
        raise Malformed(f"a step of secure aggregation that this site does not know: {kind}", field="step", value=kind)

    def _begin(self, step: pb.SecureStep, agreed: Agreed) -> pb.SecureAnswer:
        party, update = self._party, self._update.facts()
        opening = Opening.decode(step.plan.opening)
        self._check_opening(step, opening, update)
        members = party.members_of(opening)
        terms = agree(opening, agreed.own(update, members))
        party.require_own_key(terms)
        if terms.plan.hash != step.plan.hash:
            raise NotAllowed(
                "the server's plan of the session is not what this site has worked out from job, app, model and member list",
                field="hash",
                value=step.plan.hash.hex(),
                bound=terms.plan.hash.hex(),
            )
        across_runs = party.consent(self._key.run, terms)
        revealed = party.book.of(self._key.run)
        for out in (revealed, *((party.book.all_sums(),) if across_runs else ())):
            out.require_same(update.base_digest, frozenset(opening.sites), "the roster")
        counters(terms, update.weight, update.metrics, site=party.name)  # told now, before it costs the others anything
        party.book.keep(self._key.run, revealed.begun(opening.round, opening.session))
        self._forget()
        begun = site.advertise(terms.plan, terms.index(party.name), Secrets.draw(), self._party.signing_key)
        self._terms = terms
        self._state = SessionState(
            session=step.session,
            opening=step.plan.opening,
            members=members.SerializeToString(deterministic=True),
            site=begun,
        )
        params = terms.plan.parameters
        self._audit(
            step,
            f"round {opening.round}: {params.num_sites} sites of {terms.plan.organisations(frozenset(range(params.num_sites)))} "
            f"organisations, {params.threat} server, {params.num_corrupt} may be corrupt, threshold {params.threshold}, "
            f"no sum of fewer than {terms.plan.fewest_survivors}",
        )
        bits = effective_bits(terms.num_sites, terms.bits, update.weight / terms.max_weight)
        if bits < FEWEST_BITS:
            _log.warning(
                "task %s: of this site's values %.1f bits come through, since it weighs %d of at most %d",
                self._key,
                bits,
                update.weight,
                terms.max_weight,
            )
        return self._say(step, begun, pb.SecureAnswer(advertised=begun.advertised))

    def _check_opening(self, step: pb.SecureStep, opening: Opening, update: Facts) -> None:
        name = self._party.name
        if opening.run != self._key.run or opening.session != step.session or name not in opening.sites:
            raise Malformed(f"the session is not of run {self._key.run} and attempt {step.session} with {name} in it")
        base = opening.base_of(name)
        if base != update.base_version or opening.digests[base] != update.base_digest:
            raise NotAllowed(
                f"the session takes this site's update for the difference to version {base}, {opening.digests[base]}; it is "
                f"to version {update.base_version}, {update.base_digest}: not all sites were given the same model",
                field="digests",
                value=opening.digests[base],
                bound=update.base_digest,
            )
        if opening.bases and not update.sums_stale:
            raise NotAllowed(
                "sites of the session began with different models, and the job's schedule has none such",
                field="bases",
                value=", ".join(opening.bases),
            )

    def _take_keys(self, step: pb.SecureStep, state: SiteState, terms: Terms) -> pb.SecureAnswer:
        after = site.take_keys(terms.plan, state, list(step.keys.advertised))
        self._audit(step, f"keys of {len(after.public)} sites")
        if not terms.plan.parameters.complete:
            return self._say(step, after, pb.SecureAnswer(ring_nonce=site.open_ring(after)))
        after = site.share(terms.plan, after, self._party.signing_key)
        return self._say(step, after, pb.SecureAnswer(shared=SecureShared(items=after.shared)))

    def _take_ring(self, step: pb.SecureStep, state: SiteState, terms: Terms) -> pb.SecureAnswer:
        nonces = {one.site: one.nonce for one in step.ring.nonces}
        if len(nonces) != len(step.ring.nonces):
            raise Malformed("the ring has a site twice", field="ring")
        after = site.share(terms.plan, site.take_ring(terms.plan, state, nonces), self._party.signing_key)
        self._audit(step, f"shares for {len(after.shared)} neighbours")
        return self._say(step, after, pb.SecureAnswer(shared=SecureShared(items=after.shared)))

    def _with_shares(self, state: SessionState, terms: Terms, step: pb.SecureStep) -> SiteState:
        sharing = read_bitmap(step.shares.sharing, terms.num_sites)
        return site.take_shares(terms.plan, state.site, sharing, list(step.shares.items))

    def _order(self, step: pb.SecureStep, state: SessionState, terms: Terms) -> Mask:
        """What the worker has to write. Whom it is masked with is kept with the answer: before, nothing has left."""
        update = self._update.facts()
        return mask_order(
            f"{self._key}/{step.session}",
            terms,
            self._party.name,
            update,
            site.masks(terms.plan, self._with_shares(state, terms, step)),
            private=self._update.path,
            out=self.masked_path(step.session),
        )

    def _confirm(self, step: pb.SecureStep, state: SiteState, terms: Terms) -> pb.SecureAnswer:
        surviving = self._surviving(terms, step.survivors)
        self._require_same(terms, surviving)
        after = site.confirm(terms.plan, state, step.survivors, self._party.signing_key)
        self._audit(step, f"{len(surviving)} survivors: {', '.join(sorted(surviving))}"[:500])
        return self._say(step, after, pb.SecureAnswer(confirmation=after.consistency))

    def _unmask(self, step: pb.SecureStep, state: SiteState, terms: Terms) -> pb.SecureAnswer:
        after = site.unmask(terms.plan, state, list(step.confirmations.confirmed), self._party.signing_key)
        surviving = self._surviving(terms, after.survivors)
        self._require_same(terms, surviving)
        book, digest = self._party.book, self._update.facts().base_digest
        revealed = book.of(self._key.run)
        revealed.require_newest(terms.plan.round, terms.plan.attempt)
        book.keep(self._key.run, revealed.let_out(digest, surviving))
        self._audit(step, f"shares revealed for the sum over {len(surviving)} sites")
        return self._say(step, after, pb.SecureAnswer(unmasked=after.unmasked))

    def _require_same(self, terms: Terms, surviving: frozenset[str]) -> None:
        digest, book = self._update.facts().base_digest, self._party.book
        book.of(self._key.run).require_same(digest, surviving, "the list of survivors")
        if self._party.consent(self._key.run, terms):
            book.all_sums().require_same(digest, surviving, "the list of survivors")

    @staticmethod
    def _surviving(terms: Terms, data: bytes) -> frozenset[str]:
        told = Survivors.decode(data, terms.num_sites)
        return frozenset(terms.opening.sites[index] for index in told.surviving)

    def end(self, step: pb.SecureStep) -> None:
        """Erases the session, and where its sum is in a version the update too. Raises LocalError."""
        state = self._state
        if state is not None and state.session == step.session:
            self._forget()
            for path in self._folder.glob(f"{payload_name(step.session)}.payload"):
                erase(path)
            if step.end.version:
                self._update.erase()
            became = f"the sum is in version {step.end.version}" if step.end.version else step.end.reason[:500]
            self._audit(step, f"over, and erased: {became}")

    # --- what lies here ---------------------------------------------------------------------------------------------

    def _say(self, step: pb.SecureStep, after: SiteState, answer: pb.SecureAnswer) -> pb.SecureAnswer:
        """The answer, once it and the state after it are durable."""
        state = self._require(step)
        answer = self._addressed(step, answer)
        said = (digest_of(step), answer.SerializeToString(deterministic=True))
        answered = {**state.answered, str(step.WhichOneof("step")): said}
        self._keep(replace(state, site=after, answered=answered))
        return answer

    def _keep(self, state: SessionState) -> None:
        self._party.sealer.write(self._folder / _SESSION, state.encode())
        self._state = state

    def _forget(self) -> None:
        """Erases all keys, seeds and shares of the session of now, and what it has masked."""
        if self._state is not None:
            erase(self._folder / _SESSION)
            erase(self.masked_path(self._state.session))
        self._state = self._terms = None

    def _require(self, step: pb.SecureStep) -> SessionState:
        state = self._state
        if state is None or state.session != step.session:
            has = f"session {state.session}" if state is not None else "none"
            raise Stale(
                f"task {self._key} has {has} under way, the server asks of session {step.session}",
                run=self._key.run,
                field="session",
                value=step.session,
                bound=has,
            )
        return state

    def _require_terms(self) -> Terms:
        if self._terms is None:
            raise Stale(f"the session of task {self._key} is over", run=self._key.run)
        return self._terms

    def _addressed(self, step: pb.SecureStep, answer: pb.SecureAnswer) -> pb.SecureAnswer:
        answer.key.CopyFrom(self._key.to_message())
        answer.session = step.session
        return answer

    def _audit(self, step: pb.SecureStep, what: str) -> None:
        audit.info("%s session %d %s: %s", self._key, step.session, step.WhichOneof("step"), what)
