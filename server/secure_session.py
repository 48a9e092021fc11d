"""A session of secure aggregation at the server, as a state table without I/O.

::

    KEYS --(keys in)--> [RING --(nonces in)-->] SHARES --(shares in)--> INPUTS --(masked inputs in)--> fixed
    fixed --> [CONFIRMING --(confirmations in)-->] UNMASKING --(shares that rebuild every secret)--> DONE

A phase waits for `awaited`. Who is silent for too long, refuses, or says what does not hold is out; `close` goes on
without them, or raises TooFewSites, and the session comes to nothing. From `fixed` on the survivors never change: the
state is then a value that the journal keeps (`pack`), with which a server that was killed goes on (`unpack`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from atoll.privacy.secagg import aggregator
from atoll.privacy.secagg.aggregator import AggregatorState, Unmasking
from atoll.privacy.secagg.agreement import Terms
from atoll.privacy.secagg.graph import ring_seed
from atoll.privacy.secagg.messages import Phase, Survivors, bitmap, verify
from atoll.wire import control_pb2 as pb
from atoll.wire import secure_pb2
from atoll.wire.errors import Malformed, NotAllowed, TooFewSites


class At(StrEnum):
    """What a session waits for."""

    KEYS = "keys"
    RING = "nonces of the ring"
    SHARES = "shares of secrets"
    INPUTS = "masked inputs"
    CONFIRMING = "confirmations of the survivors"
    UNMASKING = "shares that unmask"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureSession:
    """One attempt at the sum of a round. Sites are known by their places in the roster."""

    terms: Terms
    at: At = At.KEYS
    said: AggregatorState = field(default_factory=AggregatorState)
    ring: bytes = b""  # seed of the Harary graph
    whole: frozenset[int] = frozenset()  # whose masked input is in the sum
    out: Mapping[int, str] = field(default_factory=dict)  # who is not waited for any more, and why

    # --- whom it waits for ------------------------------------------------------------------------------------------

    @property
    def fixed(self) -> bool:
        """Whether it is decided whose sum it is."""
        return bool(self.said.survivors)

    @property
    def surviving(self) -> frozenset[int]:
        """U2, once it is fixed."""
        return frozenset(self.said.inputs) if self.fixed else frozenset()

    @property
    def taking_part(self) -> frozenset[int]:
        """Those that the present phase is of."""
        match self.at:
            case At.KEYS:
                return frozenset(range(self.terms.num_sites))
            case At.RING | At.SHARES:
                return frozenset(self.said.advertised)
            case At.INPUTS:
                return self.surviving if self.fixed else self.said.sharing
            case _:
                return self.surviving

    @property
    def heard(self) -> frozenset[int]:
        """Those of whom the present phase has what it waits for."""
        match self.at:
            case At.KEYS:
                return frozenset(self.said.advertised)
            case At.RING:
                return frozenset(self.said.nonces)
            case At.SHARES:
                return self.said.sharing
            case At.INPUTS:
                return self.whole
            case At.CONFIRMING:
                return frozenset(self.said.confirmed)
            case _:
                return frozenset(self.said.unmasked)

    @property
    def awaited(self) -> frozenset[int]:
        """Sites without which the phase is not closed before its deadline."""
        return self.taking_part - self.heard - self.out.keys()

    def without(self, site: int, reason: str) -> SecureSession:
        """The session that does not wait for a site any more. What it has said holds on."""
        return self if site in self.out else replace(self, out={**self.out, site: reason})

    # --- what sites say ---------------------------------------------------------------------------------------------

    def take(self, site: int, answer: pb.SecureAnswer) -> SecureSession:
        """The session with what a site says; an answer of an earlier phase, or the same again, changes nothing.

        Raises:
            RemoteError: it does not hold, or the site has said something else before: it has no part any more.
        """
        plan, said = self.terms.plan, self.said
        kind = answer.WhichOneof("answer")
        if site in self.out or kind is None or self.at is not _PHASES.get(kind):
            return self
        if site not in self.taking_part:
            raise NotAllowed(f"{plan.roster[site].site} has no part in this phase", site=plan.roster[site].site)
        match kind:
            case "advertised":
                said = aggregator.take_advertised(plan, said, site, answer.advertised)
            case "ring_nonce":
                said = aggregator.take_nonce(plan, said, site, answer.ring_nonce)
            case "shared":
                said = aggregator.take_shared(plan, said, site, tuple(answer.shared.items), self.ring)
            case "confirmation":
                said = aggregator.take_confirmation(plan, said, site, answer.confirmation)
            case "unmasked":
                said = aggregator.take_unmasked(plan, said, site, answer.unmasked)
        return self if said == self.said else replace(self, said=said)

    def declared(self, site: int, data: bytes) -> bytes:
        """The SHA-256 that a site declares of its masked input. Raises RemoteError."""
        message = verify(self.terms.plan, Phase.MASKED_INPUT, data)
        if message.sender != site or site not in self.taking_part:
            name = self.terms.plan.roster[site].site
            raise Malformed(f"{name} declares an input that is not its own", site=name, field="input")
        return message.body

    def take_input(self, site: int, declared: bytes, digest: bytes) -> SecureSession:
        """The session with a masked input that is whole, and about to be added to the sum.

        Raises:
            Malformed, NotAllowed: as `aggregator.take_input`, or it is too late.
        """
        name = self.terms.plan.roster[site].site
        if self.at is not At.INPUTS or site in self.out:
            raise NotAllowed(f"the masked input of {name} comes too late", site=name)
        said = aggregator.take_input(self.terms.plan, self.said, site, declared, digest)
        return replace(self, said=said, whole=self.whole | {site})

    # --- phases -----------------------------------------------------------------------------------------------------

    def close(self) -> SecureSession:
        """The session in its next phase, with those that the present one has heard.

        Raises:
            TooFewSites: they are not enough; names numbers, bounds and who is missing. Nothing is published.
        """
        plan = self.terms.plan
        match self.at:
            case At.KEYS:
                self._require_enough()
                return replace(self, at=At.SHARES if plan.parameters.complete else At.RING)
            case At.RING:
                if self.said.nonces.keys() != self.said.advertised.keys():
                    raise self._too_few("of all that sent keys, since the order of the ring hangs on them")
                ring = ring_seed(plan.session, dict(self.said.nonces))
                return replace(self, at=At.SHARES, ring=ring)
            case At.SHARES:
                self._require_enough()
                return replace(self, at=At.INPUTS)
            case At.INPUTS:
                if self.fixed and self.whole != self.surviving:  # gone on with after a restart
                    raise self._too_few("of all whose sum was decided on before the server restarted")
                if not self.fixed:
                    self._require_enough()
                said = aggregator.fix_survivors(plan, self.said)
                active = plan.parameters.threat == "active"
                return replace(self, said=said, at=At.CONFIRMING if active else At.UNMASKING)
            case At.CONFIRMING:
                if len(self.said.confirmed) < plan.parameters.threshold:
                    raise self._too_few(f"of {plan.parameters.threshold} sites")
                return replace(self, at=At.UNMASKING)
            case _:
                raise self._too_few(f"of {plan.parameters.threshold} sites for every secret")

    def unmasking(self) -> Unmasking:
        """The masks that take all others off the sum. Raises TooFewSites as long as shares are missing."""
        return aggregator.unmasking(self.terms.plan, self.said, self.ring)

    @property
    def may_unmask(self) -> bool:
        """Whether trying to is worth while."""
        return self.at is At.UNMASKING and len(self.said.unmasked) >= self.terms.plan.parameters.threshold

    def _require_enough(self) -> None:
        plan = self.terms.plan
        fewest = max(plan.parameters.threshold, plan.fewest_survivors)
        if plan.organisations(self.heard) < fewest:
            raise self._too_few(f"of {fewest} sites of as many organisations")

    def _too_few(self, wanted: str) -> TooFewSites:
        plan = self.terms.plan
        missing = [
            f"{plan.roster[site].site} ({self.out.get(site, 'silent')})"
            for site in sorted(frozenset(range(self.terms.num_sites)) - self.heard)
        ]
        count, organisations = len(self.heard), plan.organisations(self.heard)
        fewest = max(plan.parameters.threshold, plan.fewest_survivors)
        return TooFewSites(
            f"session {plan.attempt} of round {plan.round}: {self.at.value} of {count} of {self.terms.num_sites} sites, of "
            f"{organisations} organisations, came, wanted those {wanted}; missing: {', '.join(missing) or 'none'}",
            round=plan.round,
            field="sites",
            value=count,
            bound=fewest,
        )

    # --- what it says -----------------------------------------------------------------------------------------------

    def steps_for(self, site: int) -> tuple[Mapping[str, object], ...]:
        """The parts of the SecureSteps that a site is to answer now; none where nothing is awaited of it."""
        if site not in self.awaited:
            return ()
        plan, said = self.terms.plan, self.said
        match self.at:
            case At.KEYS:
                return ({"plan": secure_pb2.SecurePlan(opening=self.terms.opening.canonical(), hash=plan.hash)},)
            case At.RING:
                return ({"keys": self._keys()},)
            case At.SHARES if not plan.parameters.complete:
                nonces = [secure_pb2.SecureNonce(site=other, nonce=n) for other, n in sorted(said.nonces.items())]
                return ({"ring": secure_pb2.SecureRing(nonces=nonces)},)
            case At.SHARES:
                return ({"keys": self._keys()},)
            case At.INPUTS:
                items = [items[site] for owner, items in sorted(said.shared.items()) if site in items and owner != site]
                sharing = bitmap(said.sharing, self.terms.num_sites)
                return ({"shares": secure_pb2.SecureShares(sharing=sharing, items=items)},)
            case At.CONFIRMING:
                return ({"survivors": said.survivors},)
            case _:
                # On a Harary graph a site counts those of its neighbours, and need not check a signature of everybody.
                complete = plan.parameters.complete
                near = said.confirmed.keys() if complete else plan.neighbours(site, self.ring)
                confirmed = [data for other, data in sorted(said.confirmed.items()) if other in near]
                last = {"confirmations": secure_pb2.SecureConfirmations(confirmed=confirmed)}
                return (last,) if plan.parameters.threat == "active" else ({"survivors": said.survivors}, last)

    def _keys(self) -> secure_pb2.SecureKeys:
        return secure_pb2.SecureKeys(advertised=[data for _, data in sorted(self.said.advertised.items())])

    # --- at rest ----------------------------------------------------------------------------------------------------

    def pack(self) -> str:
        """What was said up to the survivors, as text for the journal."""
        said = self.said
        table = {
            "advertised": _texts(said.advertised),
            "nonces": _texts(said.nonces),
            "shared": {str(site): _texts(items) for site, items in said.shared.items()},
            "inputs": _texts(said.inputs),
            "survivors": _text(said.survivors),
            "ring": _text(self.ring),
        }
        return json.dumps(table, sort_keys=True, separators=(",", ":"))

    @classmethod
    def unpack(cls, terms: Terms, packed: str) -> SecureSession:
        """The session as it was when its survivors were fixed, but for the sum, which needs their inputs again."""
        table = json.loads(packed)
        said = AggregatorState(
            advertised=_bytes(table["advertised"]),
            nonces=_bytes(table["nonces"]),
            shared={int(site): _bytes(items) for site, items in table["shared"].items()},
            inputs=_bytes(table["inputs"]),
            survivors=base64.b85decode(table["survivors"]),
        )
        return cls(terms=terms, at=At.INPUTS, said=said, ring=base64.b85decode(table["ring"]))


def survivors_in(packed: str, sites: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the survivors in what `SecureSession.pack` has written; `sites` is the roster."""
    told = Survivors.decode(base64.b85decode(json.loads(packed)["survivors"]), len(sites))
    return tuple(sites[site] for site in sorted(told.surviving))


_PHASES = {
    "advertised": At.KEYS,
    "ring_nonce": At.RING,
    "shared": At.SHARES,
    "confirmation": At.CONFIRMING,
    "unmasked": At.UNMASKING,
}


def _text(data: bytes) -> str:
    return base64.b85encode(data).decode()


def _texts(by_site: Mapping[int, bytes]) -> dict[str, str]:
    return {str(site): _text(data) for site, data in by_site.items()}


def _bytes(by_site: Mapping[str, str]) -> dict[int, bytes]:
    return {int(site): base64.b85decode(data) for site, data in by_site.items()}
