"""What a site keeps from one round of a run to the next: optimizer state, buffers of its own, state of local rules.

Invariant: a round that is done again, after a kill or on the server's wish, begins with the state with which it began
the first time. So each round's state has a file of its own, written whole or not at all, and the file of the round
before stays until the next round is done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from atoll.wire.errors import DiskFull, LocalError
from atoll.wire.model_file import fsync_folder
from atoll.wire.room import NO_ROOM

_SUFFIX = ".state.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """State that a round leaves. `values` holds what JSON can."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


def joined(parts: Iterable[Kept]) -> Kept:
    """What several keep, as one; their names differ."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for part in parts:
        tensors.update(part.tensors)
        values.update(part.values)
    return Kept(tensors=tensors, values=values)


class SiteState:
    """The state of one run at one site, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, before_round: int) -> Kept:
        """The state that `before_round` begins with: what the newest earlier round left, empty where there is none.

        Raises:
            LocalError: the file is damaged or unreadable.
        """
        earlier = [round for round in self._rounds() if round < before_round]
        return self.left_by(max(earlier)) if earlier else Kept()

    def left_by(self, round: int) -> Kept:
        """The state that `round` left.

        Raises:
            LocalError: it is missing, damaged or unreadable.
        """
        path = self._path(round)
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                values = json.loads((file.metadata() or {}).get("values", "{}"))
                return Kept(tensors={name: file.get_tensor(name) for name in file.keys()}, values=values)  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise LocalError(f"{path}: the state of round {round} cannot be read: {error}") from None

    def save(self, round: int, kept: Kept, *, begun_with: int | None = None) -> None:
        """Keep what `round` leaves, durably; older states than the one it began with are dropped.

        Args:
            begun_with: the round whose state that was, where it is not the newest: those in between are void.

        Raises:
            DiskFull: there is no room.
            LocalError: the file cannot be written for another reason.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in kept.tensors.items()}
        data = safetensors.torch.save(tensors, {"values": json.dumps(dict(kept.values), sort_keys=True)})
        draft = self._path(round).with_suffix(".draft")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path(round))
            fsync_folder(self._folder)
        except OSError as error:
            draft.unlink(missing_ok=True)
            kind = DiskFull if error.errno in NO_ROOM else LocalError
            raise kind(f"{self._path(round)}: cannot be written: {error.strerror}") from None
        self._drop_old(round, begun_with)

    def forget(self, round: int) -> None:
        """Drop what `round` left, where it left anything."""
        self._path(round).unlink(missing_ok=True)

    def _drop_old(self, round: int, begun_with: int | None) -> None:
        earlier = [r for r in self._rounds() if r < round]
        if begun_with is None:
            begun_with = max(earlier, default=0)
        for old in earlier:
            if old != begun_with:
                self._path(old).unlink(missing_ok=True)

    def _rounds(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:  # most sites keep nothing
            return []
        return sorted(int(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX))

    def _path(self, round: int) -> Path:
        return self._folder / f"{round:08d}{_SUFFIX}"
