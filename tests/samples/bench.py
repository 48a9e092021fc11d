"""A run on one machine, without agent and server: an installed app, version 0, and each site's data and requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.cluster.messages import Evaluate, Mask, MaskKey, Prepare, Train
from atoll.cluster.registry import AppEntry
from atoll.wire.job import Job

DISTRIBUTION = "probe-distribution"
MASK_KEYS = [MaskKey(key_hex=f"{number:064x}", negative=number % 2 == 0) for number in range(1, 4)]
ENTRY_POINTS = {"probe": "probe_app:Probe", "keeping": "probe_app:Keeping", "no_app": "probe_app:not_an_app"}


def install(folder: Path, *, name: str, files: dict[str, str], entry_points: dict[str, str]) -> None:
    """Lays a distribution into `folder` as pip does: files, METADATA, entry points, RECORD."""
    metadata = f"{name.replace('-', '_')}-1.0.dist-info"
    points = "".join(f"{point} = {value}\n" for point, value in entry_points.items())
    written = {
        **files,
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{metadata}/entry_points.txt": f"[atoll.apps]\n{points}",
        f"{metadata}/INSTALLER": "pip\n",
    }
    written[f"{metadata}/RECORD"] = "".join(f"{path},,\n" for path in [*written, f"{metadata}/RECORD"])
    for path, text in written.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A run on one machine: version 0, its manifest, and each site's requests."""

    folder: Path
    job: Job
    entry: AppEntry
    app_hash: str
    environment: dict[str, str]

    @property
    def base(self) -> Path:
        return self.folder / "version-0.safetensors"

    def data(self, site: str) -> Path:
        return self.folder / f"{site}.npz"

    def prepare(self, site: str, **changes: Any) -> Prepare:
        fields: dict[str, Any] = {
            "run": "run-1",
            "site": site,
            "app_name": self.entry.name,
            "distribution": self.entry.distribution,
            "entry_point": self.entry.entry_point,
            "app_hash": self.app_hash,
            "data": {"path": str(self.data(site))},
            "job": self.job.canonical().decode(),
            "manifest_path": str(self.folder / "manifest"),
            "state_folder": str(self.folder / f"state-{site}"),
            "rounding_seed_hex": "07" * 32,
        }
        return Prepare(**{**fields, **changes})

    def train(
        self,
        out: str,
        *,
        round: int = 1,
        config: dict[str, Any] | None = None,
        base: Path | None = None,
        counted_round: int = 0,
    ) -> Train:
        return Train(
            key=f"train/{out}",
            round=round,
            base_version=0,
            base_path=str(base or self.base),
            out_path=str(self.folder / out),
            config=config or {},
            counted_round=counted_round,
        )

    def mask(self, out: str = "masked", **changes: Any) -> Mask:
        """To write the update "update" once more as the input of a session."""
        fields: dict[str, Any] = {
            "key": "run/task#1/1",
            "round": 1,
            "private_path": str(self.folder / "update"),
            "out_path": str(self.folder / out),
            "exact": [40, 0, 2**64 - 7, 80],
            "exact_masks": MASK_KEYS[:2],
            "masks": MASK_KEYS,
            "bits": 32,
            "scale": 1e6,
            "bound": 8.0,
        }
        return Mask(**{**fields, **changes})

    def evaluate(self, *, round: int = 0) -> Evaluate:
        return Evaluate(key="evaluate", round=round, base_version=0, base_path=str(self.base))

    def update(self, out: str) -> bytes:
        return (self.folder / out).read_bytes()


def write_data(path: Path, *, num_train: int, num_test: int = 20, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for split, count in (("train", num_train), ("test", num_test)):
        x = rng.normal(size=(count, 4))
        arrays |= {f"x_{split}": x, f"y_{split}": (x[:, :3] + rng.normal(size=(count, 3))).argmax(axis=1)}
    np.savez(path, allow_pickle=False, **arrays)


MakeBench = Callable[..., Bench]
