"""A world to be started, and how a launcher starts it: values, so that they can be shown without starting anything."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.cluster.parallel.meeting import SECRET_VARIABLE, FolderMeeting, NetworkMeeting
from atoll.cluster.parallel.world_section import WorldSection
from atoll.wire.parallel_section import TimeoutsSection


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSpec:
    """One start of a world. Another start has another generation and another secret, so nobody of the old one gets in."""

    generation: str
    secret: str = field(repr=False)
    num_nodes: int
    processes_per_node: int
    meeting: FolderMeeting | NetworkMeeting
    environment: Mapping[str, str]  # of every process, without the secret
    command: tuple[str, ...]  # run once on each node; the launcher adds how to know the node's number

    @property
    def name(self) -> str:
        """Of what a scheduler is asked for."""
        return f"atoll-{self.generation}"

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.processes_per_node

    def on_node(self, *number: str) -> tuple[str, ...]:
        """The command with where it finds its node's number, from 0."""
        return (*self.command, *number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is run on the worker's machine to start a world."""

    command: tuple[str, ...]
    text: str | None = None  # for its standard input; None: a pipe that ends with the worker
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the worker's own
    stays: bool = True  # it ends with the world; else as soon as the world is asked for
    withdraw: tuple[str, ...] | None = None  # takes back what may still wait in a queue


def world_spec(
    section: WorldSection,
    *,
    num_processes: int,
    meeting: FolderMeeting | NetworkMeeting,
    generation: str,
    secret: str,
    backend: str,
    device_type: str,
    timeouts: TimeoutsSection,
) -> WorldSpec:
    """The world that the settings ask for; `num_processes` is of all nodes."""
    environment = dict(section.environment)
    if section.interface is not None:
        environment |= {"GLOO_SOCKET_IFNAME": section.interface, "NCCL_SOCKET_IFNAME": section.interface}
    per_node = num_processes // section.nodes
    return WorldSpec(
        generation=generation,
        secret=secret,
        num_nodes=section.nodes,
        processes_per_node=per_node,
        meeting=meeting,
        environment=environment,
        command=(
            section.python or sys.executable, "-P", "-m", "atoll.cluster.parallel.node",
            "--meeting", meeting.text, "--generation", generation,
            "--nodes", str(section.nodes), "--processes", str(per_node),
            "--backend", backend, "--device-type", device_type,
            "--start-timeout", f"{timeouts.start:g}", "--collective-timeout", f"{timeouts.collective:g}",
        ),
    )  # fmt: skip


def shown(spec: WorldSpec, launch: Launch) -> str:
    """A launch in words, for people; the secret is left out."""
    found = [
        f"# world {spec.name}: {spec.num_nodes} x {spec.processes_per_node} processes, which meet at {spec.meeting.text}",
        f"# environment, beside the worker's own (and {SECRET_VARIABLE}, new for each start):",
        *(
            f"{name}={shlex.quote(value)}"
            for name, value in sorted(launch.environment.items())
            if name != SECRET_VARIABLE
        ),
        "# command:",
        shlex.join(launch.command),
    ]
    if launch.text is not None:
        found += ["# its standard input:", launch.text.replace(spec.secret, "...").rstrip("\n")]
    if launch.withdraw is not None:
        found += ["# at the end:", shlex.join(launch.withdraw)]
    return "\n".join(found)
