"""A session from end to end in one process: sites, a server between them, and who drops out when."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from atoll.privacy.secagg import aggregator, site
from atoll.privacy.secagg.aggregator import AggregatorState, Unmasking
from atoll.privacy.secagg.masks import add_masks
from atoll.privacy.secagg.parameters import Threat, parameters
from atoll.privacy.secagg.plan import Lane, Member, SessionPlan
from atoll.privacy.secagg.site import Secrets, SiteState

LANES = (Lane(bits=64, num_values=3), Lane(bits=32, num_values=500), Lane(bits=16, num_values=77))


def signing_keys(num_sites: int) -> list[Ed25519PrivateKey]:
    return [
        Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"signing %d" % index).digest())
        for index in range(num_sites)
    ]


def plan_of(
    num_sites: int,
    *,
    corrupt: float = 0.0,
    threat: Threat = "active",
    fewest: int = 3,
    lanes: tuple[Lane, ...] = LANES,
    attempt: int = 1,
    dropped: float | None = None,
    bound_to: Mapping[str, str] | None = None,
) -> SessionPlan:
    members = tuple(
        Member(
            site=f"site-{index:05d}",
            organisation=f"organisation-{index}",
            signing_key=key.public_key().public_bytes_raw(),
        )
        for index, key in enumerate(signing_keys(num_sites))
    )
    return SessionPlan(
        run_id=bytes(range(16)),
        round=7,
        attempt=attempt,
        parameters=parameters(num_sites, corrupt=corrupt, threat=threat, dropped=dropped),
        fewest_survivors=fewest,
        roster=members,
        member_list_version=4,
        lanes=lanes,
        bound_to=bound_to or {"base": "00" * 32},
    )


@dataclass
class Session:
    """All parties of one session. Each phase moves those that are still there; tests interfere between phases."""

    plan: SessionPlan
    keys: list[Ed25519PrivateKey] = field(default_factory=list)
    states: dict[int, SiteState] = field(default_factory=dict)
    server: AggregatorState = field(default_factory=AggregatorState)
    masked: dict[int, list[NDArray[np.unsignedinteger]]] = field(default_factory=dict)
    ring: bytes = b""

    def __post_init__(self) -> None:
        self.keys = self.keys or signing_keys(len(self.plan.roster))

    def advertise(self, sites: set[int], draw: Callable[[int], Secrets] = lambda _: Secrets.draw()) -> None:
        for index in sorted(sites):
            self.states[index] = site.advertise(self.plan, index, draw(index), self.keys[index])
            self.server = aggregator.take_advertised(self.plan, self.server, index, self.states[index].advertised)

    def share(self, sites: set[int]) -> None:
        """Everybody takes the keys (and opens the ring); those of `sites` send shares."""
        for index, state in self.states.items():
            self.states[index] = site.take_keys(self.plan, state, list(self.server.advertised.values()))
        if not self.plan.parameters.complete:
            for index, state in self.states.items():
                self.server = aggregator.take_nonce(self.plan, self.server, index, site.open_ring(state))
            for index, state in self.states.items():
                self.states[index] = site.take_ring(self.plan, state, self.server.nonces)
                self.ring = self.states[index].ring
        for index in sorted(sites & self.states.keys()):
            self.states[index] = site.share(self.plan, self.states[index], self.keys[index])
            self.server = aggregator.take_shared(self.plan, self.server, index, self.states[index].shared, self.ring)

    def delivery(self, receiver: int) -> list[bytes]:
        return [
            items[receiver] for owner, items in self.server.shared.items() if receiver in items and owner != receiver
        ]

    def send_inputs(self, sites: set[int], values: Mapping[int, list[NDArray[np.unsignedinteger]]]) -> None:
        for index in sorted(self.server.sharing):
            self.states[index] = site.take_shares(
                self.plan, self.states[index], self.server.sharing, self.delivery(index)
            )
        for index in sorted(sites & self.server.sharing):
            masked = [lane.copy() for lane in values[index]]
            for lane, masks in zip(masked, site.masks(self.plan, self.states[index]), strict=True):
                add_masks(lane, 0, masks)
            root = hashlib.sha256(b"".join(lane.tobytes() for lane in masked)).digest()
            self.states[index] = site.send_input(self.plan, self.states[index], root, self.keys[index])
            self.server = aggregator.take_input(self.plan, self.server, index, self.states[index].input, root)
            self.masked[index] = masked

    def confirm(self, sites: set[int]) -> None:
        self.server = aggregator.fix_survivors(self.plan, self.server)
        for index in sorted(sites & self.server.inputs.keys()):
            self.states[index] = site.confirm(self.plan, self.states[index], self.server.survivors, self.keys[index])
            self.server = aggregator.take_confirmation(self.plan, self.server, index, self.states[index].consistency)

    def unmask(self, sites: set[int]) -> None:
        for index in sorted(sites & self.server.confirmed.keys()):
            self.states[index] = site.unmask(
                self.plan, self.states[index], list(self.server.confirmed.values()), self.keys[index]
            )
            self.server = aggregator.take_unmasked(self.plan, self.server, index, self.states[index].unmasked)

    def result(self) -> tuple[list[NDArray[np.unsignedinteger]], Unmasking]:
        """The sums of all lanes over the survivors."""
        found = aggregator.unmasking(self.plan, self.server, self.ring)
        sums = [np.zeros(lane.num_values, dtype=f"<u{lane.bits // 8}") for lane in self.plan.lanes]
        for masked in self.masked.values():
            for total, lane in zip(sums, masked, strict=True):
                total += lane
        for total, masks in zip(sums, found.masks, strict=True):
            add_masks(total, 0, masks)
        return sums, found


def inputs(plan: SessionPlan, seed: int = 1) -> dict[int, list[NDArray[np.unsignedinteger]]]:
    """Levels of every site, small enough that their sums stay in their rings."""
    random = np.random.default_rng(seed)
    most = {16: 2**15, 32: 2**31, 64: 2**62}
    made = {}
    for index in range(len(plan.roster)):
        made[index] = [
            random.integers(-(most[lane.bits] // 2000), most[lane.bits] // 2000, lane.num_values)
            .astype(f"<i{lane.bits // 8}")
            .view(f"<u{lane.bits // 8}")
            for lane in plan.lanes
        ]
    return made


def naive_sum(values: Mapping[int, list[NDArray[np.unsignedinteger]]], sites: set[int]) -> list[list[int]]:
    """The sum in Python's own integers."""
    signed = {
        index: [lane.view(lane.dtype.str.replace("u", "i")).tolist() for lane in values[index]] for index in sites
    }
    lanes = range(len(next(iter(values.values()))))
    return [[sum(column) for column in zip(*(signed[index][lane] for index in sites), strict=True)] for lane in lanes]


def as_integers(sums: list[NDArray[np.unsignedinteger]]) -> list[list[int]]:
    return [lane.view(lane.dtype.str.replace("u", "i")).tolist() for lane in sums]


def run(
    plan: SessionPlan,
    values: Mapping[int, list[NDArray[np.unsignedinteger]]],
    *,
    keys: set[int],
    shares: set[int],
    sends: set[int],
    unmasks: set[int],
) -> Session:
    """A session in which exactly these sites are there in each phase."""
    session = Session(plan)
    session.advertise(keys)
    session.share(shares)
    session.send_inputs(sends, values)
    session.confirm(unmasks if plan.parameters.threat == "active" else sends)
    session.unmask(unmasks)
    return session
