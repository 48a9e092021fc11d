"""One process of a site that has several: joins the others, then is a worker of the one that the agent started.

`python -P -m atoll.cluster.parallel.rank --meeting PLACE ...`, started by torch's launcher, which says in the environment
which process of its node this is. Ranks count through the first node, then the second, and so on.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from atoll.cluster.parallel.meeting import SECRET_VARIABLE, FolderMeeting, NetworkMeeting, parse_meeting
from atoll.cluster.worker import work_over


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of an Atoll worker; started by its launcher.")
    parser.add_argument("--meeting", required=True)
    parser.add_argument("--generation", required=True)
    parser.add_argument("--node", required=True, type=int)
    parser.add_argument("--nodes", required=True, type=int)
    parser.add_argument("--backend", required=True, choices=["gloo", "nccl"])
    parser.add_argument("--device-type", required=True)
    parser.add_argument("--start-timeout", required=True, type=float, help="seconds")
    parser.add_argument("--collective-timeout", required=True, type=float, help="seconds")
    options = parser.parse_args()
    secret = os.environ.pop(SECRET_VARIABLE)  # the app needs not see it
    per_node, local = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    rank, world_size = options.node * per_node + local, options.nodes * per_node
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}  # torch's launcher knows of this node only
    if options.device_type != "cpu":
        torch.accelerator.set_device_index(local)
    meeting = parse_meeting(options.meeting)
    backend = options.backend if options.device_type == "cpu" else f"cpu:gloo,{options.device_type}:{options.backend}"
    dist.init_process_group(
        backend,
        store=_store(meeting, world_size, options.generation, options.start_timeout),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=options.collective_timeout),
    )
    dist.barrier()  # nobody is there before all are
    work_over(meeting.connect(), hello=f"{secret} {rank}\n".encode())
    dist.barrier()  # gloo's end is an abort where another rank still speaks
    dist.destroy_process_group()


def _store(meeting: FolderMeeting | NetworkMeeting, world_size: int, generation: str, timeout_s: float) -> Store:
    if isinstance(meeting, FolderMeeting):
        return FileStore(str(meeting.folder / "store"), world_size)
    store = TCPStore(meeting.address, meeting.store_port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(generation, store)  # whoever comes late from an old world meets nobody


if __name__ == "__main__":
    main()
