"""`python -m atoll.cli.demonstration.baseline JOB DATA`: the job's model trained in one process with all data.

A process of its own, since training wants its own torch threads and its memory back at the end. Prints the metrics of
the test set as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from atoll.cli.demonstration.stage import DISTRIBUTION
from atoll.cluster.app import build_app
from atoll.cluster.central import train_centrally
from atoll.cluster.registry import AppEntry, hash_distribution, load_app
from atoll.wire.job import load_job


def main(job_path: Path, data_path: Path) -> None:
    """Trains for as many passes over the data as the sites did in all rounds together."""
    job = load_job(job_path)
    entry = AppEntry(name=job.job.code, distribution=DISTRIBUTION, entry_point=job.job.code)
    app = build_app(load_app(entry, hash_distribution(DISTRIBUTION)), job.app, {"path": str(data_path)})
    epochs = job.job.rounds * (job.strategy.work.num_epochs or 1)
    sums = train_centrally(app, job, epochs)
    print(json.dumps({name: total / count for name, (total, count) in sums.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
