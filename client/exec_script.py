"""`atoll site exec`: runs a script as the worker of a run at this site, beside the agent that does all the rest.

The agent lives on without it, and it lives on without the agent: whichever is started again finds the other. What the
command has started ends with it. Loads no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.client.home import SiteHome, agent_runs
from atoll.cluster.messages import LINE_BYTES, Answer, Close, Failed, decode, encode
from atoll.cluster.script.awaited import WAITING
from atoll.cluster.script.messages import SOCKET_VARIABLE
from atoll.cluster.script.relay import Relay
from atoll.wire.errors import ConfigError, LocalError, NotAllowed

LATEST = "latest"
TRY_EVERY_S = 0.2  # for an agent that is away
KILL_S = 10.0  # for a script to end once it was asked to


def exec_script(home: Path, run: str, command: Sequence[str]) -> int:
    """Runs `command` as the worker of `run`; its exit code, negative for a signal.

    Args:
        run: id of a run that waits for a script here, or "latest".

    Raises:
        ConfigError: no such run waits here.
        LocalError: the command cannot be started.
    """
    site = SiteHome(root=home)
    return asyncio.run(_Exec(site, find_waiting(site, run), command).run())


def find_waiting(home: SiteHome, run: str) -> str:
    """Id of the run that is meant: one that waits for a script, or the newest of them.

    Raises:
        ConfigError: there is none.
    """
    waiting = sorted(home.run_state("").glob(f"*/worker/{WAITING}"), key=lambda path: path.stat().st_mtime)
    runs = [path.parent.parent.name for path in waiting]
    if run == LATEST and runs:
        return runs[-1]
    if run.upper() in runs:
        return run.upper()
    if not agent_runs(home):
        why = f"no agent runs on {home.root}; start it: atoll site run --home {home.root}"
    elif run != LATEST and home.run_state(run.upper()).exists():
        why = "it is not of a script, or its script is at work already"
    else:
        why = f"runs that wait for a script here: {', '.join(runs) or 'none'} (atoll site status)"
    raise ConfigError(f"RUN = {run!r} does not wait for a script: {why}", key="RUN", value=run, bound=", ".join(runs))


@dataclass(slots=True)
class _Agent:
    """The line to the agent, while there is one."""

    writer: asyncio.StreamWriter | None = None

    def send(self, answer: Answer) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(encode(answer))


class _Exec:
    """One command, as the worker of one run."""

    def __init__(self, home: SiteHome, run: str, command: Sequence[str]) -> None:
        self._home, self._run, self._command = home, run, command
        self._agent = _Agent()
        self._relay = Relay(self._agent.send)

    async def run(self) -> int:
        with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
            path = Path(folder) / "script.sock"
            server = await asyncio.start_unix_server(self._relay.serve, str(path), limit=LINE_BYTES)
            path.chmod(0o600)
            try:
                script = await asyncio.create_subprocess_exec(
                    *self._command, env={**os.environ, SOCKET_VARIABLE: str(path)}
                )
            except OSError as error:
                raise LocalError(f"{self._command[0]} cannot be started: {error.strerror}") from None
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, _ask_to_end, script)
            loop.add_signal_handler(signal.SIGINT, lambda: None)  # the terminal asks the script too
            ending, speaking = asyncio.ensure_future(script.wait()), asyncio.ensure_future(self._speak())
            try:
                await asyncio.wait({ending, speaking}, return_when=asyncio.FIRST_COMPLETED)
                if speaking.done():
                    speaking.result()  # a fault of this command
                code = await ending  # after its run a script may take its time, as for a last checkpoint
                self._say_that_it_ended(code)
                await self._flush()
            finally:
                speaking.cancel()
                server.close()
                await _made_to_end(script)
        return code

    async def _speak(self) -> None:
        """With the agent, and with the one that is started after it, until the run is over."""
        while (line := await self._attach()) is not None:
            reader, self._agent.writer = line
            with contextlib.suppress(OSError, ValueError):
                while data := await reader.readline():
                    if isinstance(message := decode(data), Close):
                        break  # the run is over, or the agent ends
                    self._relay.asked(message)  # type: ignore[arg-type]  # an agent sends nothing else
            self._agent.writer.close()
            self._agent.writer = None
            self._relay.lost()
        self._relay.ended(f"run {self._run} is over at this site")

    async def _attach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The line to the agent, as soon as it waits for a script; None once the run is over here."""
        folder = self._home.run_state(self._run)
        while await asyncio.to_thread(folder.exists):
            with contextlib.suppress(OSError):
                path = await asyncio.to_thread((folder / "worker" / WAITING).read_text)
                return await asyncio.open_unix_connection(path, limit=LINE_BYTES)
            await asyncio.sleep(TRY_EVERY_S)
        return None

    def _say_that_it_ended(self, code: int) -> None:
        """A script that has ended by itself takes no more part: the server hears why, and nobody waits for it."""
        relay, task = self._relay, self._relay.task
        if relay.over is not None:
            return
        if code != 0:
            print(f"atoll: the script ended with {code}; started again, it gets the same round", file=sys.stderr)
            return
        if task is None:
            print("atoll: the script ended, and the run goes on without this site", file=sys.stderr)
            return
        steps = f"after {relay.steps} steps of round {task.round}"
        text = f"the script ended {steps}, before the run did; let its loop go on: atoll ends it with the run"
        print(f"atoll: {text}", file=sys.stderr)
        self._agent.send(Failed.of(task.key, NotAllowed(text, round=task.round, field="script")))

    async def _flush(self) -> None:
        if self._agent.writer is not None:
            with contextlib.suppress(OSError):
                await self._agent.writer.drain()
                self._agent.writer.close()


def _ask_to_end(script: asyncio.subprocess.Process) -> None:
    if script.returncode is None:
        script.terminate()


async def _made_to_end(script: asyncio.subprocess.Process) -> None:
    """Where this command cannot go on: what it has started is asked to end, and then made to."""
    _ask_to_end(script)
    try:
        await asyncio.wait_for(script.wait(), KILL_S)
    except TimeoutError:
        script.kill()
        await script.wait()
