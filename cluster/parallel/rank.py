"""One process of a site that has several: joins the others, then is a worker of the one that the agent started.

`python -P -m atoll.cluster.parallel.rank --folder PATH ...`, started by the launcher, which says in the environment which
rank this is.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from atoll.cluster.worker import work


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of an Atoll worker; started by its launcher.")
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--backend", required=True, choices=["gloo", "nccl"])
    parser.add_argument("--device-type", required=True)
    parser.add_argument("--collective-timeout", required=True, type=float, help="seconds")
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device_type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    backend = options.backend if options.device_type == "cpu" else f"cpu:gloo,{options.device_type}:{options.backend}"
    dist.init_process_group(
        backend,
        store=FileStore(str(options.folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=options.collective_timeout),
    )
    work(str(options.folder / "ranks.sock"), hello=b"%d\n" % rank)
    dist.barrier()  # gloo's end is an abort where another rank still speaks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
