"""An agent that is killed while its worker trains: `dying_agent.py FOLDER PREPARE TRAIN direct|forked`.

Prints the pids that it leaves behind: the worker's, and that of the nursery which forked it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from samples.bench import Bench

from atoll.cluster.messages import Prepare, Train, decode, encode
from atoll.cluster.nursery_process import Nursery
from atoll.cluster.worker_process import WorkerProcess


async def pids_left_by_a_killed_agent(bench: Bench, folder: Path, how: str) -> list[int]:
    """Runs the agent of this file to its death; `how` is "direct" or "forked"."""
    (folder / "prepare").write_bytes(encode(bench.prepare("north")))
    (folder / "train").write_bytes(encode(bench.train("update")))
    environment = {**os.environ, **bench.environment}
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(folder / "w"), str(folder / "prepare"), str(folder / "train"), how,
        stdout=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == -signal.SIGKILL
    return [int(pid) for pid in output.split()]


async def main(folder: Path, prepare_path: Path, train_path: Path, how: str) -> None:
    nursery = Nursery(folder / "nursery.log") if how == "forked" else None
    worker = WorkerProcess(folder, nursery=nursery)
    await worker.start()
    prepare, train = decode(prepare_path.read_bytes()), decode(train_path.read_bytes())
    if not (isinstance(prepare, Prepare) and isinstance(train, Train)):
        raise SystemExit("wanted a Prepare and a Train")
    await worker.prepare(prepare)
    print(worker.pid, nursery.pid if nursery else "", flush=True)
    await worker.train(train, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    folder, prepare, train, how = sys.argv[1:]
    asyncio.run(main(Path(folder), Path(prepare), Path(train), how))
