"""Flower deployed on loopback: a SuperLink, N SuperNodes, `flwr run`; prints the seconds of each round as JSON.

Run by benchmarks/peers.py with an interpreter that has flwr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

APP = Path(__file__).parent / "app"
PATIENCE_S = 120.0  # until all nodes are there
ROUND_PATIENCE_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    with _federation(options.folder, options.sites) as environment:
        out = options.folder / "rounds.json"
        config = {"sites": options.sites, "megabytes": options.megabytes, "rounds": options.rounds, "out": str(out)}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        subprocess.run(
            [_tool("flwr"), "run", str(APP), "bench", "--run-config", text],
            env=environment,
            stdout=sys.stderr,
            check=True,
        )
        print(json.dumps({"seconds": _await_rounds(out, options.rounds)}))


def _await_rounds(out: Path, rounds: int) -> list[float]:
    deadline_s = time.monotonic() + ROUND_PATIENCE_S * rounds
    while time.monotonic() < deadline_s:
        if out.exists() and len(seconds := json.loads(out.read_text())) == rounds:
            return list(seconds)
        time.sleep(0.2)
    raise TimeoutError(f"{rounds} rounds did not end; logs in {out.parent}")


@contextlib.contextmanager
def _federation(folder: Path, sites: int) -> Iterator[dict[str, str]]:
    """SuperLink and nodes; gives the environment of `flwr run`."""
    port = _free_port()
    home = folder / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [_tool(command[0]), *command[1:]], env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )

    try:
        listen = ("--host", "127.0.0.1", "--port", str(port))
        start("superlink", "flower-superlink", "--insecure", *listen, "--disable-runtime-dependency-installation")
        _await(lambda: _listens(port))
        for number in range(sites):
            own = ("--host", "127.0.0.1", "--port", str(_free_port()))
            link = ("--superlink", f"127.0.0.1:{port}")
            start(f"node-{number}", "flower-supernode", "--insecure", *link, *own)
        logs = [folder / f"node-{number}.log" for number in range(sites)]
        _await(lambda: all("SuperNode ID" in log.read_text(errors="replace") for log in logs))
        yield environment
    finally:
        _end(started)


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """Ends the processes and those that they started."""
    import psutil

    family = [child for process in started for child in psutil.Process(process.pid).children(recursive=True)]
    for process in started:
        process.terminate()
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _await(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline_s:
            raise TimeoutError("Flower's processes did not come up")
        time.sleep(0.1)


def _tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    main()
