"""A run with secure aggregation in one process: the server's driver over a real store, and sites without torch.

Sites answer as the protocol's pure side says (`privacy.secagg.site`), with updates drawn by lot, and stop in the phase
that a test names. What a killed server has in memory is gone with its `Server`; the store and the models stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from samples.secagg_session import signing_keys

from atoll.aggregation.schedule import Joined
from atoll.aggregation.stages import Strategies
from atoll.privacy.secagg import site as protocol
from atoll.privacy.secagg.agreement import Opening, Own, Terms, agree, counters, payload_name
from atoll.privacy.secagg.fixed_point import Quantiser
from atoll.privacy.secagg.masks import add_masks
from atoll.privacy.secagg.messages import read_bitmap
from atoll.privacy.secagg.site import Secrets, SiteState
from atoll.server.driver import RunDriver
from atoll.server.events import Delegated, UpdateAccepted, encode_event
from atoll.server.models import RunModels
from atoll.server.plan import delegated_plan, plan_of, work_of
from atoll.server.records import RunRow
from atoll.server.secure_driver import SecureDriver
from atoll.server.steps import Step, unobserved
from atoll.server.store import Store
from atoll.server.transfers import Whole
from atoll.wire import control_pb2 as pb
from atoll.wire import runs_pb2, secure_pb2
from atoll.wire.errors import RemoteError, to_detail
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.members_pb2 import ACTIVE, Member, MemberList, SignedMemberList
from atoll.wire.model_file import open_model

RUN = "01JDQ3T4V8Z6K1M2N3P4Q5R6S7"
APP_HASH = "ab" * 32
MANIFEST = Manifest.build(
    [("w", "float32", (40, 5), "parameter"), ("norm", "float32", (7,), "buffer"), ("b", "float64", (3,), "parameter")]
)
NUM_VALUES = 210


def job_of(num_sites: int = 5, *, rounds: int = 1, schedule: Mapping[str, Any] | None = None, **terms: Any) -> Job:
    return parse_job(
        {
            "job": {"name": "masked", "app": "a", "rounds": rounds},
            "strategy": {"schedule": schedule or {"kind": "rounds", "min": num_sites}},
            "evaluation": {"sites": False},
            "privacy": {"secure_aggregation": {"fewest_survivors": 3, "corrupt": 0.0, "deadline": 1.0, **terms}},
        }
    )


def update_of(site: str, round_: int) -> NDArray[np.float64]:
    """What a site has trained in a round: the same whenever it is asked."""
    seed = int.from_bytes(hashlib.sha256(f"{site} {round_}".encode()).digest()[:8], "little")
    return np.random.default_rng(seed).normal(0, 0.5, NUM_VALUES)


def levels_of(terms: Terms, site: str, round_: int, weight: int, discount: float = 1.0) -> NDArray[np.uint32]:
    """The levels that a site puts in: the same in every session of a round."""
    key = hashlib.sha256(f"rounding {site} {round_}".encode()).digest()
    levels = np.empty(NUM_VALUES, dtype=f"<u{terms.bits // 8}")
    quantiser = Quantiser(key, scale=terms.scale * weight / terms.max_weight * discount, bits=terms.bits)
    quantiser.write(update_of(site, round_), 0, levels)
    return levels


@dataclass
class LightSite:
    """One site. `stops_at`: the step that it does not answer any more, by session; "" answers all."""

    name: str
    key: Ed25519PrivateKey
    own: Callable[[], Own]
    weight: int
    stops_at: Mapping[int, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    lies: Callable[[pb.SecureAnswer], pb.SecureAnswer] = lambda answer: answer
    server: Server | None = None
    terms: Terms | None = None
    state: SiteState | None = None
    trained: int = 0  # round
    masked: bytes = b""
    ended: list[secure_pb2.SecureEnd] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)

    def hear(self, message: pb.ServerMessage) -> None:
        match message.WhichOneof("body"):
            case "task":
                self.train(message.task)
            case "secure_step":
                self.step(message.secure_step)

    def train(self, task: pb.Task) -> None:
        assert self.server is not None
        self.trained = task.round
        self.server.driver.tell(
            UpdateAccepted(
                task=task.key.task, attempt=task.key.attempt, site=self.name, round=task.round, weight=0, metrics={}
            )
        )

    def step(self, step: pb.SecureStep) -> None:
        kind = step.WhichOneof("step")
        assert kind is not None
        self.heard.append(kind)
        if kind == "end":
            self.ended.append(step.end)
            return
        if self.stops_at.get(step.session, self.stops_at.get(0, "")) == kind:
            return
        try:
            answer = pb.SecureAnswer(key=step.key, session=step.session, **self.answer(kind, step))
        except RemoteError as error:
            answer = pb.SecureAnswer(key=step.key, session=step.session, refused=to_detail(error))
        said = self.lies(answer)
        server = self.server
        assert server is not None
        # One after the other, as from processes.
        delay_s = 0.002 * list(server.sites).index(self.name)
        asyncio.get_running_loop().call_later(delay_s, lambda: server.driver.secure.answered(self.name, said))

    def answer(self, kind: str, step: pb.SecureStep) -> dict[str, Any]:
        if kind == "plan":
            opening = Opening.decode(step.plan.opening)
            agreed = agree(opening, self.own())
            assert agreed.plan.hash == step.plan.hash
            if self.terms is None or self.terms.plan.hash != agreed.plan.hash:
                self.terms = agreed
                self.state = protocol.advertise(agreed.plan, agreed.index(self.name), Secrets.draw(), self.key)
            assert self.state is not None
            return {"advertised": self.state.advertised}
        terms, state = self.terms, self.state
        assert terms is not None
        assert state is not None
        plan = terms.plan
        match kind:
            case "keys":
                if not state.public:
                    state = protocol.take_keys(plan, state, list(step.keys.advertised))
                if not plan.parameters.complete:
                    self.state = state
                    return {"ring_nonce": protocol.open_ring(state)}
                self.state = protocol.share(plan, state, self.key)
                return {"shared": secure_pb2.SecureShared(items=self.state.shared)}
            case "ring":
                if not state.ring:
                    state = protocol.take_ring(plan, state, {one.site: one.nonce for one in step.ring.nonces})
                self.state = protocol.share(plan, state, self.key)
                return {"shared": secure_pb2.SecureShared(items=self.state.shared)}
            case "shares":
                if not state.sharing:
                    sharing = read_bitmap(step.shares.sharing, terms.num_sites)
                    state = protocol.take_shares(plan, state, sharing, list(step.shares.items))
                    self.masked = self.mask(terms, state)
                    root = hashlib.sha256(self.masked).digest()
                    state = protocol.send_input(plan, state, root, self.key)
                self.state = state
                return {"input": secure_pb2.SecureInput(declared=state.input, crc32=zlib.crc32(self.masked))}
            case "survivors":
                self.state = protocol.confirm(plan, state, step.survivors, self.key)
                return {"confirmation": self.state.consistency}
            case _:
                self.state = protocol.unmask(plan, state, list(step.confirmations.confirmed), self.key)
                return {"unmasked": self.state.unmasked}

    def mask(self, terms: Terms, state: SiteState) -> bytes:
        """The masked input: lane 0, then lane 1."""
        lanes = [
            np.array(counters(terms, self.weight, {"loss": (self.weight * 0.5, self.weight)}), dtype="<u8"),
            levels_of(terms, self.name, self.trained, self.weight),
        ]
        for lane, masks in zip(lanes, protocol.masks(terms.plan, state), strict=True):
            add_masks(lane, 0, masks)
        return b"".join(lane.tobytes() for lane in lanes)


class Server:
    """The driver of one run over a folder, from its start to a kill."""

    def __init__(
        self,
        folder: Path,
        job: Job,
        sites: Mapping[str, LightSite],
        on_step: Callable[[Step, str], None] = unobserved,
        *,
        manifest: Manifest = MANIFEST,
        delegated: Delegated | None = None,
    ) -> None:
        self.manifest = manifest
        self.sites = sites
        self.bytes_up = 0
        self.dead = False
        self.store = Store.open(f"sqlite:///{folder}/state.sqlite")
        if self.store.member_list() is None:
            self.store.save_member_list(
                3, SignedMemberList(member_list=members(sites).SerializeToString()).SerializeToString()
            )
        row = RunRow(
            run=RUN,
            name=job.job.name,
            job=job.canonical(),
            app_hash=APP_HASH,
            submitted_by="ada",
            crc32=0,
            status="queued",
            reason=None,
            submitted_at=datetime.now(UTC),
        )
        first = [] if delegated is None else [encode_event(delegated)]
        row = self.store.create_run(row, manifest=self.manifest.encode(), request="r", events=first)
        self.models = RunModels(folder / "models", RUN, self.manifest)
        self.models.prepare()
        if not self.models.has(0):
            with self.models.create(0, {}) as out:
                out[:] = bytes(self.manifest.num_bytes)
        stages = Strategies(job)
        made: Any = RunDriver if job.secure_aggregation is None else partial(SecureDriver, upload=self.upload)
        self.driver: Any = made(
            row=row,
            job=job,
            plan=plan_of(job) if delegated is None else delegated_plan(job, delegated),
            pipeline=work_of(row, job, stages, self.manifest, self.models),
            models=self.models,
            manifest=self.manifest,
            store=self.store,
            around=self,
            keep_versions=9,
            on_step=on_step,
        )
        self.driver.summary.show(complete=self.driver.pipeline.complete)
        for site in sites.values():
            site.server = self

    async def begin(self) -> asyncio.Future[None]:
        """The run under way, with all sites there from the beginning."""
        driving: asyncio.Future[None] = asyncio.ensure_future(self.driver.drive())
        await self.driver.started()
        for site in self.sites.values():
            self.driver.tell(self.joined(site))
            if site.name in self.driver.state.members:
                self.driver.resend_tasks(site.name)

        async def all_are_there() -> None:
            self.driver.nobody_left_to_ask()

        self.driver.tell(None, all_are_there)
        return driving

    def joined(self, site: LightSite) -> Joined:
        return Joined(site=site.name, max_weight=site.weight, labels=site.labels)

    async def run(self) -> None:
        """To the end of the run."""
        driving = await self.begin()
        try:
            async with asyncio.timeout(30):
                await driving
        finally:
            driving.cancel()
            self.dead = True

    @property
    def record(self) -> runs_pb2.RoundRecord:
        found: runs_pb2.RoundRecord = self.driver.summary.snapshot().rounds[-1]
        return found

    def model(self, version: int = 1) -> NDArray[np.float64]:
        """The values of a version in the order of the flat vector."""
        with open_model(self.models.path(version)) as model:
            data = bytes(model.map)
        return np.concatenate(
            [
                np.frombuffer(data[spec.offset : spec.offset + spec.num_bytes], dtype=spec.dtype).astype(np.float64)
                for spec in self.manifest
            ]
        )

    # --- Surroundings -----------------------------------------------------------------------------------------------

    def send(self, site: str, **body: Any) -> None:
        if not self.dead:
            message = pb.ServerMessage(**body)
            asyncio.get_running_loop().call_soon(self.sites[site].hear, message)

    def upload(self, site: str, key: pb.TaskKey, payload: pb.Payload, whole: Whole) -> None:
        masked = self.sites[site].masked
        assert payload.num_bytes == len(masked)
        assert payload.crc32 == zlib.crc32(masked)
        assert payload.name.startswith(payload_name(1)[:-1])
        self.bytes_up += len(masked)
        asyncio.ensure_future(whole(memoryview(masked)))  # noqa: RUF006  the loop of a test outlives it

    def withdraw_transfers(self, run: str, site: str | None, reason: RemoteError) -> None:
        pass

    def regions(self, sites: Any) -> tuple[str, ...]:
        return ()

    def shortfall(self, run: str) -> str:
        return "too few"

    async def evaluate(self, run: str, version: int) -> Any:
        return {}

    def transferred(self, run: str) -> tuple[int, int]:
        return self.bytes_up, 0

    def introduce(self, run: str) -> None:
        pass

    def run_ended(self, run: str) -> None:
        pass


def members(sites: Mapping[str, LightSite]) -> MemberList:
    found = [
        Member(
            site=site.name,
            organisation=f"of {site.name}",
            signing_key=site.key.public_key().public_bytes_raw(),
            status=ACTIVE,
        )
        for site in sites.values()
    ]
    return MemberList(federation="reef", version=3, members=found)


def make_sites(job: Job, num_sites: int = 5) -> dict[str, LightSite]:
    """Sites of unlike weights."""
    sites: dict[str, LightSite] = {}

    def own() -> Own:
        return Own(
            job=job,
            app_hash=APP_HASH,
            schema_hash=MANIFEST.schema_hash,
            num_values=NUM_VALUES,
            members=members(sites),
        )

    for number, key in enumerate(signing_keys(num_sites)):
        name = f"site-{number:03d}"
        sites[name] = LightSite(name=name, key=key, own=own, weight=7 * number + 3)
    return sites


def expected(sites: Mapping[str, LightSite], survivors: list[str], round_: int = 1) -> NDArray[np.float64]:
    """The mean difference of a round, of the levels added up in Python's own integers."""
    terms = next(site.terms for site in sites.values() if site.name in survivors)
    assert terms is not None
    rows = [
        levels_of(terms, name, round_, sites[name].weight).view(f"<i{terms.bits // 8}").tolist() for name in survivors
    ]
    total = np.array([sum(column) for column in zip(*rows, strict=True)], dtype=np.float64)
    weight = sum(sites[name].weight for name in survivors)
    found: NDArray[np.float64] = total * (terms.quantum * (terms.max_weight / weight))
    return found


def plain(sites: Mapping[str, LightSite], survivors: list[str], round_: int = 1) -> NDArray[np.float64]:
    """The same by fedavg without masks."""
    weight = sum(sites[name].weight for name in survivors)
    rows = [sites[name].weight * update_of(name, round_) for name in survivors]
    found: NDArray[np.float64] = sum(rows) / weight  # type: ignore[assignment]
    return found


def terms_of(num_sites: int, **changed: Any) -> tuple[Terms, dict[str, LightSite]]:
    """The terms of a session, and its sites."""
    job = job_of(num_sites, **changed)
    sites = make_sites(job, num_sites)
    opening = Opening(
        run=RUN,
        round=1,
        session=1,
        sites=tuple(sorted(sites)),
        member_list_version=3,
        max_weight=max(site.weight for site in sites.values()),
        base_version=0,
        digests={0: "00" * 32},
    )
    own = Own(
        job=job, app_hash=APP_HASH, schema_hash=MANIFEST.schema_hash, num_values=NUM_VALUES, members=members(sites)
    )
    return agree(opening, own), sites
