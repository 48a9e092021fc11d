"""One process's part in a run that a script trains: versions come into its model, and updates go out of it.

The model is the script's, as it has wrapped it: `DistributedDataParallel`, `torch.compile`, `fully_shard` or nothing. What
the site sends has the names of the model inside, and whole tensors. All processes read their parts of a version out of
the same mapped file; on the way out they put one sharded tensor together at a time, and the first process writes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from atoll.aggregation.encode import begin_update, encode_tensor
from atoll.aggregation.layout import MeanEntry, RawEntry, UpdateLayout
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.masking import mask_by_strategy
from atoll.cluster.messages import Failed, Mask, MetricSums, Prepare, Prepared, Progress, Train
from atoll.cluster.parallel.streams import load_slices, own_tensors, whole_tensors
from atoll.cluster.registry import hash_script
from atoll.cluster.script.channel import Channel
from atoll.cluster.script.messages import SOCKET_VARIABLE, Arrived, Done, Finish, FromRelay, Over, Void
from atoll.cluster.update_file import create_update
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import AtollError, BadManifest, ConfigError, Malformed, NotAllowed
from atoll.wire.job import Job, decode_job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import open_model
from atoll.wire.tensors import state_of, views

_WRAPPED = ("module", "_orig_mod")  # of DistributedDataParallel and DataParallel, of torch.compile


class RunEnded(SystemExit):
    """The run is over, or this site's part in it. Uncaught, it ends the script in order (exit code 0)."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Part:
    """This process's part in the run of the `atoll site exec` around it."""

    def __init__(self, channel: Channel) -> None:
        """Waits until the agent has said which run it is.

        Raises:
            NotAllowed: this script is another one than the run's; the agent is told too.
        """
        self.channel = channel
        request = self._receive()
        if not isinstance(request, Prepare):
            raise Malformed(f"wanted to be told of the run, not {request.kind!r}")
        self.request: Prepare = request
        self.whole: Job = decode_job(request.job.encode())
        self.manifest = Manifest.decode(Path(request.manifest_path).read_bytes())
        self._strategies: dict[bytes, Strategy] = {}
        self._model: nn.Module | None = None
        self._require_same_script()

    @property
    def world_size(self) -> int:
        """Processes of the script."""
        return self.channel.world_size

    def strategy(self, round_: int) -> Strategy:
        """As it is in a round."""
        job = self.whole.at(round_)
        key = job.canonical()
        if key not in self._strategies:
            self._strategies[key] = resolve(job)
        return self._strategies[key]

    def schedule(self, round_: int) -> str:
        """Its schedule's kind, for errors."""
        strategy = self.strategy(round_)
        return str(getattr(strategy.schedule, "name", strategy.name))

    def layout(self, round_: int) -> UpdateLayout:
        """Of the updates of a round."""
        return self.strategy(round_).fragments(self.manifest).whole

    def take(self, model: nn.Module) -> None:
        """From here on it is this model that is loaded and sent.

        Raises:
            BadManifest: it has other tensors than the run's; names one.
        """
        inner = unwrapped(model)
        found = {name: _text(tensor) for name, tensor in own_tensors(inner).items()}
        wanted = {s.name: f"{s.dtype} {list(s.shape)}" for s in self.manifest.model}
        for name in sorted(found.keys() | wanted.keys()):
            texts = found.get(name, "absent"), wanted.get(name, "absent")
            if texts[0] != texts[1]:
                self.fail(
                    BadManifest(
                        f"tensor \"{name}\" is {texts[0]} in the script's model, and {texts[1]} in the run's; begin the run "
                        "from a file of this model (atoll.save_model)",
                        field=name,
                        value=texts[0],
                        bound=texts[1],
                    )
                )
        self._model = inner

    def ready(self, max_weight: int) -> None:
        """This process can take rounds, in each of which it counts at most `max_weight` examples."""
        tensors = own_tensors(self._model) if self._model is not None else {}
        device = next((str(tensor.device) for tensor in tensors.values()), "cpu")
        update_bytes = max(self.layout(stage.from_round).num_bytes for stage in self.whole.stages)
        self.channel.send(Prepared(max_weight=max_weight, update_bytes=update_bytes, device=device))

    def next_round(self) -> Train:
        """The next task; waits for it, and does meanwhile what else the agent asks for.

        Raises:
            RunEnded: there is none.
        """
        while True:
            match self._receive():
                case Train() as task:
                    return task
                case Mask() as request:
                    self._mask(request)
                case Void():
                    pass
                case other:
                    raise Malformed(f"wanted a task, not {other.kind!r}")

    def load(self, task: Train) -> None:
        """Puts the task's base version into the model."""
        with open_model(Path(task.base_path)) as base:
            self.manifest.require_same(base.manifest)
            load_slices(self._require_model(), views(self.manifest, base.map, writable=False))

    def progress(self, task: Train, done: int, total: int) -> None:
        """Optimizer steps so far, of which the first process tells."""
        if self.channel.rank == 0:
            self.channel.send(Progress(key=task.key, done=min(done, total), total=total))

    def arrive(self, task: Train, steps: int) -> Train | None:
        """The steps of a round are done: the task as the agent wants it now, once all processes have come so far.

        None where nobody wants it any more.

        Raises:
            RunEnded: the run is over, or another process has left.
        """
        self.channel.send(
            Arrived(rank=self.channel.rank, round=task.round, base_version=task.base_version, steps=steps)
        )
        while True:
            match self._receive():
                case Finish(task=task):
                    return task
                case Void():
                    return None
                case other:
                    raise Malformed(f"wanted to be told whether the round counts, not {other.kind!r}")

    def write(self, task: Train, *, weight: int, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Writes the update from the base version to the model as it is now. All processes call this.

        A value that cannot be sent is told to the agent, and the round comes to nothing.
        """
        layout, num_bytes, crc32 = self.layout(task.round), 0, 0
        sums: MetricSums = {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
        try:
            if self.channel.rank == 0:
                with create_update(Path(task.out_path), layout.num_bytes) as out:
                    self._encode(task, layout, out)
                    num_bytes, crc32 = layout.num_bytes, crc32_of(out)
            else:
                for _ in whole_tensors(self._require_model(), self._names(layout)):
                    pass
        except AtollError as error:
            self.channel.send(Failed.of(task.key, error))
            return
        self.channel.send(
            Done(
                rank=self.channel.rank,
                key=task.key,
                weight=weight,
                metrics=sums,
                num_bytes=num_bytes,
                crc32=crc32,
                num_values=layout.num_values,
            )
        )

    def fail(self, error: AtollError, key: str = "prepare") -> NoReturn:
        """Tells the agent why a request comes to nothing, leaves, and raises it here too."""
        self.channel.send(Failed.of(key, error))
        self.channel.leave()
        raise error

    # ---------------------------------------------------------------------------------------------------------------

    def _encode(self, task: Train, layout: UpdateLayout, out: memoryview) -> None:
        """All tensors, to the end: a process that stopped in between would leave the others waiting."""
        every: tuple[MeanEntry | RawEntry, ...] = (*layout.means, *layout.raws)
        entries = {entry.spec.name: entry for entry in every}
        rounding = Rounding(rounding_key(bytes.fromhex(self.request.rounding_seed_hex), task.round))
        bound, failure = self.strategy(task.round).bound, None
        begin_update(layout, out)
        with open_model(Path(task.base_path)) as base:
            sources = views(self.manifest, base.map, writable=False)
            for name, tensor in whole_tensors(self._require_model(), self._names(layout)):
                try:
                    if failure is None:
                        encode_tensor(entries[name], sources, {name: tensor}, out, rounding=rounding, bound=bound)
                except AtollError as error:
                    failure = error
        if failure is not None:
            raise failure

    def _names(self, layout: UpdateLayout) -> list[str]:
        """Of what travels, in the one order that all processes go through."""
        every: tuple[MeanEntry | RawEntry, ...] = (*layout.means, *layout.raws)
        names = {entry.spec.name for entry in every}
        return [spec.name for spec in self.manifest if spec.name in names]

    def _mask(self, request: Mask) -> None:
        secret = bytes.fromhex(self.request.rounding_seed_hex)
        try:
            masked = mask_by_strategy(
                self.strategy(request.round), self.layout(request.round), request, secret, on_slice=lambda: None
            )
        except AtollError as error:
            self.channel.send(Failed.of(request.key, error))
        else:
            self.channel.send(masked)

    def _receive(self) -> FromRelay:
        message = self.channel.receive()
        if isinstance(message, Over):
            self.channel.leave()
            if message.together and dist.is_initialized():
                dist.barrier()  # gloo's end is an abort where another rank still speaks
            raise RunEnded(message.reason)
        return message

    def _require_model(self) -> nn.Module:
        if self._model is None:
            raise ConfigError("no model was given: call round.load(model) first", key="model")
        return self._model

    def _require_same_script(self) -> None:
        path = getattr(sys.modules["__main__"], "__file__", None)
        if path is None:
            self.fail(NotAllowed("the script is no file, so nothing says which one it is; run it as: python train.py"))
        found = hash_script(Path(path))
        if found != self.request.app_hash:
            self.fail(
                NotAllowed(
                    f"the script that joins has hash {found}, the run wants {self.request.app_hash}: start the file that "
                    f"[scripts.{self.request.app_name}] of site.toml names",
                    field="script_hash",
                    value=found,
                    bound=self.request.app_hash,
                )
            )


def open_part() -> Part | None:
    """This process's part in a run, once; None without an agent around it.

    Raises:
        ConfigError: torchrun has started several processes that do not know of each other yet.
        NotAllowed: as `Part`.
    """
    path = os.environ.get(SOCKET_VARIABLE)
    if path is None:
        return None
    is_spread = dist.is_available() and dist.is_initialized()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if not is_spread and world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE = {world_size}: call torch.distributed.init_process_group() before atoll",
            key="WORLD_SIZE",
            value=str(world_size),
        )
    rank, size = (dist.get_rank(), dist.get_world_size()) if is_spread else (0, 1)
    return Part(Channel(path, rank=rank, world_size=size))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what torch's wrappers put around it."""
    while (inner := next((getattr(model, name) for name in _WRAPPED if _wraps(model, name)), None)) is not None:
        model = inner
    return model


def _wraps(model: nn.Module, name: str) -> bool:
    kinds: tuple[Any, ...] = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if name == "module":
        return isinstance(model, kinds)
    return name in model._modules and type(model).__name__ == "OptimizedModule"


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def save_model(model: nn.Module, path: Path | str) -> None:
    """Writes a model as safetensors, from which a run of a script can begin, with what is a parameter and what a buffer.

    Raises:
        BadManifest: a tensor cannot travel.
        DiskFull, LocalError: the file cannot be written.
    """
    from atoll.wire.model_file import create
    from atoll.wire.tensors import manifest_of, write_state

    inner = unwrapped(model)
    manifest = manifest_of(inner)
    with create(Path(path), manifest) as data:
        write_state(manifest, {name: tensor.detach() for name, (tensor, _) in state_of(inner).items()}, data)
