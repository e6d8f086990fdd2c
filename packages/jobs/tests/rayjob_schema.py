"""What KubeRay's custom resource RayJob takes: its fields, and those of the Ray cluster in it, and nothing else.

Names and types are those of ray-project/kuberay, ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go and of the field
reference of v1.6.2 (docs.ray.io, KubeRay CRD API reference): the openAPIV3Schema of the CRD, with
``additionalProperties: false`` and without descriptions. Pod templates are Kubernetes' own; `kubernetes-validate`
checks them.
"""

from typing import Any

TEXT, WHOLE, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
OBJECT, TEXTS = {"type": "object"}, {"type": "object", "additionalProperties": TEXT}
TEMPLATE = {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}}}
TEMPLATE |= {"additionalProperties": False, "required": ["spec"]}


def record(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*required], "additionalProperties": False}


def of(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    """Fields of the same type."""
    return dict.fromkeys(names, schema)


GROUP = {"rayStartParams": TEXTS, "template": TEMPLATE, "resources": TEXTS, "labels": TEXTS}
HEAD = {"enableIngress": FLAG, "headService": OBJECT, "serviceType": TEXT}
SIZES = of(WHOLE, "replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds")
WORKERS = {"groupName": TEXT, **SIZES, "suspend": FLAG, "scaleStrategy": OBJECT}
NAMED = ("groupName", "maxReplicas", "minReplicas", "rayStartParams", "template")
CLUSTER = record(
    ("headGroupSpec",),
    authOptions=record(mode={"enum": ["disabled", "token"]}, enableK8sTokenAuth=FLAG, secretName=TEXT),
    headGroupSpec=record(("rayStartParams", "template"), **GROUP, **HEAD),
    workerGroupSpecs={"type": "array", "items": record(NAMED, **GROUP, **WORKERS)},
    headServiceAnnotations=TEXTS,
    **of(OBJECT, "autoscalerOptions", "gcsFaultToleranceOptions", "networkPolicy", "upgradeStrategy"),
    **of(FLAG, "enableInTreeAutoscaling", "suspend"),
    **of(TEXT, "managedBy", "rayVersion"),
)
SPEC = record(
    rayClusterSpec=CLUSTER,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    submitterConfig=record(backoffLimit=WHOLE),
    submitterPodTemplate=TEMPLATE,
    deletionStrategy=OBJECT,
    **of(WHOLE, "activeDeadlineSeconds", "backoffLimit", "preRunningDeadlineSeconds", "ttlSecondsAfterFinished"),
    **of(TEXT, "entrypoint", "entrypointResources", "jobId", "managedBy", "runtimeEnvYAML"),
    **of(TEXTS, "clusterSelector", "metadata"),
    **of(NUMBER, "entrypointNumCpus", "entrypointNumGpus"),
    **of(FLAG, "shutdownAfterJobFinishes", "suspend"),
)
RAYJOB = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=record(("name",), name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS),
    spec=SPEC,
)
