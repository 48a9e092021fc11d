"""What each launcher would run: golden texts, and the fields that the schemas of Kubernetes' objects require."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atoll.cluster.parallel.launchers.choose import launch_of
from atoll.cluster.parallel.launchers.spec import Launch, WorldSpec, shown, world_spec
from atoll.cluster.parallel.meeting import SECRET_VARIABLE, FolderMeeting, NetworkMeeting, parse_meeting
from atoll.cluster.parallel.world_section import WorldSection
from atoll.wire.parallel_section import TimeoutsSection

SECRET = "5ec2e7"
NODE = (
    "/opt/python -P -m atoll.cluster.parallel.node --meeting 10.0.0.5:7001:7002 --generation 1a2b --nodes 2 --processes 4 "
    "--backend nccl --device-type cuda --start-timeout 300 --collective-timeout 120"
)
TABLE: dict[str, Any] = {
    "nodes": 2,
    "processes_per_node": 4,
    "address": "10.0.0.5",
    "interface": "ib0",
    "python": "/opt/python",
    "environment": {"NOTE": "it's two words"},
}
KUBERNETES: dict[str, Any] = {"image": "registry.example.org/site:1", "namespace": "lab", "gpus_per_node": 4}

SLURM = f"""\
#!/bin/bash
#SBATCH --job-name=atoll-1a2b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --time=90
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --export=ALL
#SBATCH --no-requeue
set -euo pipefail
module load cuda
export GLOO_SOCKET_IFNAME=ib0
export NCCL_SOCKET_IFNAME=ib0
export NOTE='it'"'"'s two words'
exec srun --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task=16 {NODE} --node-from SLURM_NODEID
"""


def launched(launcher: str, **options: Any) -> tuple[WorldSpec, Launch]:
    section = WorldSection.model_validate({**TABLE, "launcher": launcher, **options})
    spec = world_spec(
        section,
        num_processes=8,
        meeting=NetworkMeeting(address="10.0.0.5", store_port=7001, port=7002),
        generation="1a2b",
        secret=SECRET,
        backend="nccl",
        device_type="cuda",
        timeouts=TimeoutsSection(),
    )
    return spec, launch_of(spec, section)


def test_slurm_gets_a_script_that_bash_reads_and_without_the_secret(tmp_path: Path) -> None:
    asked = {
        "partition": "gpu",
        "time_minutes": 90,
        "gpus_per_node": 4,
        "cpus_per_node": 16,
        "setup": ["module load cuda"],
    }
    _, launch = launched("slurm", slurm=asked)
    assert launch.text is not None
    assert launch.text == SLURM
    assert (launch.command, launch.withdraw) == (("sbatch", "--wait"), ("scancel", "--name=atoll-1a2b"))
    assert launch.environment == {SECRET_VARIABLE: SECRET}
    subprocess.run(["bash", "-n"], input=launch.text, text=True, check=True)
    # What srun would be given, by a stand-in that prints it.
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$NOTE" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    script = "module() { :; }\n" + launch.text
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-s"], input=script, env=environment, text=True, check=True, capture_output=True)
    words = done.stdout.splitlines()
    assert words[0] == "it's two words"
    assert words[4:] == [*NODE.split(), "--node-from", "SLURM_NODEID"]


def test_mpirun_puts_one_process_on_each_host_and_shows_no_value() -> None:
    _, launch = launched("mpirun", mpirun={"hosts": ["a.example", "b.example"]})
    assert launch.command == (
        "mpirun", "-n", "2", "--host", "a.example:1,b.example:1", "--map-by", "slot", "--bind-to", "none",
        *f"-x {SECRET_VARIABLE} -x GLOO_SOCKET_IFNAME -x NCCL_SOCKET_IFNAME -x NOTE".split(),
        *NODE.split(), "--node-from", "OMPI_COMM_WORLD_RANK",
    )  # fmt: skip
    assert launch.environment[SECRET_VARIABLE] == SECRET


def test_a_jobset_has_what_its_schema_requires() -> None:
    claims = {"atoll-home": "/srv/atoll"}
    _, launch = launched("jobset", kubernetes={**KUBERNETES, "claims": claims, "service_account": "atoll"})
    secret, found = items(launch)
    assert secret["stringData"] == {"secret": SECRET}
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert found["metadata"] == {"name": "atoll-1a2b", "namespace": "lab"}
    assert found["spec"]["failurePolicy"] == {"maxRestarts": 0}
    (replicated,) = found["spec"]["replicatedJobs"]
    assert {"name", "template", "replicas"} == replicated.keys()
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"], job["backoffLimit"]) == (2, 2, "Indexed", 0)
    pod = job["template"]["spec"]
    assert (pod["restartPolicy"], pod["serviceAccountName"]) == ("Never", "atoll")
    (container,) = pod["containers"]
    assert container["command"] == [*NODE.split(), "--node-from", "JOB_COMPLETION_INDEX"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert container["volumeMounts"] == [{"name": "atoll-home", "mountPath": "/srv/atoll"}]
    assert pod["volumes"] == [{"name": "atoll-home", "persistentVolumeClaim": {"claimName": "atoll-home"}}]
    assert secret_reference(container["env"]) == {"name": "atoll-1a2b", "key": "secret"}
    assert SECRET not in json.dumps(found)
    assert not launch.stays


def test_a_trainjob_has_what_its_schema_requires() -> None:
    _, launch = launched("trainjob", kubernetes=KUBERNETES)
    _, found = items(launch)
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert found["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed",
    }  # fmt: skip
    trainer = found["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["image"]) == (2, KUBERNETES["image"])
    assert trainer["command"] == [*NODE.split(), "--node-from", "JOB_COMPLETION_INDEX"]
    assert secret_reference(trainer["env"]) == {"name": "atoll-1a2b", "key": "secret"}
    assert launch.withdraw is not None
    assert launch.withdraw[-2:] == ("trainjob/atoll-1a2b", "secret/atoll-1a2b")


@pytest.mark.parametrize("launcher", ["slurm", "mpirun", "jobset", "trainjob"])
def test_what_is_shown_has_no_secret(launcher: str) -> None:
    spec, launch = launched(launcher, kubernetes=KUBERNETES, mpirun={"hosts": ["a", "b"]})
    text = shown(spec, launch)
    assert SECRET not in text
    assert SECRET not in repr(spec)
    assert "10.0.0.5:7001:7002" in text


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"launcher": "slurm"}, "needs processes_per_node"),
        ({"launcher": "slurm", "processes_per_node": 2}, "needs address"),
        ({"launcher": "local", "nodes": 2}, "starts all on this machine"),
        ({"launcher": "local", "port": 7001}, "port has no effect"),
        ({**TABLE, "launcher": "jobset"}, "needs the table kubernetes"),
        ({**TABLE, "launcher": "mpirun", "mpirun": {"hosts": ["a"]}}, "names 1 hosts, and nodes = 2"),
        ({**TABLE, "launcher": "slurm", "slurm": {"partition": "gpu\nrm"}}, "wanted 1 to 256"),
        ({**TABLE, "launcher": "slurm", "environment": {"A B": "c"}}, "no name of a variable"),
        ({**TABLE, "launcher": "slurm", "slurm": {"nodes": 2}}, "Extra inputs"),
        ({**TABLE, "launcher": "trainjob", "kubernetes": {**KUBERNETES, "claims": {"a": "/a"}}}, "runtime's"),
    ],
)
def test_what_cannot_be_launched_is_refused(table: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        WorldSection.model_validate(table)


def test_a_meeting_is_read_as_it_is_written() -> None:
    for meeting in (FolderMeeting(Path("/tmp/a")), NetworkMeeting(address="h.example", store_port=1, port=2)):
        assert parse_meeting(meeting.text) == meeting


def items(launch: Launch) -> list[dict[str, Any]]:
    assert launch.text is not None
    found = json.loads(launch.text)
    assert (found["kind"], found["apiVersion"], len(found["items"])) == ("List", "v1", 2)
    return list(found["items"])


def secret_reference(env: list[dict[str, Any]]) -> Any:
    (found,) = [one["valueFrom"]["secretKeyRef"] for one in env if one["name"] == SECRET_VARIABLE]
    return found
