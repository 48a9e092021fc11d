"""The agent's end of a worker: starts the torch process, speaks with it, learns of its death. Loads no torch.

A worker is kept over the rounds of a run, so that model, data and device context stay loaded. It never outlives the
process that started it: its end of the socket closes then, and it exits. It is forked from the agent's nursery, or
started directly where there is none; no caller sees a difference but in time. Its environment is a list of names that
torch, its libraries and data loaders read, so that no secret of the agent reaches the user's code by accident.

A coroutine that waits for a training may be cancelled: the worker then ends the task at its next step and stays
usable. `kill` is for a worker that does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from atoll.cluster.messages import (
    LINE_BYTES,
    Answer,
    Cancel,
    Close,
    Describe,
    Described,
    Evaluate,
    Evaluated,
    Failed,
    Mask,
    Masked,
    Prepare,
    Prepared,
    Progress,
    Request,
    Train,
    Trained,
    decode,
    encode,
)
from atoll.cluster.nursery_process import ForkedProcess, Nursery
from atoll.wire.errors import LocalError, Malformed

SOCKET_PATH_BYTES = 100  # sun_path holds 108 on Linux and 104 on macOS
START_TIMEOUT_S = 120.0  # importing torch from a cold network disk
CLOSE_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 20

_PASSED_ON = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV",
     "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CACHE_HOME", "HF_HOME",
     "CUBLAS_WORKSPACE_CONFIG", "SLURM_CONF", "KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"}
)  # fmt: skip
_PASSED_ON_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_",
                       "TORCH_", "PYTORCH_", "HIP_", "ROCR_", "HSA_", "ZE_", "TRITON_", "THP_", "MALLOC_")  # fmt: skip

A = TypeVar("A", Prepared, Trained, Masked, Evaluated, Described)


class WorkerDied(LocalError):
    """The worker's process ended before it answered. `returncode` as subprocess has it; `log_tail` stays here:
    it holds what the user's code printed."""

    def __init__(self, message: str, *, returncode: int | None, log_tail: str) -> None:
        super().__init__(message)
        self.returncode, self.log_tail = returncode, log_tail


class Started(Protocol):
    """A worker's process, however it came to be."""

    @property
    def pid(self) -> int: ...
    @property
    def lives(self) -> bool: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int | None: ...
    def kill(self) -> None: ...


