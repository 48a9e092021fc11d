"""Sites with sessions of secure aggregation on their disks, a worker's masking, and a server between them in memory.

The server is honest unless a test makes it say something else: it keeps what sites answer as `AggregatorState`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from atoll.aggregation.encode import encode_update
from atoll.aggregation.layout import UpdateLayout, update_layout
from atoll.aggregation.rounding import Rounding
from atoll.aggregation.strategy import resolve
from atoll.client.party import Agreed, Party
from atoll.client.private_update import Facts, PrivateUpdate
from atoll.client.revealed import RevealedBook
from atoll.client.sealed import Sealer
from atoll.client.secure_session import SecureSession
from atoll.cluster.masking import mask_update
from atoll.cluster.messages import Mask, Masked
from atoll.privacy.secagg import aggregator
from atoll.privacy.secagg.aggregator import AggregatorState
from atoll.privacy.secagg.agreement import Counted, Opening, Own, Terms, agree, read_counters
from atoll.privacy.secagg.fixed_point import total
from atoll.privacy.secagg.masks import add_masks
from atoll.privacy.secagg.messages import bitmap
from atoll.transport.tasks import Key
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import PolicyRefused
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.members_pb2 import ACTIVE, Member, MemberList
from atoll.wire.secure_pb2 import (
    SecureConfirmations,
    SecureEnd,
    SecureKeys,
    SecureNonce,
    SecurePlan,
    SecureRing,
    SecureShares,
)

RUN = "01JD0000000000000000000000"
MANIFEST = Manifest.build([("weight", "float32", (40, 5), "parameter"), ("bias", "float32", (7,), "parameter")])
BASE = hashlib.sha256(b"the data of version 0").hexdigest()
MAX_WEIGHT = 64


def make_job(**secure: object) -> Job:
    terms: dict[str, object] = {"fewest_survivors": 3, "corrupt": 0.0, "metrics": ["loss"], **secure}
    return parse_job(
        {
            "job": {"name": "probe", "app": "probe", "rounds": 9},
            "strategy": {"schedule": {"kind": "rounds", "min": 5, "quorum": 5}},
            "evaluation": {"sites": False},
            "privacy": {"secure_aggregation": terms},
        }
    )


def signing_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"signing " + name.encode()).digest())


def member_list(names: Iterable[str], *, version: int = 1, organisations: int = 1000) -> MemberList:
    members = [
        Member(
            site=name,
            organisation=f"organisation-{number % organisations}",
            signing_key=signing_key(name).public_key().public_bytes_raw(),
            status=ACTIVE,
        )
        for number, name in enumerate(sorted(names))
    ]
    return MemberList(federation="probe", version=version, members=members)


@dataclass
class Site:
    """One site, with an update of round 1 that stays there."""

    name: str
    root: Path
    job: Job
    members: MemberList
    weight: int = 10
    task: str = "train-1"
    base_digest: str = BASE
    sums_stale: bool = False
    refuses: str = ""  # policy, while it is not empty
    across_runs: bool = False
    run: str = RUN
    reads: int = 0

    def __post_init__(self) -> None:
        self.secret = hashlib.sha256(b"secret " + self.name.encode()).digest()
        self.layout: UpdateLayout = update_layout(MANIFEST, resolve(self.job).codec, "mean")
        generator = torch.Generator().manual_seed(int.from_bytes(self.secret[:4], "big"))
        self.values = {
            spec.name: torch.empty(spec.shape).uniform_(-1, 1, generator=generator) for spec in self.layout.manifest
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.update.path.exists():
            self.train()
        self.session = self.restarted()

    @property
    def key(self) -> Key:
        return Key(run=self.run, task=self.task, attempt=1)

    @property
    def folder(self) -> Path:
        return self.root / self.name / "outbox" / f"{self.run}_{self.task}_1"

    @property
    def sealer(self) -> Sealer:
        return Sealer(self.secret)

    @property
    def update(self) -> PrivateUpdate:
        return PrivateUpdate(self.folder, self.sealer)

    def train(self, base_version: int = 0, round_: int = 1) -> None:
        """Write an update, as the worker does, and keep it."""
        zeros = {name: torch.zeros_like(tensor) for name, tensor in self.values.items()}
        data = bytearray(self.layout.num_bytes)
        encode_update(self.layout, zeros, self.values, data, rounding=Rounding(bytes(32)), bound=1024.0)
        self.update.path.write_bytes(data)
        self.update.keep(
            Facts(
                round=round_,
                base_version=base_version,
                base_digest=self.base_digest,
                weight=self.weight,
                metrics={"loss": (1.5 * self.weight, float(self.weight)), "accuracy": (1.0, 2.0)},
                num_values=self.layout.num_values,
                sums_stale=self.sums_stale,
            )
        )

    def restarted(self) -> SecureSession:
        """The session as a new process of the agent finds it."""
        party = Party(
            name=self.name,
            signing=signing_key(self.name),
            members=lambda: self.members,
            sealer=self.sealer,
            book=RevealedBook(self.root / self.name / "revealed", self.sealer),
            consent=self._consent,
        )
        self.session = SecureSession(self.key, self.folder, party)
        return self.session

    def _consent(self, run: str, terms: Terms) -> bool:
        if self.refuses:
            raise PolicyRefused(self.refuses, field="require_secagg")
        return self.across_runs

    @property
    def agreed(self) -> Agreed:
        return Agreed(job=self.job, app_hash="0" * 64, schema_hash=MANIFEST.schema_hash)

    def hear(self, step: pb.SecureStep) -> pb.SecureAnswer | None:
        """The site's answer, with its worker's part done."""
        found = self.session.take(step, self.agreed)
        if isinstance(found, Mask):
            return self.session.masked(step, self.mask(found))
        return found

    def mask(self, order: Mask) -> Masked:
        return mask_update(self.layout, order, self.secret, discount=1.0, on_slice=lambda: None)


@dataclass
class Server:
    """An honest server of one session. `steps` make the messages; `go` plays a phase with those who are there."""

    sites: dict[str, Site]
    opening: Opening
    members: MemberList
    job: Job
    state: AggregatorState = field(default_factory=AggregatorState)
    answers: dict[tuple[str, str], pb.SecureAnswer] = field(default_factory=dict)
    ring: bytes = b""

    def __post_init__(self) -> None:
        own = Own(
            job=self.job,
            app_hash="0" * 64,
            schema_hash=MANIFEST.schema_hash,
            num_values=next(iter(self.sites.values())).layout.num_values,
            members=self.members,
        )
        self.terms: Terms = agree(self.opening, own)
        self.plan = self.terms.plan

    def step(self, name: str, **body: Any) -> pb.SecureStep:
        return pb.SecureStep(key=self.sites[name].key.to_message(), session=self.opening.session, **body)

    def plan_step(self, name: str) -> pb.SecureStep:
        return self.step(name, plan=SecurePlan(opening=self.opening.canonical(), hash=self.plan.hash))

    def keys_step(self, name: str) -> pb.SecureStep:
        return self.step(name, keys=SecureKeys(advertised=self.state.advertised.values()))

    def ring_step(self, name: str) -> pb.SecureStep:
        nonces = [SecureNonce(site=site, nonce=nonce) for site, nonce in self.state.nonces.items()]
        return self.step(name, ring=SecureRing(nonces=nonces))

    def shares_step(self, name: str) -> pb.SecureStep:
        own = self.terms.index(name)
        items = [items[own] for owner, items in self.state.shared.items() if own in items and owner != own]
        sharing = bitmap(self.state.sharing, self.terms.num_sites)
        return self.step(name, shares=SecureShares(sharing=sharing, items=items))

    def survivors_step(self, name: str) -> pb.SecureStep:
        return self.step(name, survivors=self.state.survivors)

    def confirmations_step(self, name: str) -> pb.SecureStep:
        confirmed = self.state.confirmed.values() if self.plan.parameters.threat == "active" else []
        return self.step(name, confirmations=SecureConfirmations(confirmed=confirmed))

    def end_step(self, name: str, version: int = 1, reason: str = "") -> pb.SecureStep:
        return self.step(name, end=SecureEnd(version=version, reason=reason))

    def go(self, phase: str, names: Iterable[str] | None = None) -> None:
        """One phase: each of `names` hears its step, and what it answers is taken."""
        if phase == "survivors":
            self.state = aggregator.fix_survivors(self.plan, self.state)
        for name in sorted(names if names is not None else self.opening.sites):
            answer = self.sites[name].hear(getattr(self, f"{phase}_step")(name))
            assert answer is not None
            assert answer.WhichOneof("answer") != "refused", answer.refused.message
            self.answers[name, phase] = answer
            self.take(name, answer)

    def take(self, name: str, answer: pb.SecureAnswer) -> None:
        own, kind = self.terms.index(name), answer.WhichOneof("answer")
        if kind == "advertised":
            self.state = aggregator.take_advertised(self.plan, self.state, own, answer.advertised)
        elif kind == "ring_nonce":
            self.state = aggregator.take_nonce(self.plan, self.state, own, answer.ring_nonce)
        elif kind == "shared":
            if self.state.nonces:
                self.ring = self.sites[name].session._state.site.ring  # type: ignore[union-attr]
            items = tuple(answer.shared.items)
            self.state = aggregator.take_shared(self.plan, self.state, own, items, self.ring)
        elif kind == "input":
            digest = hashlib.sha256(self.masked(name)).digest()
            self.state = aggregator.take_input(self.plan, self.state, own, answer.input.declared, digest)
        elif kind == "confirmation":
            self.state = aggregator.take_confirmation(self.plan, self.state, own, answer.confirmation)
        elif kind == "unmasked":
            self.state = aggregator.take_unmasked(self.plan, self.state, own, answer.unmasked)

    def masked(self, name: str) -> bytes:
        return self.sites[name].session.masked_path(self.opening.session).read_bytes()

    def sums(self) -> tuple[list[int], NDArray[np.int64]]:
        """Both lanes of the sum, without masks."""
        found = aggregator.unmasking(self.plan, self.state, self.ring)
        exact, reals = self.plan.lanes
        sums = [np.zeros(exact.num_values, "<u8"), np.zeros(reals.num_values, f"<u{reals.bits // 8}")]
        for own in self.state.inputs:
            data = self.masked(self.opening.sites[own])
            sums[0] += np.frombuffer(data, "<u8", count=exact.num_values)
            sums[1] += np.frombuffer(data, sums[1].dtype, offset=exact.num_bytes)
        for lane, masks in zip(sums, found.masks, strict=True):
            add_masks(lane, 0, masks)
        return sums[0].tolist(), total(sums[1])

    def counted(self) -> Counted:
        return read_counters(self.terms, self.sums()[0])


def make_opening(sites: Iterable[str], **changes: object) -> Opening:
    table: dict[str, object] = {
        "run": RUN,
        "round": 1,
        "session": 1,
        "sites": tuple(sorted(sites)),
        "member_list_version": 1,
        "max_weight": MAX_WEIGHT,
        "base_version": 0,
        "digests": {0: BASE},
        **changes,
    }
    return Opening(**table)  # type: ignore[arg-type]


def federation(root: Path, num_sites: int = 5, *, job: Job | None = None) -> dict[str, Site]:
    """Sites "s0", "s1", ... of an organisation each."""
    job = job or make_job()
    names = [f"s{number}" for number in range(num_sites)]
    members = member_list(names)
    return {name: Site(name, root, job, members, weight=10 + n % 50) for n, name in enumerate(names)}


def serve(sites: dict[str, Site], **changes: object) -> Server:
    """The server of a session over these sites."""
    one = next(iter(sites.values()))
    roster = changes.pop("sites", tuple(sites))
    return Server(sites, make_opening(roster, **changes), one.members, one.job)  # type: ignore[arg-type]


def sent(site: Site, server: Server) -> list[int]:
    """Levels of a site's update, by a session of its own with nobody: quantised and not masked."""
    order = Mask(
        key="naive",
        round=1,
        private_path=str(site.update.path),
        out_path=str(site.root / f"{site.name}.levels"),
        exact=[0, 0, 0, 0],
        exact_masks=[],
        masks=[],
        bits=server.terms.bits,
        scale=server.terms.scale,
        share=site.weight / MAX_WEIGHT,
        bound=server.terms.section.bound,
    )
    site.mask(order)
    data = Path(order.out_path).read_bytes()
    levels: list[int] = total(np.frombuffer(data, f"<u{server.terms.bits // 8}", offset=32)).tolist()
    return levels
