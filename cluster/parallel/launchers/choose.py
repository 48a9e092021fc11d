"""The launchers by the name that site.toml has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from atoll.cluster.parallel.launchers import kubernetes, local, mpirun, slurm
from atoll.cluster.parallel.launchers.spec import Launch, WorldSpec
from atoll.cluster.parallel.world_section import WorldSection

LAUNCHERS: Final[Mapping[str, Callable[[WorldSpec, WorldSection], Launch]]] = {
    "local": local.launch,
    "mpirun": mpirun.launch,
    "slurm": slurm.launch,
    "jobset": kubernetes.launch_jobset,
    "trainjob": kubernetes.launch_trainjob,
}


def launch_of(spec: WorldSpec, section: WorldSection) -> Launch:
    """How the launcher that the settings name starts a world."""
    return LAUNCHERS[section.launcher](spec, section)