class ChildProcess:
    """A worker that was started directly."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process

    @property
    def lives(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        """As subprocess has it; None while it lives."""
        return self._process.returncode

    async def wait(self) -> int:
        """The return code, once the process has ended."""
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.lives:
            # Not Popen.kill: it polls, and so may reap the process before asyncio does, which then loses its exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class WorkerProcess:
    """One worker. `start`, `prepare`, then any number of `train`, `mask`, `evaluate` and `describe`, one at a time; `close` or `kill`.

    Every call raises WorkerDied when the process is gone, and the worker's own error (AppFailed, BadUpdate,
    NotAllowed, DeviceMissing, DiskFull, LocalError, ...) where it answered with one. After any error but WorkerDied
    the worker is ready for the next request: ending it would only cost the seconds of starting another.
    """

    def __init__(
        self,
        folder: Path,
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        """`folder` (made when absent, mode 0700) holds the socket and, unless `log_path` says otherwise, the log.

        `env` adds to the environment that is passed on, or replaces parts of it. A worker with a `python` of its own
        is not forked from the `nursery`.
        """
        self.log_path = log_path or folder / "worker.log"
        self._folder, self._python, self._env = folder, python, dict(env or {})
        self._nursery = nursery if python == sys.executable else None
        self._process: Started | None = None
        self._is_killed = False
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id while the worker lives, else None."""
        return self._process.pid if self._process and self._process.lives else None

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the process and wait until it has connected. Raises WorkerDied where it ends or takes longer."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._is_killed = False  # of the process before
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as cleanup:
            path = self._socket_path(cleanup)
            connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
                asyncio.get_running_loop().create_future()
            )
            server = await asyncio.start_unix_server(
                lambda reader, writer: None if connected.done() else connected.set_result((reader, writer)),
                path,
                limit=LINE_BYTES,
            )
            cleanup.callback(server.close)
            try:
                async with asyncio.timeout(timeout_s):  # a nursery may have to load torch first
                    self._process = await self._spawn(path)
                if self._is_killed:  # meanwhile
                    self._process.kill()
            except TimeoutError:
                raise await self._death(f"took longer than {timeout_s} s to start") from None
            await self._first_of(connected, timeout_s, "start")
            self._reader, self._writer = connected.result()

    async def prepare(self, request: Prepare, timeout_s: float | None = None) -> Prepared:
        """Load app, model and data. Raises WorkerDied (and kills) when it takes longer than `timeout_s`."""
        return await self._ask(request, Prepared, "prepare", timeout_s=timeout_s)

    async def train(self, request: Train, on_progress: Callable[[int, int], None] | None = None) -> Trained:
        """Train and write the update. `on_progress(done, total)` is called with optimizer steps, a few times a second."""
        return await self._ask(request, Trained, request.key, on_progress=on_progress)

    async def mask(self, request: Mask) -> Masked:
        """Write the masked input of a session."""
        return await self._ask(request, Masked, request.key)

    async def evaluate(self, request: Evaluate) -> Evaluated:
        """Judge a version on this machine's test data."""
        return await self._ask(request, Evaluated, request.key)

    async def describe(self, request: Describe) -> Described:
        """Make statistics of this machine's training data."""
        return await self._ask(request, Described, request.key)

    async def close(self) -> None:
        """End the worker in order, or kill it where that takes over 10 s. Safe to call twice or on a dead one."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.write(encode(Close()))
        await self._end(CLOSE_TIMEOUT_S if self._writer else 0.0)

    def kill(self) -> None:
        """Kill the process now (SIGKILL); a call that waits for it raises WorkerDied."""
        self._is_killed = True
        if self._process:
            self._process.kill()

    def environment(self) -> dict[str, str]:
        """What the worker finds in its environment, and nothing else."""
        passed = {
            name: value
            for name, value in os.environ.items()
            if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
        }
        # One hash seed for all: an app that iterates over a set of names builds the same model after a restart.
        return {**passed, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", **self._env}

    # ---------------------------------------------------------------------------------------------------------------

    def _socket_path(self, cleanup: contextlib.ExitStack) -> str:
        for left in self._folder.glob("worker-*.sock"):  # by an agent that was killed
            left.unlink(missing_ok=True)
        # A name of its own: a worker still to be forked for a start that was cancelled must not find this one's.
        path = self._folder / f"worker-{secrets.token_hex(4)}.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES:  # a private folder with a short name instead
            path = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="atoll-"))) / "worker.sock"
        cleanup.callback(path.unlink, missing_ok=True)
        return str(path)

    async def _spawn(self, socket_path: str) -> ChildProcess | ForkedProcess:
        environment = self.environment()
        with self.log_path.open("ab") as log:
            if self._nursery is not None:
                forked = await self._nursery.fork(socket_path, log, environment)
                if forked is not None:
                    return forked
            # -P: the folder that the agent was started in is no place to import from.
            # A session of its own: Ctrl-C in the agent's terminal is the agent's to handle.
            process = await asyncio.create_subprocess_exec(
                self._python, "-P", "-m", "atoll.cluster.worker", "--socket", socket_path,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
            return ChildProcess(process)

    async def _ask(
        self,
        request: Request,
        wanted: type[A],
        key: str,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        timeout_s: float | None = None,
    ) -> A:
        async with self._turn:
            self._send(request)
            answer = asyncio.ensure_future(self._answer(request.kind, key, on_progress))
            try:
                await self._first_of(answer, timeout_s, request.kind)
            except asyncio.CancelledError:
                self._send(Cancel(key=key))
                raise
            finally:
                answer.cancel()
            message = answer.result()
        if isinstance(message, Failed):
            raise message.to_error()
        if not isinstance(message, wanted):
            raise Malformed(f"worker answered {message.kind!r} to {request.kind!r}")
        return message

    async def _answer(self, doing: str, key: str, on_progress: Callable[[int, int], None] | None) -> Answer:
        """The answer to `key`; those to tasks that were given up are passed over."""
        while True:
            message = await self._receive(doing)
            if message.key != key:
                continue
            if not isinstance(message, Progress):
                return message
            if on_progress is not None:
                on_progress(message.done, message.total)

    async def _receive(self, doing: str) -> Answer:
        if self._reader is None:
            raise await self._death("was not started")
        try:
            line = await self._reader.readline()
        except (OSError, ValueError):  # ValueError: longer than any message
            line = b""
        if not line.endswith(b"\n"):
            self.kill()
            raise await self._death(f"ended during {doing}")
        message = decode(line)
        if isinstance(message, Prepare | Train | Mask | Evaluate | Describe | Cancel | Close):
            raise Malformed(f"worker sent a request: {message.kind!r}")
        return message

    def _send(self, request: Request) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(request))

    async def _first_of(self, answer: asyncio.Future[Any], timeout_s: float | None, doing: str) -> None:
        """Wait for `answer`, but no longer than the process lives.

        The end of the stream alone would not do: children of the worker, such as data loaders, may hold it open.
        """
        if self._process is None:
            raise await self._death("was not started")
        ended = asyncio.ensure_future(self._process.wait())
        try:
            done, _ = await asyncio.wait({answer, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answer in done:
                return
            if ended in done:
                # What it wrote before its end is still in the buffer.
                done, _ = await asyncio.wait({answer}, timeout=0.1)
                if answer in done and not answer.exception():
                    return
                raise await self._death(f"ended during {doing}")
            self.kill()
            raise await self._death(f"took longer than {timeout_s} s to {doing} and was killed")
        finally:
            ended.cancel()

    async def _death(self, what: str) -> WorkerDied:
        await self._end(CLOSE_TIMEOUT_S)
        code = self._process.returncode if self._process else None
        how = "" if code is None else f" (signal {-code})" if code < 0 else f" (exit code {code})"
        return WorkerDied(f"worker {what}{how}; see {self.log_path}", returncode=code, log_tail=self._log_tail())

    async def _end(self, timeout_s: float) -> None:
        """Wait for the process, kill it where that takes too long, and drop the stream."""
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s)
            except TimeoutError:
                self.kill()
                await self._process.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _log_tail(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - (16 << 10)))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])
