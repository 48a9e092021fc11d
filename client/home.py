"""Where a site keeps what: one folder, its home, owned by the account that runs the agent.

Only `data` lies elsewhere: the agent never opens it, the worker does, and only after the policy has said yes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.wire.errors import LocalError

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteHome:
    """The folders and files below `root`; none of them need exist before `make`."""

    root: Path

    @property
    def identity(self) -> Path:
        """Keys and certificates (transport/identity.py)."""
        return self.root / "identity"

    @property
    def settings(self) -> Path:
        return self.root / "site.toml"

    @property
    def policy(self) -> Path:
        return self.root / "policy.toml"

    @property
    def state(self) -> Path:
        """Accepted tasks, joined runs, member list, the site's secret."""
        return self.root / "state"

    @property
    def revealed(self) -> Path:
        """What sessions of secure aggregation have let out, one sealed file a run; kept when runs end."""
        return self.state / "revealed"

    @property
    def outbox(self) -> Path:
        """Results until the server has committed them."""
        return self.root / "outbox"

    @property
    def models(self) -> Path:
        """Base versions, one folder a run."""
        return self.root / "models"

    @property
    def peers(self) -> Path:
        """Models of neighbours, one folder a run of gossip."""
        return self.root / "peers"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def lock(self) -> Path:
        return self.state / "agent.lock"

    @property
    def status(self) -> Path:
        return self.state / "status.json"

    def run_state(self, run: str) -> Path:
        """What a run's worker keeps over rounds and restarts; left_state.py says what becomes of it at the end."""
        return self.state / "runs" / run

    def worker_log(self, run: str) -> Path:
        return self.logs / f"{run}.log"

    def make(self) -> None:
        """Create the folders, readable by their owner alone.

        Raises:
            LocalError: a folder cannot be made.
        """
        try:
            for folder in (self.root, self.state, self.outbox, self.models, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(f"cannot make the site's folders under {self.root}: {error}") from None

    def secret(self) -> bytes:
        """32 random bytes of this site, made on first use, that never leave it; randomness of rounding derives from them.

        Raises:
            LocalError: the file is there and is not 32 bytes.
        """
        path = self.state / "secret"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            found = path.read_bytes()
            if len(found) != SECRET_BYTES:
                raise LocalError(
                    f"{path} is {len(found)} bytes, {SECRET_BYTES} are wanted; if no run is under way, delete it"
                ) from None
            return found
        with os.fdopen(fd, "wb") as file:
            file.write(made := secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return made


@contextmanager
def sole_agent(home: SiteHome) -> Iterator[None]:
    """Hold the home for this process; the kernel lets go of it however the process ends.

    Raises:
        LocalError: another agent holds it.
    """
    fd = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            raise LocalError(
                f"another agent (process {pid or 'unknown'}) runs on {home.root}; stop it first, or give a home of its own"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)


def agent_runs(home: SiteHome) -> bool:
    """Whether an agent holds the home now."""
    try:
        fd = os.open(home.lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)
