"""The one object that knows how many processes there are along which axis, and hands out their mesh.

"Axis" is of the mesh, "dim" of a tensor. Ranks are laid out in the order of `AXES`, tp innermost, so that the ranks of
one tensor-parallel group are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atoll.wire.parallel_section import AXES, Degrees, ParallelSection


@dataclass(frozen=True)  # not slotted: the mesh is made once and kept
class ParallelDims:
    """The degrees of a site's world, and this process's place in it. Every process makes one, and asks it for the same
    meshes in the same order: a mesh is made by all of them together."""

    degrees: Degrees
    device_type: str

    @classmethod
    def of(cls, section: ParallelSection, *, device_type: str, world_size: int | None = None) -> ParallelDims:
        """Those of a section in the world that this process belongs to.

        Raises:
            ConfigError: the axes do not make the number of processes.
        """
        world = world_size or (dist.get_world_size() if dist.is_initialized() else 1)
        return cls(section.degrees(world), device_type)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All axes, those of one process too, so that each can be asked for by its name."""
        return init_device_mesh(self.device_type, self.degrees.shape, mesh_dim_names=AXES)

    def axis(self, *names: str) -> DeviceMesh:
        """The part of the mesh along these axes, in the mesh's order."""
        return self.mesh[names]

    def place(self, axis: str) -> int:
        """This process's coordinate along an axis; 0 in a world of one."""
        return int(self.mesh.get_local_rank(axis)) if self.degrees.world_size > 1 else 0

    @property
    def num_shares(self) -> int:
        """In how many shares a batch is divided over processes."""
        return self.degrees.dp_replicate * self.degrees.dp_shard

    @property
    def share(self) -> int:
        """Which of them is this process's."""
        return self.place("dp_replicate") * self.degrees.dp_shard + self.place("dp_shard")

    @property
    def counts(self) -> bool:
        """Whether this process's sums of metrics are to be added up: of those with equal ones, the first."""
        return self.place("tp") == 0 and self.place("pp") == self.degrees.pp - 1
