"""A session of secure aggregation in one process: real keys, shares, masks and signatures, without disk and network.

The sites say what `privacy/secagg/site.py` has them say, as messages; the server is its own state table and sum. What is
left out is what a site holds against its own records (`client/secure_session.py`): here nobody lies, and nothing is lost.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.privacy.secagg import site
from atoll.privacy.secagg.agreement import Counted, Terms
from atoll.privacy.secagg.keys import Mask
from atoll.privacy.secagg.messages import read_bitmap
from atoll.privacy.secagg.site import Secrets, SiteState
from atoll.server.masked_sum import MaskedSum
from atoll.server.secure_session import At, SecureSession
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import RemoteError
from atoll.wire.members_pb2 import ACTIVE, Member, MemberList
from atoll.wire.secure_pb2 import SecureInput, SecureShared
from atoll.wire.tensors import Buffer

Write = Callable[[int, Sequence[Sequence[Mask]]], Buffer]
"""The masked input of a site, by its place in the roster, under the masks of each lane. Raises RemoteError."""


class SessionSites:
    """The sites of a session. What they keep for it lasts as long as this does."""

    def __init__(self, terms: Terms, keys: Sequence[Ed25519PrivateKey], write: Write) -> None:
        """`keys` are the signing keys of the roster, in its order."""
        self._terms, self._keys, self._write = terms, keys, write
        self._states: dict[int, SiteState] = {}
        self._inputs: dict[int, Buffer] = {}

    def answer(self, index: int, step: pb.SecureStep) -> pb.SecureAnswer:
        """What a site says to a step. Raises RemoteError where it would leave the session."""
        plan, key = self._terms.plan, self._keys[index]
        if step.WhichOneof("step") == "plan":
            state = self._states[index] = site.advertise(plan, index, Secrets.draw(), key)
            return pb.SecureAnswer(advertised=state.advertised)
        state = self._states[index]
        match step.WhichOneof("step"):
            case "keys":
                state = site.take_keys(plan, state, list(step.keys.advertised))
                if plan.parameters.complete:
                    return self._shared(index, state)
                self._states[index] = state
                return pb.SecureAnswer(ring_nonce=site.open_ring(state))
            case "ring":
                nonces = {one.site: one.nonce for one in step.ring.nonces}
                return self._shared(index, site.take_ring(plan, state, nonces))
            case "shares":
                sharing = read_bitmap(step.shares.sharing, self._terms.num_sites)
                state = site.take_shares(plan, state, sharing, list(step.shares.items))
                masked = self._inputs[index] = self._write(index, site.masks(plan, state))
                state = self._states[index] = site.send_input(plan, state, hashlib.sha256(masked).digest(), key)
                return pb.SecureAnswer(input=SecureInput(declared=state.input))
            case "survivors":
                state = self._states[index] = site.confirm(plan, state, step.survivors, key)
                return pb.SecureAnswer(confirmation=state.consistency)
            case _:
                state = self._states[index] = site.unmask(plan, state, list(step.confirmations.confirmed), key)
                return pb.SecureAnswer(unmasked=state.unmasked)

    def send(self, index: int) -> Buffer:
        """The masked input that a site has declared; once."""
        return self._inputs.pop(index)

    def _shared(self, index: int, state: SiteState) -> pb.SecureAnswer:
        state = self._states[index] = site.share(self._terms.plan, state, self._keys[index])
        return pb.SecureAnswer(shared=SecureShared(items=state.shared))


class PlayedSession:
    """A session between its sites and the server, phase by phase."""

    def __init__(self, terms: Terms, sites: SessionSites, total: MaskedSum, drops: Mapping[int, At]) -> None:
        """`drops` says of sites, by their places in the roster, in which phase they fall silent."""
        self.total = total
        self.bytes_up = 0  # masked inputs
        self.message_bytes = 0  # all else that sites have said
        self.server_s = 0.0  # of this machine, for the server's part
        self._now, self._sites, self._drops = SecureSession(terms=terms), sites, drops

    def fix(self) -> str:
        """Goes on until it is decided whose sum it is; what was said until then, as the journal keeps it.

        Raises:
            TooFewSites: too few are left; names who is missing.
        """
        while not self._now.fixed:
            self._phase()
            self._close()
        return self._now.pack()

    def finish(self) -> tuple[Counted, tuple[str, ...], dict[str, str]]:
        """Goes on to the sum: what its exact lane says, whose it is, and who was found lying about what.

        Raises:
            TooFewSites: too few are left for its masks to be taken off.
            BadUpdate: the sum is none of inputs that keep their bounds.
        """
        while self._now.at is not At.UNMASKING:
            self._phase()
            self._close()
        self._phase()
        began_s = time.perf_counter()
        found = self._now.unmasking()
        counted = self.total.unmask(found.masks)
        self.server_s += time.perf_counter() - began_s
        names = self._now.terms.opening.sites
        surviving = tuple(names[index] for index in sorted(self._now.surviving))
        return counted, surviving, {names[index]: what for index, what in found.liars.items()}

    def _phase(self) -> None:
        """All that are awaited say their word, but those that drop out."""
        for index in sorted(self._now.awaited):
            if self._drops.get(index) is self._now.at:
                self._now = self._now.without(index, "dropped out")
                continue
            try:
                for parts in self._now.steps_for(index):
                    self._hear(index, self._sites.answer(index, pb.SecureStep(**parts)))  # type: ignore[arg-type]
            except RemoteError as error:
                self._now = self._now.without(index, f"refused: {error.message}")

    def _hear(self, index: int, answer: pb.SecureAnswer) -> None:
        self.message_bytes += answer.ByteSize()
        masked = self._sites.send(index) if self._now.at is At.INPUTS else None
        began_s = time.perf_counter()
        if masked is None:
            self._now = self._now.take(index, answer)
        else:
            digest = hashlib.sha256(masked).digest()
            self._now = self._now.take_input(index, answer.input.declared, digest)
            self.total.add(masked)
            self.bytes_up += memoryview(masked).nbytes
        self.server_s += time.perf_counter() - began_s

    def _close(self) -> None:
        began_s = time.perf_counter()
        self._now = self._now.close()
        self.server_s += time.perf_counter() - began_s


def member_list(keys: Mapping[str, Ed25519PrivateKey]) -> MemberList:
    """The list of these sites, by name, each of an organisation of its own."""
    members = [
        Member(site=name, organisation=name, signing_key=key.public_key().public_bytes_raw(), status=ACTIVE)
        for name, key in sorted(keys.items())
    ]
    return MemberList(federation="simulation", version=1, members=members)
