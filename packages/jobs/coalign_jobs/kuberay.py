"""The KubeRay target: a RayJob with one pod for each node, and a ConfigMap with the code of the run.

KubeRay (1.5.1 or newer, for token authentication) starts a Ray cluster for the job, runs the command on its head, and
removes the cluster afterwards. The run folder lies on a volume that all pods mount, so a job that is started again goes
on from its newest checkpoint.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from coalign_jobs.environment import JobVariable, list_variables, name_references, split_secrets
from coalign_jobs.job import TrainingJob, place_output, refuse_unshipped
from coalign_jobs.yaml_text import write_yaml

CODE = "/coalign-code"  # where pods see the ConfigMap
MAX_CODE_BYTES = 700 * 2**10  # Kubernetes takes a ConfigMap of 1 MiB, and base64 makes 4/3 of it
RAY_VERSION = "2.60.0"  # docker/*.Dockerfile install it; KubeRay asks for it to know whether there are tokens
DEVICES = {"GPU": "nvidia.com/gpu", "NPU": "huawei.com/Ascend910", "HPU": "habana.ai/gaudi"}  # Kubernetes' names


@dataclass(frozen=True)
class KubeRayOptions:
    """The ``image`` of all pods, the ``volume`` for run folders (claim, path), and what a pod asks for.

    ``secrets``: Kubernetes secrets whose keys become environment variables. ``retries``: how often the job is started
    again after a node was lost. ``shm``: memory of /dev/shm.
    """

    image: str
    volume: tuple[str, str]
    namespace: str | None = None
    cores: str = "8"
    memory: str = "64Gi"
    shm: str = "16Gi"
    secrets: tuple[str, ...] = ()
    interface: str = "eth0"
    retries: int = 3


def render_rayjob(job: TrainingJob, options: KubeRayOptions) -> str:
    """Render the ConfigMap and the RayJob. ValueError for code, inputs or secrets that would not be in the pods."""
    assert job.shipment is not None, "pods have a file system of their own"
    mount = options.volume[1]
    if not PurePosixPath(mount).is_absolute():
        raise ValueError(f"--volume: the path '{mount}' is not absolute; write CLAIM:/PATH")
    if job.size.devices and job.size.resource not in DEVICES:
        raise ValueError(f"runtime.accelerator: Kubernetes has no {job.size.resource}; known are {', '.join(DEVICES)}")
    refuse_unshipped(job, f"put it on the volume, and name it by its path below {mount}")
    values, secret = split_secrets(job.references)
    if secret and not options.secrets:
        raise ValueError(
            f"the configuration reads {', '.join(secret)} from the environment: name the Kubernetes secret that holds "
            "it (`kubectl create secret generic NAME --from-literal=KEY=VALUE`) with --secret NAME"
        )
    variables = [
        *list_variables("/tmp/coalign", options.interface, hub=f"{mount}/huggingface", starts_ray=True),
        *name_references(values),
    ]
    code = f"{job.name}-code"
    archive = base64.b64encode(job.shipment.pack(MAX_CODE_BYTES)).decode()
    metadata = {"namespace": options.namespace} if options.namespace else {}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": code, **metadata},
        "binaryData": {"code.zip": archive},
    }
    group = {"rayStartParams": {"num-gpus": str(job.size.devices if job.size.resource == "GPU" else 0)}}
    template = {"spec": _pod(job, options, variables, code)}
    workers = {"groupName": "workers", "replicas": job.size.nodes - 1, "minReplicas": job.size.nodes - 1}
    workers |= {"maxReplicas": job.size.nodes - 1, **group, "template": template}
    rayjob = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name, **metadata},
        "spec": {
            "entrypoint": job.command("python", "runtime.ray_address=auto", place_output(job, mount)),
            "runtimeEnvYAML": f"working_dir: file://{CODE}/code.zip",
            "backoffLimit": options.retries,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token"},
                "headGroupSpec": {**group, "template": template},
                **({"workerGroupSpecs": [workers]} if job.size.nodes > 1 else {}),
            },
        },
    }
    return write_yaml([config_map, rayjob], _head(job, options), variables)


def _pod(job: TrainingJob, options: KubeRayOptions, variables: Sequence[JobVariable], code: str) -> dict[str, Any]:
    claim, mount = options.volume
    resources: dict[str, str | int] = {"cpu": options.cores, "memory": options.memory}
    if job.size.devices:
        resources[DEVICES[job.size.resource]] = job.size.devices
    container = {
        "name": "ray",
        "image": options.image,
        "env": [{"name": variable.name, "value": variable.value} for variable in variables],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [
            {"name": "code", "mountPath": CODE, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "runs", "mountPath": mount},
        ],
    }
    if options.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in options.secrets]
    return {
        "containers": [container],
        "volumes": [
            {"name": "code", "configMap": {"name": code}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
        ],
    }


def _head(job: TrainingJob, options: KubeRayOptions) -> list[str]:
    assert job.shipment is not None
    devices = f" with {job.size.devices} {job.size.resource}" if job.size.devices else ""
    return [
        f"coalign launch kuberay {job.file}: {job.size.nodes} pod(s){devices}",
        f"The ConfigMap is the code of the run: {job.shipment.describe()}.",
        "Token authentication: KubeRay makes the token, as a secret, and hands it to all pods.",
        "/dev/shm is memory, for Ray's object store and for weights that processes share.",
        f"{options.volume[1]} is the volume of run folders, which all pods mount. A job that lost a pod starts again",
        "from its newest checkpoint there.",
    ]


def apply_rayjob(job: TrainingJob, manifest: str) -> str:
    """Hand the manifest to the cluster that kubectl talks to; returns what to tell the person.

    ValueError with kubectl's own words if it refuses.
    """
    if shutil.which("kubectl") is None:
        raise ValueError("`kubectl` is not on this machine: install it, or write the file with --dry-run")
    done = subprocess.run(["kubectl", "apply", "-f", "-"], input=manifest, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"kubectl refused the job: {done.stderr.strip().splitlines()[-1]}")
    return (
        f"{done.stdout.strip()}\nfollow it: kubectl logs -f -l job-name={job.name}\n"
        f"its state: kubectl get rayjob {job.name}\nend it: kubectl delete rayjob {job.name}"
    )
