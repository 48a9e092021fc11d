"""Starts the ranks of a site by torch.distributed.launcher, and ends with the worker that started it.

`python -P -m atoll.cluster.parallel.launcher --folder PATH --processes N ...`; its standard input is a pipe whose other
end the worker holds. Everything stays on this machine: ranks meet by files in a private folder, and gloo's connections
use the loopback interface, so no port is reachable from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from pathlib import Path


def environment(num_processes: int) -> dict[str, str]:
    """What is set for the ranks, where the machine has not set it."""
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    found = {"OMP_NUM_THREADS": str(threads)}
    if sys.platform == "linux":
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts the ranks of an Atoll worker; started by it.")
    parser.add_argument("--folder", required=True, type=Path, help="private folder, with the socket ranks.sock in it")
    parser.add_argument("--processes", required=True, type=int)
    parser.add_argument("--backend", required=True, choices=["gloo", "nccl"])
    parser.add_argument("--device-type", required=True)
    parser.add_argument("--start-timeout", required=True, type=float, help="seconds")
    parser.add_argument("--collective-timeout", required=True, type=float, help="seconds")
    options = parser.parse_args()
    # Ranks that start again would else meet under the addresses of the dead (pytorch/pytorch#135712, #167288).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for name, value in environment(options.processes).items():
        os.environ.setdefault(name, value)
    threading.Thread(target=_end_with_worker, name="worker's end", daemon=True).start()
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # reads the environment

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.processes,
        run_id="atoll",
        rdzv_backend="c10d",
        rdzv_endpoint=str(options.folder / "rendezvous"),
        rdzv_configs={"store_type": "file", "timeout": options.start_timeout},
        local_addr="localhost",
        max_restarts=0,  # the agent starts a worker again, and its world with it
    )
    elastic_launch(config, sys.executable)(
        "-P", "-m", "atoll.cluster.parallel.rank", "--folder", str(options.folder), "--backend", options.backend,
        "--device-type", options.device_type, "--collective-timeout", str(options.collective_timeout),
    )  # fmt: skip


def _end_with_worker() -> None:
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    os._exit(3)  # the ranks find their sockets closed, and end themselves


if __name__ == "__main__":
    main()
