"""A job's whole run in one process, plain or masked, in a federation or in a tree: only the training is made up.

Updates are files of the job's own layout, and a worker's own code masks them; the server's is the real driver. The
same job without `[privacy]` goes through the same driver, with the same updates, so the two models can be compared.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from samples.masked_run import APP_HASH, RUN, LightSite, Server, members
from samples.secagg_session import signing_keys
from torch import Tensor

from atoll.aggregation.encode import encode_update
from atoll.aggregation.lanes import FACTOR_UNIT, factors_in, run_manifest
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.rounding import Rounding
from atoll.aggregation.schedule import Committed, Joined
from atoll.aggregation.strategy import resolve
from atoll.cluster.masking import mask_by_strategy
from atoll.cluster.messages import Mask, MaskKey, Prepare, Train
from atoll.privacy.secagg import site as protocol
from atoll.privacy.secagg.agreement import Own, Terms, counters
from atoll.privacy.secagg.fixed_point import total
from atoll.privacy.secagg.keys import Mask as KeyedMask
from atoll.privacy.secagg.site import SiteState
from atoll.server.events import Delegated, EndedAbove, UpdateAccepted
from atoll.server.settings import UpstreamSection
from atoll.server.upstream import RegionWorker
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import RemoteError
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import DTYPES

MODEL = Manifest.build(
    [("w", "float32", (40, 5), "parameter"), ("norm", "float32", (7,), "buffer"), ("b", "float64", (3,), "parameter")]
)


def job_of(strategy: Mapping[str, Any], *, masked: bool = True, rounds: int = 1, **terms: Any) -> Job:
    """`terms` are those of secure aggregation."""
    table: dict[str, Any] = {
        "job": {"name": "whole", "app": "a", "rounds": rounds},
        "strategy": strategy,
        "evaluation": {"sites": False},
    }
    if masked:
        section = {"fewest_survivors": 3, "corrupt": 0.0, "deadline": 1.0, **terms}
        table["privacy"] = {"secure_aggregation": section}
    return parse_job(table)


@dataclass
class TrainedSite(LightSite):
    """A site of any job, with a worker's code for what it masks."""

    job: Job = field(kw_only=True)
    manifest: Manifest = field(kw_only=True)
    folder: Path = field(kw_only=True)

    def layout(self, round_: int) -> UpdateLayout:
        return resolve(self.job).fragments(self.manifest).of_round(round_).layout

    def update(self, round_: int) -> Path:
        """The file of what this site has trained in a round: the same whenever it is asked, masked or not."""
        layout, path = self.layout(round_), self.folder / f"{self.name}-{round_}"
        seed = int.from_bytes(hashlib.sha256(f"{self.name} {round_}".encode()).digest()[:6], "little")
        draw = torch.Generator().manual_seed(seed)
        differences: dict[str, Tensor] = {}
        for entry in layout.means:
            shape = entry.spec.shape
            drawn = torch.randn(shape, generator=draw, dtype=torch.float64) * 0.5
            differences[entry.spec.name] = drawn.to(DTYPES[entry.spec.dtype])
        for entry in factors_in(layout, resolve(self.job).lanes):
            differences[entry.spec.name] = torch.tensor((3.0 + seed % 7) * FACTOR_UNIT, dtype=torch.float64)
        out = bytearray(layout.num_bytes)
        zeros = {entry.spec.name: torch.zeros(entry.spec.shape) for entry in layout.means}
        rounding = Rounding(b"\x05" * 32)
        encode_update(layout, zeros, zeros, out, rounding=rounding, bound=1024.0, differences=differences)
        path.write_bytes(out)
        return path

    def train(self, task: pb.Task) -> None:
        if self.job.secure_aggregation is not None:
            super().train(task)
            return
        assert self.server is not None
        driver, data = self.server.driver, self.update(task.round).read_bytes()
        metrics = {"loss": (self.weight * 0.5, float(self.weight))}
        give(self.server, self.name, task, self.weight, metrics, memoryview(data))
        assert driver is not None

    def mask(self, terms: Terms, state: SiteState) -> bytes:
        exact, reals = protocol.masks(terms.plan, state)
        return self.masked_by(terms, exact, reals)

    def masked_by(self, terms: Terms, exact: Sequence[KeyedMask] = (), reals: Sequence[KeyedMask] = ()) -> bytes:
        """The input to a session under these masks: bare levels without any."""
        strategy, round_ = resolve(self.job), terms.opening.round
        out = self.folder / f"{self.name}.masked"
        request = Mask(
            key="a",
            round=round_,
            private_path=str(self.update(round_)),
            out_path=str(out),
            exact=counters(terms, self.weight, {"loss": (self.weight * 0.5, self.weight)}),
            exact_masks=_keys(exact),
            masks=_keys(reals),
            bits=terms.bits,
            scale=terms.scale,
            share=self.weight / terms.max_weight,
            num_sites=terms.num_sites,
            bound=terms.section.bound,
            max_clipped=terms.max_clipped,
        )
        secret = hashlib.sha256(self.name.encode()).digest()
        found = mask_by_strategy(strategy, self.layout(round_), request, secret, on_slice=lambda: None)
        data = out.read_bytes()
        assert found.sha256_hex == hashlib.sha256(data).hexdigest()
        return data


