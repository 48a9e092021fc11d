"""A batch job of Slurm, with one task on each node. Its log is where sbatch puts it: slurm-JOB.out in the agent's folder."""

from __future__ import annotations

import shlex

from atoll.cluster.parallel.launchers.spec import Launch, WorldSpec
from atoll.cluster.parallel.meeting import SECRET_VARIABLE
from atoll.cluster.parallel.world_section import WorldSection

SCRIPT = """\
#!/bin/bash
{directives}
set -euo pipefail
{lines}
exec srun {options} {command}
"""


def launch(spec: WorldSpec, section: WorldSection) -> Launch:
    """`sbatch --wait` reads the script and ends with the job; the secret goes with the environment, not in the script.

    The job is not requeued: the agent starts a world again, under a new generation.
    """
    asked = section.slurm
    wishes = {
        "job-name": spec.name,
        "nodes": spec.num_nodes,
        "ntasks-per-node": 1,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "time": asked.time_minutes,
        "gpus-per-node": asked.gpus_per_node,
        "cpus-per-task": asked.cpus_per_node,
        "mem": asked.memory_per_node,
        "export": "ALL",
    }
    directives = [f"#SBATCH --{key}={value}" for key, value in wishes.items() if value is not None]
    options = ["--kill-on-bad-exit=1", "--cpu-bind=none"]
    if asked.cpus_per_node is not None:
        options.append(f"--cpus-per-task={asked.cpus_per_node}")  # srun has not taken it from sbatch since 22.05
    script = SCRIPT.format(
        directives="\n".join([*directives, "#SBATCH --no-requeue"]),
        lines="\n".join(
            [*asked.setup, *(f"export {name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items()))]
        ),
        options=shlex.join(options),
        command=shlex.join(spec.on_node("--node-from", "SLURM_NODEID")),
    )
    return Launch(
        command=("sbatch", "--wait"),
        text=script,
        environment={SECRET_VARIABLE: spec.secret},
        withdraw=("scancel", f"--name={spec.name}"),
    )
