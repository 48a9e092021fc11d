"""Manifests for Kubernetes: a JobSet, or a TrainJob of the Kubeflow Trainer, each with a Secret. kubectl creates them.

Fields as of jobset.x-k8s.io/v1alpha2 and trainer.kubeflow.org/v1alpha1. Pods are not started again: the agent starts a
world again, under a new name.
"""

from __future__ import annotations

import json
from typing import Any

from atoll.cluster.parallel.launchers.spec import Launch, WorldSpec
from atoll.cluster.parallel.meeting import SECRET_VARIABLE
from atoll.cluster.parallel.world_section import KubernetesSection, WorldSection

KEEP_S = 3600  # of a JobSet that has ended and was not deleted, as where the agent has gone
_KEY = "secret"


def launch_jobset(spec: WorldSpec, section: WorldSection) -> Launch:
    """A JobSet of one indexed job, with a pod for each node."""
    return _launch(spec, _asked(section), jobset(spec, _asked(section)))


def launch_trainjob(spec: WorldSpec, section: WorldSection) -> Launch:
    """A TrainJob, whose runtime adds volumes and whatever else the cluster's operator wants."""
    return _launch(spec, _asked(section), trainjob(spec, _asked(section)))


def jobset(spec: WorldSpec, asked: KubernetesSection) -> dict[str, Any]:
    """The JobSet's manifest."""
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "node",
                "image": asked.image,
                "command": list(_command(spec)),
                "env": _environment(spec),
                "resources": _resources(asked),
                "volumeMounts": [{"name": name, "mountPath": path} for name, path in sorted(asked.claims.items())],
            }
        ],
        "volumes": [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in sorted(asked.claims)],
    }
    if asked.service_account is not None:
        pod["serviceAccountName"] = asked.service_account
    job = {
        "parallelism": spec.num_nodes,
        "completions": spec.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": spec.name, "namespace": asked.namespace},
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": KEEP_S,
            "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": job}}],
        },
    }


def trainjob(spec: WorldSpec, asked: KubernetesSection) -> dict[str, Any]:
    """The TrainJob's manifest."""
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": spec.name, "namespace": asked.namespace},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": asked.runtime,
            },
            "trainer": {
                "image": asked.image,
                "numNodes": spec.num_nodes,
                "command": list(_command(spec)),
                "env": _environment(spec),
                "resourcesPerNode": _resources(asked),
            },
        },
    }


def _launch(spec: WorldSpec, asked: KubernetesSection, job: dict[str, Any]) -> Launch:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": spec.name, "namespace": asked.namespace},
        "stringData": {_KEY: spec.secret},
    }
    manifest = {"apiVersion": "v1", "kind": "List", "items": [secret, job]}
    names = (f"{job['kind'].lower()}/{spec.name}", f"secret/{spec.name}")
    return Launch(
        command=("kubectl", "create", "-f", "-"),
        text=json.dumps(manifest, indent=2) + "\n",  # JSON is YAML
        stays=False,
        withdraw=("kubectl", "delete", "--namespace", asked.namespace, "--ignore-not-found", "--wait=false", *names),
    )


def _asked(section: WorldSection) -> KubernetesSection:
    assert section.kubernetes is not None  # as the section has checked
    return section.kubernetes


def _command(spec: WorldSpec) -> tuple[str, ...]:
    return spec.on_node("--node-from", "JOB_COMPLETION_INDEX")  # in every pod of an indexed job


def _environment(spec: WorldSpec) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in sorted(spec.environment.items())]
    return [*plain, {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": {"name": spec.name, "key": _KEY}}}]


def _resources(asked: KubernetesSection) -> dict[str, dict[str, str]]:
    wishes = {"nvidia.com/gpu": asked.gpus_per_node, "cpu": asked.cpus_per_node, "memory": asked.memory_per_node}
    found = {key: str(value) for key, value in wishes.items() if value is not None}
    return {"requests": found, "limits": found} if found else {}
