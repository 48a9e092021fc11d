"""NVFLARE provisioned on loopback with mutual TLS, a server and N clients; prints the seconds of each round as JSON.

Run by benchmarks/peers.py with an interpreter that has nvflare.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = "example_project"  # the name that `nvflare poc` gives
ADMIN = "admin@nvidia.com"
ROUND_PATIENCE_S = 180.0
STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    with _federation(options.folder, options.sites) as kits:
        log = _run(options, kits)
    print(json.dumps({"seconds": seconds_of(log)}))


def _run(options: argparse.Namespace, kits: Path) -> str:
    """Submits the job and waits for its end; the log of its server."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    sys.path.insert(0, str(HERE))
    os.chdir(HERE)  # where the recipe looks for scripts
    recipe = FedAvgRecipe(
        name="echo",
        model={"class_path": "echo_model.Parts", "args": {"num_bytes": int(options.megabytes * 1e6)}},
        min_clients=options.sites,
        num_rounds=options.rounds,
        train_script="echo_client.py",
    )
    recipe._job.to_server(str(HERE / "echo_model.py"))
    recipe.export(str(options.folder / "job"))
    session = new_secure_session(username=ADMIN, startup_kit_location=str(kits / ADMIN))
    try:
        job = session.submit_job(str(options.folder / "job" / "echo"))
        deadline_s = time.monotonic() + ROUND_PATIENCE_S * options.rounds
        while not (status := str(session.get_job_meta(job).get("status", ""))).startswith("FINISHED"):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the job is {status or 'unknown'}; logs in {kits}")
            time.sleep(1)
    finally:
        session.close()
    if not status.endswith("COMPLETED"):
        raise RuntimeError(f"the job ended as {status}; logs in {kits}")
    return _log_of(job, options.folder, kits)


def _log_of(job: str, folder: Path, kits: Path) -> str:
    """The server's log of a job: packed into the job store once the job is over."""
    packed = folder / "state" / "jobs-storage" / job / "workspace"
    live = kits / "server" / job / "log.txt"
    for _ in range(60):
        for found in [packed, *folder.rglob(f"jobs-storage/{job}/workspace")]:
            with contextlib.suppress(OSError, zipfile.BadZipFile, KeyError), zipfile.ZipFile(found) as archive:
                return archive.read("log.txt").decode(errors="replace")
        time.sleep(0.5)
    return live.read_text(errors="replace")


def seconds_of(log: str) -> list[float]:
    """From the start of each round to that of the next, and of the last to the end of the workflow."""
    marks: dict[str, float] = {}
    now_s = 0.0
    for line in log.splitlines():
        if stamp := STAMP.match(line):
            now_s = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(stamp[2]) / 1000
        if (mark := re.search(r"Round \d+ started|Finished FedAvg", line)) is not None:
            marks.setdefault(mark[0], now_s)
    times = list(marks.values())
    return [round(end - start, 3) for start, end in itertools.pairwise(times)]


@contextlib.contextmanager
def _federation(folder: Path, sites: int) -> Iterator[Path]:
    """Provisions and starts everybody; gives the folder of their start-up kits."""
    workspace = folder / "poc"
    bin_folder = Path(sys.executable).parent
    environment = os.environ | {
        "NVFLARE_POC_WORKSPACE": str(workspace),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }
    os.environ.update(environment)

    def poc(*arguments: str) -> None:
        command = [str(bin_folder / "nvflare"), "poc", *arguments]
        subprocess.run(command, env=environment, stdout=sys.stderr, stderr=sys.stderr, check=True)

    poc("prepare", "-n", str(sites), "--force")
    kits = workspace / PROJECT / "prod_00"
    for settings in kits.glob("*/local/resources.json*"):
        settings.write_text(settings.read_text().replace("/tmp/nvflare", str(folder / "state")))
    try:
        poc("start", "--timeout", "120")
        yield kits
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            poc("stop")
        _end_those_of(workspace)


def _end_those_of(workspace: Path) -> None:
    """Ends what `nvflare poc stop` has left running in the workspace."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if f"{workspace}/" in " ".join(process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


if __name__ == "__main__":
    main()
