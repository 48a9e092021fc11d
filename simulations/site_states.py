"""What simulated sites keep from round to round: in memory as long as it fits, else in files that are not synced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from atoll.cluster.site_state import Kept, SiteState
from atoll.wire.errors import DiskFull, LocalError
from atoll.wire.room import NO_ROOM

MEMORY_BYTES = 1 << 30  # of all sites together; beyond it, states go to files


class SiteStates:
    """The states of all sites of a run; those that do not fit into `memory_bytes` lie below `folder`."""

    def __init__(self, folder: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        self._folder = folder
        self._free_bytes = memory_bytes
        self._sites: dict[str, dict[int, _Held]] = {}

    def of(self, site: str) -> SiteState:
        """The state of one site."""
        return _OneSite(self, site)

    def load(self, site: str, before_round: int) -> Kept:
        """As `SiteState.load`."""
        earlier = [round for round in self._sites.get(site, {}) if round < before_round]
        if not earlier:
            return Kept()
        held = self._sites[site][max(earlier)]
        return held.kept if held.kept is not None else _read(held.path)

    def save(self, site: str, round: int, kept: Kept) -> None:
        """As `SiteState.save`: the state that `round` began with stays, older ones go."""
        states = self._sites.setdefault(site, {})
        begun_with = max((other for other in states if other < round), default=0)
        for old in [other for other in states if other < begun_with or other == round]:
            self._drop(states.pop(old))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in kept.tensors.items()}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        path = self._folder / site / f"{round}.safetensors"
        if num_bytes <= self._free_bytes:
            self._free_bytes -= num_bytes
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            states[round] = _Held(kept=Kept(tensors=copies, values=dict(kept.values)), num_bytes=num_bytes, path=path)
        else:
            _write(path, tensors, kept.values)
            states[round] = _Held(kept=None, num_bytes=num_bytes, path=path)

    def _drop(self, held: _Held) -> None:
        if held.kept is None:
            held.path.unlink(missing_ok=True)
        else:
            self._free_bytes += held.num_bytes

    def remove(self) -> None:
        """Forget all of them."""
        self._sites.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One state: in memory, or at `path` where `kept` is None."""

    kept: Kept | None
    num_bytes: int
    path: Path


class _OneSite(SiteState):
    def __init__(self, states: SiteStates, site: str) -> None:
        self._states, self._site = states, site

    def load(self, before_round: int) -> Kept:
        return self._states.load(self._site, before_round)

    def save(self, round: int, kept: Kept) -> None:
        self._states.save(self._site, round, kept)


def _write(path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(safetensors.torch.save(dict(tensors), {"values": json.dumps(dict(values))}))
    except OSError as error:
        path.unlink(missing_ok=True)
        kind = DiskFull if error.errno in NO_ROOM else LocalError
        raise kind(f"{path}: the state of a simulated site cannot be written: {error.strerror}") from None


def _read(path: Path) -> Kept:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            values = json.loads((file.metadata() or {}).get("values", "{}"))
            return Kept(tensors={name: file.get_tensor(name) for name in file.keys()}, values=values)  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise LocalError(f"{path}: the state of a simulated site cannot be read: {error}") from None
