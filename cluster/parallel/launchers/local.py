"""All processes on the worker's machine."""

from __future__ import annotations

from atoll.cluster.parallel.launchers.spec import Launch, WorldSpec
from atoll.cluster.parallel.meeting import SECRET_VARIABLE
from atoll.cluster.parallel.world_section import WorldSection


def launch(spec: WorldSpec, section: WorldSection) -> Launch:
    """One command, whose standard input ends with the worker."""
    return Launch(
        command=spec.on_node("--node", "0", "--ends-with-input"),
        environment={**spec.environment, SECRET_VARIABLE: spec.secret},
    )
