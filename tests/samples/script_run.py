"""A run of a script without an agent: the relay of `atoll site exec` in a thread, asked by the test; and bases of rounds."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from atoll.aggregation.strategy import resolve
from atoll.cluster.messages import LINE_BYTES, Answer, Prepare, Prepared, Progress, Request, Train, Trained
from atoll.cluster.registry import hash_script
from atoll.cluster.script.relay import Relay
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import create
from atoll.wire.tensors import manifest_of, write_state

STEPS = 4
PATIENCE_S = 40.0
A = TypeVar("A", bound=Answer)


class ScriptRun:
    """Version files, requests and answers of one run."""

    def __init__(self, folder: Path, build: Callable[[int], nn.Module], **strategy: Any) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text("import atoll\n")
        schedule = {"kind": "every_steps", "steps": STEPS}
        self.job: Job = parse_job(
            {
                "job": {"name": "a", "script": "train", "rounds": 9, "seed": 5},
                "app": {"lr": 0.1},
                "strategy": {"schedule": schedule, **strategy},
            }
        )
        self.build = build
        self.manifest: Manifest = manifest_of(build(0))
        (folder / "manifest").write_bytes(self.manifest.encode())
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.relay = Relay(self.answers.put)
        self.socket = folder / "s"

    @property
    def prepare(self) -> Prepare:
        return Prepare(
            run="run-1",
            site="north",
            app_name="train",
            distribution="",
            entry_point="",
            app_hash=hash_script(self.script),
            data={"path": "there"},
            job=self.job.canonical().decode(),
            manifest_path=str(self.folder / "manifest"),
            state_folder=str(self.folder),
            rounding_seed_hex="07" * 32,
        )

    def base(self, version: int) -> Path:
        """A version: the model as seed `version` makes it."""
        path = self.folder / f"{version}.safetensors"
        if not path.exists():
            with create(path, self.manifest) as data:
                write_state(self.manifest, self.build(version), data)
        return path

    def train(self, round_: int, *, version: int | None = None, attempt: int = 1) -> Train:
        base = round_ - 1 if version is None else version
        return Train(
            key=f"r{round_}#{attempt}",
            round=round_,
            base_version=base,
            base_path=str(self.base(base)),
            out_path=str(self.folder / f"update-{round_}-{attempt}"),
        )

    def ask(self, *requests: Request | None) -> None:
        """At once, before the script can do anything of it; None is the loss of the agent."""

        def asked() -> None:
            for request in requests:
                self.relay.lost() if request is None else self.relay.asked(request)

        self._loop.call_soon_threadsafe(asked)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self.relay.ended, "the run is over")

    def answer(self, kind: type[A]) -> A:
        """The next answer that is no progress."""
        while isinstance(answer := self.answers.get(timeout=PATIENCE_S), Progress):
            pass
        assert isinstance(answer, kind), answer
        return answer

    def begin(self) -> Prepared:
        self.ask(self.prepare)
        return self.answer(Prepared)

    def play(self, num_rounds: int) -> list[Trained]:
        """The first rounds, and the end of the run."""
        self.begin()
        found = []
        for number in range(1, num_rounds + 1):
            self.ask(self.train(number))
            found.append(self.answer(Trained))
        self.end()
        return found

    def difference(self, round_: int, attempt: int = 1) -> Mapping[str, Tensor]:
        """What an update says, by tensor."""
        data = (self.folder / f"update-{round_}-{attempt}").read_bytes()
        layout = resolve(self.job).fragments(self.manifest).whole
        found = {}
        for entry in layout.means:
            values = np.frombuffer(data, dtype=np.float32, count=entry.num_values, offset=entry.offset)
            found[entry.spec.name] = torch.from_numpy(values.copy()).view(entry.spec.shape)
        return found

    @contextmanager
    def served(self) -> Iterator[ScriptRun]:
        """While this lasts, scripts find the relay at `socket`."""
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()

        async def listen() -> asyncio.AbstractServer:
            return await asyncio.start_unix_server(self.relay.serve, str(self.socket), limit=LINE_BYTES)

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(PATIENCE_S)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(PATIENCE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(PATIENCE_S)
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
