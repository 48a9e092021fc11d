"""Open MPI's mpirun starts one process on each host, by ssh or by the scheduler that it knows. MPI itself is not used."""

from __future__ import annotations

from atoll.cluster.parallel.launchers.spec import Launch, WorldSpec
from atoll.cluster.parallel.meeting import SECRET_VARIABLE
from atoll.cluster.parallel.world_section import WorldSection


def launch(spec: WorldSpec, section: WorldSection) -> Launch:
    """mpirun numbers processes by node, the first host first. It ends all when one of them fails."""
    environment = {**spec.environment, SECRET_VARIABLE: spec.secret}
    exported = [word for name in sorted(environment) for word in ("-x", name)]  # by name: values would show in `ps`
    hosts = ",".join(f"{host}:1" for host in section.mpirun.hosts)
    return Launch(
        command=(
            "mpirun", "-n", str(spec.num_nodes), "--host", hosts, "--map-by", "slot", "--bind-to", "none", *exported,
            *spec.on_node("--node-from", "OMPI_COMM_WORLD_RANK"),
        ),
        environment=environment,
    )  # fmt: skip
