"""What a site carries from one update to the next where the codec has feedback (`aggregation/codecs/feedback.py`).

One file for each round, written whole or not at all: what its update left over, should the update count. The server
says with each task which round's update of this site was the last to count, and that round's file is what the task
begins with. So an update that was refused, cancelled or too late leaves no trace: its error is neither lost nor counted
twice, and a round that is done again begins with what it began with the first time. Only these two files stay.

Both are mapped, so nothing of the model's size is held in memory.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from torch import Tensor

from atoll.aggregation.encode import Carried, carries
from atoll.aggregation.layout import MeanEntry, UpdateLayout
from atoll.wire.errors import BadManifest, BadUpdate, LocalError
from atoll.wire.manifest import Entry, Manifest
from atoll.wire.model_file import create, open_model, remove_drafts
from atoll.wire.tensors import views

log = logging.getLogger(__name__)

_SUFFIX = ".carried.safetensors"
_WEIGHT = "weight"  # of the update, beside the vectors, which are named by number


class CarriedOver:
    """What one run carries over at one site, in a folder of its own."""

    def __init__(self, folder: Path, layout: UpdateLayout, kind: Literal["error", "difference"]) -> None:
        self._folder = folder
        self._kind: Literal["error", "difference"] = kind
        carried = [entry for entry in layout.means if carries(entry)]
        self._names = [entry.spec.name for entry in carried]
        entries = [_vector(number, entry) for number, entry in enumerate(carried)]
        self._manifest = Manifest.build([*entries, (_WEIGHT, "int64", (), "buffer")])

    @contextmanager
    def begin(self, round: int, counted_round: int) -> Iterator[RoundCarried]:
        """What `round` begins with and leaves; durable once the block is left without an error.

        Args:
            counted_round: newest round before this one whose update of this site is in a version; 0: there is none.

        Raises:
            DiskFull: there is no room for what the round leaves.
            LocalError: the files cannot be written or read, or what difference coding builds on is gone.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_drafts(self._folder)
        with ExitStack() as files:
            before = self._open(counted_round, files)
            after = views(self._manifest, files.enter_context(create(self._path(round), self._manifest)), writable=True)
            yield RoundCarried(self._kind, self._names, before, after, counted_round)
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path not in (self._path(round), self._path(counted_round)):
                path.unlink(missing_ok=True)

    def at(self, folder: Path) -> CarriedOver:
        """The same of another site."""
        other = copy.copy(self)
        other._folder = folder
        return other

    def forget(self, round: int) -> None:
        """Drop what `round` would carry over, where it was done."""
        self._path(round).unlink(missing_ok=True)

    def _open(self, counted_round: int, files: ExitStack) -> dict[str, Tensor]:
        path = self._path(counted_round)
        if counted_round == 0:
            return {}
        if path.exists():
            try:
                model = files.enter_context(open_model(path))
                self._manifest.require_same(model.manifest)
            except BadManifest as error:
                raise LocalError(f"{path}: what round {counted_round} left cannot be read: {error.message}") from None
            return views(self._manifest, model.map, writable=False)
        gone = f"{path}: what round {counted_round} left is gone from this site"
        if self._kind == "difference":
            raise LocalError(f"{gone}, and the server builds on it; start the run anew, with the newest version")
        log.warning("%s: the error of its update is lost, the run goes on without it", gone)
        return {}

    def _path(self, round: int) -> Path:
        return self._folder / f"{round:08d}{_SUFFIX}"


class RoundCarried:
    """One round's beginning and end."""

    def __init__(
        self,
        kind: Literal["error", "difference"],
        names: list[str],
        before: dict[str, Tensor],
        after: dict[str, Tensor],
        counted_round: int,
    ) -> None:
        self._kind, self._counted_round = kind, counted_round
        self._weight_before, self._weight_after = before.get(_WEIGHT), after[_WEIGHT]
        self.carried = Carried(
            kind=kind,
            before={name: before[str(number)] for number, name in enumerate(names)} if before else {},
            after={name: after[str(number)] for number, name in enumerate(names)},
        )

    def weigh(self, weight: int) -> None:
        """Note what the round's update weighs.

        Raises:
            BadUpdate: another weight than the last one's, where the server's mean of differences depends on it.
        """
        self._weight_after.fill_(weight)
        earlier = None if self._weight_before is None else int(self._weight_before)
        if self._kind == "difference" and earlier not in (None, weight):
            raise BadUpdate(
                f"the update weighs {weight} examples, that of round {self._counted_round} weighed {earlier}: with "
                "difference coding all of a site's updates weigh the same; keep its data and work as they were, or "
                "take error_feedback in place of difference",
                field="weight",
                value=weight,
                bound=earlier,
            )


def _vector(number: int, entry: MeanEntry) -> Entry:
    wide = entry.spec.dtype in ("float64", "complex128")
    return str(number), "float64" if wide else "float32", (entry.num_values,), "parameter"
