"""`[world]` of a site's settings: on which machines the processes of `[parallel]` run, and who starts them there.

A site's own matter: no job can say it. Texts that end up in a command or a script are held to a few characters here.
Loads no torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from atoll.wire.strict import Strict

MOST_ENVIRONMENT = 128
_LOCAL_KEYS = ("processes_per_node", "address", "port", "interface", "python", "environment")


def _plain(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.,:/@%+=&|*\[\]()-]{1,256}", text):
        raise ValueError("wanted 1 to 256 letters, digits and characters of _.,:/@%+=&|*[]()-")
    return text


def _path(text: str) -> str:
    if not text.startswith("/") or any(character in text for character in "\n\r\0"):
        raise ValueError("wanted an absolute path, of one line")
    return text


def _line(text: str) -> str:
    if not text or any(character in text for character in "\n\r\0"):
        raise ValueError("wanted one line of text")
    return text


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise ValueError("wanted up to 63 small letters, digits and '-'")
    return text


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})", text):
        raise ValueError("wanted a host's name or IPv4 address, without a port")
    return text


Plain = Annotated[str, AfterValidator(_plain)]
AbsolutePath = Annotated[str, AfterValidator(_path)]
Line = Annotated[str, AfterValidator(_line)]
KubernetesName = Annotated[str, AfterValidator(_name)]
Host = Annotated[str, AfterValidator(_host)]
Count = Annotated[int, Field(ge=1, le=65536)]


class SlurmSection(Strict):
    """`world.slurm`: what the batch job asks for."""

    partition: Plain | None = None
    account: Plain | None = None
    qos: Plain | None = None
    constraint: Plain | None = None
    time_minutes: Count | None = None
    gpus_per_node: Count | None = None
    cpus_per_node: Count | None = None
    memory_per_node: Plain | None = None  # as Slurm reads it: "64G"
    setup: tuple[Line, ...] = ()  # lines of the script before the processes start: "module load cuda"


class MpirunSection(Strict):
    """`world.mpirun`: where its processes go."""

    hosts: tuple[Host, ...] = ()  # as many as nodes; the first sees the site's folder


class KubernetesSection(Strict):
    """`world.kubernetes`: the pods of a JobSet or a TrainJob, one a node."""

    image: Plain  # has atoll, torch and the site's apps
    namespace: KubernetesName = "default"
    gpus_per_node: Count | None = None
    cpus_per_node: Count | None = None
    memory_per_node: Plain | None = None  # as Kubernetes reads it: "64Gi"
    service_account: KubernetesName | None = None  # JobSet
    claims: dict[KubernetesName, AbsolutePath] = Field(default_factory=dict)  # JobSet: volume claim to mount path
    runtime: KubernetesName = "torch-distributed"  # TrainJob: the ClusterTrainingRuntime, which says volumes too


class WorldSection(Strict):
    """`[world]`."""

    launcher: Literal["local", "slurm", "mpirun", "jobset", "trainjob"] = "local"
    nodes: Count = 1
    processes_per_node: Count | None = None
    address: Host | None = None  # of this machine, as the nodes reach it
    port: int = Field(default=0, ge=0, le=65534)  # and the next one; 0: free ones
    interface: Plain | None = None  # network interface over which the nodes speak with each other
    python: AbsolutePath | None = None  # on the nodes; absent: as here
    environment: dict[str, Line] = Field(default_factory=dict)  # of every process
    slurm: SlurmSection = SlurmSection()
    mpirun: MpirunSection = MpirunSection()
    kubernetes: KubernetesSection | None = None

    @field_validator("environment")
    @classmethod
    def _names(cls, environment: dict[str, str]) -> dict[str, str]:
        if len(environment) > MOST_ENVIRONMENT:
            raise ValueError(f"there are {len(environment)} variables, at most {MOST_ENVIRONMENT} are taken")
        for name in environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name) or name.startswith("ATOLL_"):
                raise ValueError(f"{name!r} is no name of a variable, or one of Atoll's own: rename it")
        return environment

    @model_validator(mode="after")
    def _complete(self) -> WorldSection:
        if self.launcher == "local":
            self._check_local()
            return self
        for key in ("processes_per_node", "address"):
            if getattr(self, key) is None:
                raise ValueError(f"launcher = {self.launcher} needs {key}: set it")
        if self.launcher in ("jobset", "trainjob") and self.kubernetes is None:
            raise ValueError(f"launcher = {self.launcher} needs the table kubernetes, with an image: add it")
        if self.launcher == "mpirun" and len(self.mpirun.hosts) != self.nodes:
            raise ValueError(
                f"mpirun.hosts names {len(self.mpirun.hosts)} hosts, and nodes = {self.nodes}: name one each"
            )
        asked = self.kubernetes
        if self.launcher == "trainjob" and asked is not None and (asked.claims or asked.service_account):
            raise ValueError("kubernetes.claims and service_account of a TrainJob are the runtime's: remove them")
        return self

    def _check_local(self) -> None:
        if self.nodes != 1:
            raise ValueError(f"nodes = {self.nodes}, and launcher = local starts all on this machine: choose another")
        for key in _LOCAL_KEYS:
            if getattr(self, key):
                raise ValueError(f"{key} has no effect with launcher = local: remove it")

    @property
    def num_processes(self) -> int | None:
        """Of all nodes; None where `[parallel]` alone says it."""
        return None if self.processes_per_node is None else self.nodes * self.processes_per_node