def _keys(masks: Sequence[KeyedMask]) -> list[MaskKey]:
    return [MaskKey(key_hex=one.key.hex(), negative=one.negative) for one in masks]


def give(server: Server, site: str, task: pb.Task, weight: int, metrics: Any, data: memoryview) -> None:
    """An update, or a region's sum, on its plain way: checked, journalled, folded."""
    driver, key = server.driver, task.key
    round_ = driver.state.round_of(key.task, key.attempt)
    driver.pipeline.check(round_, site, weight, data, metrics)

    async def fold() -> None:
        now = driver.state.round_of(key.task, key.attempt)
        await driver.durably(driver.pipeline.fold, now, site, weight, data)

    event = UpdateAccepted(
        task=key.task, attempt=key.attempt, site=site, round=task.round, weight=weight, metrics=metrics
    )
    driver.tell(event, fold)


def sites_of(job: Job, folder: Path, names: Sequence[str], labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Sites of unlike weights; `labels`: value of "region" by name."""
    manifest = run_manifest(MODEL, resolve(job).lanes)
    sites: dict[str, TrainedSite] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, key) in enumerate(zip(names, signing_keys(len(names)), strict=True)):
        site = TrainedSite(
            name=name,
            key=key,
            own=lambda: _own(job, sites),
            weight=7 * number + 3,
            labels={"region": labels[name]} if labels else {},
            job=job,
            manifest=manifest,
            folder=folder,
        )
        sites[name] = site
    return sites


def _own(job: Job, sites: Mapping[str, TrainedSite]) -> Own:
    one = next(iter(sites.values()))
    layout = one.layout(max(site.trained for site in sites.values()) or 1)
    return Own(
        job=job,
        app_hash=APP_HASH,
        schema_hash=one.manifest.schema_hash,
        num_values=layout.num_values,
        num_factors=len(factors_in(layout, resolve(job).lanes)),
        members=members(sites),
    )


def played(job: Job, folder: Path, sites: Mapping[str, TrainedSite]) -> Server:
    """The run, to its end."""
    manifest = run_manifest(MODEL, resolve(job).lanes)
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder, job, sites, manifest=manifest)
    asyncio.run(server.run())
    return server


def naive(
    terms: Terms, sites: Mapping[str, TrainedSite], names: Sequence[str], *, weighted: bool = True
) -> NDArray[Any]:
    """The mean of a session over `names`, of bare levels that Python's own integers add up."""
    head = terms.plan.lanes[0].num_bytes
    rows = [
        total(np.frombuffer(sites[name].masked_by(terms), f"<u{terms.bits // 8}", offset=head)).tolist()
        for name in names
    ]
    summed = np.array([sum(column) for column in zip(*rows, strict=True)], dtype=np.float64)
    weight = sum(sites[name].weight for name in names)
    return summed * (terms.quantum * (terms.max_weight / weight if weighted else 1 / len(names)))


# --- a tree ----------------------------------------------------------------------------------------------------------


class RegionSite:
    """A site of the upper server that is a server with sites of its own: its worker is the real one of a region."""

    def __init__(self, name: str, job: Job, folder: Path, sites: Mapping[str, TrainedSite]) -> None:
        self.name, self.job, self.folder, self.sites = name, job, folder, sites
        self.key = signing_keys(1)[0]
        self.labels: Mapping[str, str] = {}
        self.weight = max(site.weight for site in sites.values())
        self.server: Server | None = None  # the upper one
        self.own: Server | None = None
        self.masked = b""
        self.errors: list[RemoteError] = []
        self.partials: list[bytes] = []
        runs = SimpleNamespace(delegate=self._delegate)
        section = UpstreamSection(home=folder, min_sites=len(sites), quorum=3)
        up: Any = SimpleNamespace(
            section=section,
            runs=runs,
            max_model_bytes=1 << 30,
            begun=lambda key, event: None,
            done=lambda key: None,
        )
        self.worker = RegionWorker(up)

    async def _delegate(self, row: Any, manifest: Manifest, delegated: Delegated) -> Any:
        self.own = Server(self.folder, self.job, self.sites, manifest=manifest, delegated=delegated)
        self._driving = await self.own.begin()
        return self.own.driver

    async def prepare(self) -> None:
        assert self.server is not None
        (self.folder / "manifest").write_bytes(self.server.manifest.encode())
        prepared = await self.worker.prepare(
            Prepare(
                run=RUN,
                site=self.name,
                app_name="a",
                distribution="",
                entry_point="",
                app_hash=APP_HASH,
                data={},
                job=self.job.canonical().decode(),
                manifest_path=str(self.folder / "manifest"),
                state_folder="",
                submitted_by="ada",
            )
        )
        self.joined = Joined(
            site=self.name,
            max_weight=prepared.max_weight,
            labels={},
            num_sites=prepared.num_sites,
            sum_weights=prepared.sum_weights,
        )

    def hear(self, message: pb.ServerMessage) -> None:
        assert self.own is not None
        match message.WhichOneof("body"):
            case "task":
                self._training = asyncio.ensure_future(self._train(message.task))
            case "committed":
                said = message.committed
                self.own.driver.tell(Committed(round=said.round, version=said.version))
            case "run_ended":
                self.own.driver.tell(EndedAbove(outcome=message.run_ended.status, reason=""))

    async def _train(self, task: pb.Task) -> None:
        assert self.server is not None
        out = self.folder / "sum"
        try:
            trained = await self.worker.train(
                Train(
                    key=f"{RUN}/{task.key.task}#{task.key.attempt}",
                    round=task.round,
                    base_version=task.base_version,
                    base_path=str(self.server.models.path(task.base_version)),
                    out_path=str(out),
                    num_sites=task.sum.num_sites,
                    max_weight=task.sum.max_weight,
                    counted_round=task.counted_round,
                )
            )
        except RemoteError as error:
            self.errors.append(error)
            return
        data = out.read_bytes()
        self.partials.append(data)
        give(self.server, self.name, task, trained.weight, trained.metrics, memoryview(data))


class TopServer(Server):
    """The upper server of a tree."""

    def joined(self, site: Any) -> Joined:
        found: Joined = site.joined
        return found

    async def play(self) -> None:
        """The run, to its end."""
        for site in self.sites.values():
            await site.prepare()  # type: ignore[attr-defined]
        await self.run()
        for site in self.sites.values():
            async with asyncio.timeout(10):
                await site._driving  # type: ignore[attr-defined]
