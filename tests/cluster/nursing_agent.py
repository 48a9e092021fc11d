"""An agent that is killed while a worker from its nursery trains: `nursing_agent.py FOLDER PREPARE TRAIN`; prints the
pids of both."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from atoll.cluster.messages import Prepare, Train, decode
from atoll.cluster.nursery_process import Nursery
from atoll.cluster.worker_process import WorkerProcess


async def main(folder: Path, prepare_path: Path, train_path: Path) -> None:
    nursery = Nursery(folder / "nursery.log")
    worker = WorkerProcess(folder, nursery=nursery)
    await worker.start()
    prepare, train = decode(prepare_path.read_bytes()), decode(train_path.read_bytes())
    if not (isinstance(prepare, Prepare) and isinstance(train, Train)):
        raise SystemExit("wanted a Prepare and a Train")
    await worker.prepare(prepare)
    print(nursery.pid, worker.pid, flush=True)
    await worker.train(train, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:])))
