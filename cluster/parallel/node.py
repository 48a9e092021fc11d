"""Starts the ranks of one node by torch.distributed.launcher.

`python -P -m atoll.cluster.parallel.node --meeting PLACE --nodes N --processes P ...`, run once on each node by what
launches the world. Ranks of one node find each other by a file here, and those of other nodes at the meeting. On the
worker's machine its standard input is a pipe whose other end the worker holds. Elsewhere the ranks end when their
connections to the worker do, and this with them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
from pathlib import Path

from atoll.cluster.parallel.meeting import FolderMeeting, parse_meeting


def environment(num_processes: int, *, is_alone: bool) -> dict[str, str]:
    """What is set for the ranks, where the machine has not set it."""
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    found = {"OMP_NUM_THREADS": str(threads)}
    if sys.platform == "linux" and is_alone:
        found["GLOO_SOCKET_IFNAME"] = "lo"  # no port is reachable from outside
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts the ranks of an Atoll worker on one node.")
    parser.add_argument("--meeting", required=True, help="a folder, or host:port:port")
    parser.add_argument("--generation", required=True, help="of the world; another start has another")
    parser.add_argument("--nodes", required=True, type=int)
    parser.add_argument("--processes", required=True, type=int, help="on this node, as on each")
    number = parser.add_mutually_exclusive_group(required=True)
    number.add_argument("--node", type=int, help="this node's number, from 0")
    number.add_argument("--node-from", help="environment variable that has it")
    parser.add_argument("--ends-with-input", action="store_true")
    parser.add_argument("--backend", required=True, choices=["gloo", "nccl"])
    parser.add_argument("--device-type", required=True)
    parser.add_argument("--start-timeout", required=True, type=float, help="seconds")
    parser.add_argument("--collective-timeout", required=True, type=float, help="seconds")
    options = parser.parse_args()
    node = int(os.environ[options.node_from]) if options.node is None else options.node
    if not 0 <= node < options.nodes:
        parser.error(f"this is node {node}, and there are {options.nodes}, from 0")
    # Ranks that start again would else meet under the addresses of the dead (pytorch/pytorch#135712, #167288).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    is_alone = isinstance(parse_meeting(options.meeting), FolderMeeting)
    for name, value in environment(options.processes, is_alone=is_alone).items():
        os.environ.setdefault(name, value)
    if options.ends_with_input:
        threading.Thread(target=_end_with_worker, name="worker's end", daemon=True).start()
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # reads the environment

    with tempfile.TemporaryDirectory(prefix="atoll-node-") as folder:
        config = LaunchConfig(
            min_nodes=1,  # each node by itself: a rank that fails ends its connection, and the worker ends the rest
            max_nodes=1,
            nproc_per_node=options.processes,
            run_id=options.generation,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),
            rdzv_configs={"store_type": "file", "timeout": options.start_timeout},
            local_addr="localhost",
            max_restarts=0,  # the agent starts a worker again, and its world with it
        )
        elastic_launch(config, sys.executable)(
            "-P", "-m", "atoll.cluster.parallel.rank", "--meeting", options.meeting,
            "--generation", options.generation, "--node", str(node), "--nodes", str(options.nodes),
            "--backend", options.backend, "--device-type", options.device_type,
            "--start-timeout", str(options.start_timeout), "--collective-timeout", str(options.collective_timeout),
        )  # fmt: skip


def _end_with_worker() -> None:
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    os._exit(3)  # the ranks find their sockets closed, and end themselves


if __name__ == "__main__":
    main()
