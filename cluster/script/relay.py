"""Between the agent and the processes of a script: passes requests on, and answers when all processes have.

::

    agent <-- unix socket --> atoll site exec <-- a unix socket each --> process 0 ... process N-1 of the script

The processes do a round at their own pace, and say when they have made its steps. The word that follows is the same for all:
write the update, or forget the round because nobody wants it any more, or the end. An agent that was restarted meanwhile
asks again for the same task: the steps that were made for it count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from atoll.cluster import messages
from atoll.cluster.messages import Failed, Mask, Masked, Prepare, Prepared, Progress, Train, Trained
from atoll.cluster.script.messages import Arrived, Done, Finish, FromRelay, Hello, Over, Void, decode, encode
from atoll.wire.errors import AppFailed, AtollError, Malformed

GRACE_S = 5.0  # after a process has left: for the others to end, or for all to come back
_log = logging.getLogger("atoll.exec")


@dataclass(slots=True)
class _Process:
    """One process of the script."""

    rank: int
    world_size: int
    writer: asyncio.StreamWriter
    prepared: Prepared | None = None
    arrived: Arrived | None = None
    done: Done | Failed | None = None


@dataclass(slots=True)
class Relay:
    """The state of one script. `send` writes to the agent; nothing is lost where it is away, since it asks again."""

    send: Callable[[messages.Answer], None]
    prepare: Prepare | None = None
    task: Train | None = None  # that the agent waits for
    given: Train | None = None  # that the processes work on
    steps: int = 0  # of that
    mask: Mask | None = None  # that the agent waits for
    is_writing: bool = False  # the processes write the update
    over: str | None = None  # why the run has ended
    has_left: bool = False  # a process was here, and is not any more
    is_broken: bool = False  # and does not come back
    processes: dict[int, _Process] = field(default_factory=dict)

    # --- the agent --------------------------------------------------------------------------------------------------

    def asked(self, request: messages.Request) -> None:
        """Act on a request of the agent, but for Close: then the line ends, and whoever holds it sees."""
        match request:
            case Prepare():
                if self.prepare is None:  # of one run, whose job never changes
                    self.prepare = request
                    for process in self.processes.values():
                        _tell(process, request)
                self._answer_prepared()
            case Train() if request.config or request.mix or request.gives != "update":
                text = "the task asks for other work than the job, or for a mixture, which a script does not do"
                self._refuse(request.key, Malformed(text, field="config"))
            case Train():
                self.task = request
                self._agree()
                self._give()
            case Mask():
                self.mask = request
                self._give_mask()
            case messages.Cancel(key=key):
                if self.task is not None and self.task.key == key:
                    self.task = None
                if self.mask is not None and self.mask.key == key:
                    self.mask = None
            case messages.Evaluate() | messages.Describe():
                text = f"{request.kind} in a run of a script, which trains and does nothing else"
                self._refuse(request.key, Malformed(text, field="kind", value=request.kind))

    def lost(self) -> None:
        """The agent is away. It asks again for what it still wants, and the processes wait for it with what they have."""
        self.task = self.mask = None

    def ended(self, reason: str) -> None:
        """The run is over: each process hears of it when it has made its steps."""
        self.over = reason
        self._agree()
        if self.given is None and self._is_whole:
            self._end_all()

    # --- the processes ----------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One process, to its end."""
        rank: int | None = None
        try:
            while line := await reader.readline():
                message = decode(line)
                if isinstance(message, Hello):
                    rank = message.rank
                    self._greet(message, writer)
                elif rank is not None and self.processes.get(rank, None) is not None:
                    self._said(self.processes[rank], message)
        except (OSError, ValueError, AtollError):
            _log.exception("process %s of the script", rank)
        except asyncio.CancelledError:
            pass  # this command ends
        finally:
            writer.close()
            if rank is not None and rank in self.processes and self.processes[rank].writer is writer:
                del self.processes[rank]
                self.has_left = True
                asyncio.get_running_loop().call_later(GRACE_S, self._wait_no_longer)

    def _greet(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        if self.has_left:  # torchrun has started all of them anew: what is left of the old ones ends
            for process in self.processes.values():
                process.writer.close()
            self.processes.clear()
            self.has_left = self.is_broken = self.is_writing = False
            self.given = None
        self.processes[hello.rank] = process = _Process(hello.rank, hello.world_size, writer)
        if self.over is not None:
            _tell(process, Over(reason=self.over, together=False))
        elif self.prepare is not None:
            _tell(process, self.prepare)

    def _said(self, process: _Process, message: object) -> None:
        match message:
            case Prepared():
                process.prepared = message
                self._answer_prepared()
                self._give()
                self._give_mask()
            case Arrived():
                process.arrived = message
                self.steps = message.steps
                self._agree()
                self._end_left()
            case Done():
                process.done = message
                self._answer_done()
            case Failed(key=key) if self.given is not None and key == self.given.key and process.arrived is not None:
                process.done = message
                self._answer_done()
            case Failed(key="prepare"):
                self.send(message)
            case Failed() if self.mask is not None and message.key == self.mask.key:
                self.mask = None
                self.send(message)
            case Failed():
                if self.task is not None:
                    self.send(replace(message, key=self.task.key))
                    self.task = None
            case Masked():
                self.mask = None
                self.send(message)
            case Progress():
                if self.task is not None and self._is_same_round():
                    self.send(replace(message, key=self.task.key))
                self.steps = message.done
            case _:
                raise Malformed(f"process {process.rank} of the script sent {message!r}")

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _is_whole(self) -> bool:
        """Whether all processes are here."""
        return bool(self.processes) and len(self.processes) == next(iter(self.processes.values())).world_size

    def _answer_prepared(self) -> None:
        found = [process.prepared for process in self.processes.values() if process.prepared is not None]
        if self.prepare is None or not self._is_whole or len(found) < len(self.processes):
            return
        weight = sum(prepared.max_weight for prepared in found)
        if weight < 1:
            error = AppFailed("examples is 0 on every process: a site counts one at least", field="examples", value=0)
            self.send(Failed.of("prepare", error))
            return
        self.send(replace(found[0], max_weight=weight))

    def _give(self) -> None:
        """Start the processes on the task, where they wait for one."""
        ready = self._is_whole and all(process.prepared is not None for process in self.processes.values())
        if self.task is None or self.given is not None or not ready:
            return
        self.given, self.steps = self.task, 0
        for process in self.processes.values():
            process.arrived = process.done = None
            _tell(process, self.given)

    def _give_mask(self) -> None:
        first = self.processes.get(0)
        if self.mask is not None and self.given is None and first is not None and first.prepared is not None:
            _tell(first, self.mask)

    def _is_same_round(self) -> bool:
        """Whether what the processes work on is what the agent wants."""
        task, given = self.task, self.given
        return (
            task is not None
            and given is not None
            and (task.round, task.base_version) == (given.round, given.base_version)
        )

    def _agree(self) -> None:
        """The one word for all, once all have made their steps."""
        if not self._is_whole or any(process.arrived is None for process in self.processes.values()):
            return
        if self.is_writing:
            return  # the word was given
        if self.over is not None:
            self._end_all()
        elif self.task is None:
            return  # the agent is away, or will ask for another round
        elif self._is_same_round():
            self.given, self.is_writing = self.task, True
            for process in self.processes.values():
                _tell(process, Finish(task=self.task))
        else:
            self.given = None
            for process in self.processes.values():
                process.arrived = None
                _tell(process, Void())
            self._give()
            self._give_mask()

    def _answer_done(self) -> None:
        found = [process.done for process in self.processes.values() if process.done is not None]
        if not self._is_whole or len(found) < len(self.processes):
            return
        given, self.given, self.is_writing = self.given, None, False
        if self._is_wanted(given):
            self.task = None
            self.send(_joined(found))
        if self.over is not None:
            self._end_all()
            return
        for process in self.processes.values():
            process.arrived = process.done = None
        self._give()
        self._give_mask()

    def _is_wanted(self, given: Train | None) -> bool:
        return self.task is not None and given is not None and self.task.key == given.key

    def _end_all(self) -> None:
        for process in self.processes.values():
            _tell(process, Over(reason=self.over or "the run is over", together=True))

    def _wait_no_longer(self) -> None:
        self.is_broken = self.has_left
        self._end_left()

    def _end_left(self) -> None:
        """A process is gone for good: those that wait for it hear so. One that is in the middle of its steps comes later."""
        if not self.is_broken:
            return
        for process in self.processes.values():
            if self.given is None or process.arrived is not None:
                _tell(process, Over(reason="another process of the script has left the run", together=False))

    def _refuse(self, key: str, error: AtollError) -> None:
        self.send(Failed.of(key, error))


def _tell(process: _Process, message: FromRelay) -> None:
    if not process.writer.is_closing():
        process.writer.write(encode(message))


def _joined(found: list[Done | Failed]) -> messages.Answer:
    """What all processes have done, as one: the file of the first, the examples of all."""
    done: list[Done] = []
    for one in found:
        if isinstance(one, Failed):
            return one
        done.append(one)
    first = min(done, key=lambda one: one.rank)
    weight = sum(one.weight for one in done)
    if weight < 1:
        return Failed.of(first.key, AppFailed("the script counted no example in this round", field="weight", value=0))
    metrics: messages.MetricSums = {}
    for one in done:
        for name, (total, count) in one.metrics.items():
            so_far = metrics.get(name, (0.0, 0.0))
            metrics[name] = so_far[0] + total, so_far[1] + count
    return Trained(
        key=first.key,
        weight=weight,
        metrics=metrics,
        num_bytes=first.num_bytes,
        crc32=first.crc32,
        num_values=first.num_values,
    )
