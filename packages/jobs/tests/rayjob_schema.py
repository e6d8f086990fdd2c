"""What KubeRay's custom resource RayJob takes: its fields, and those of the Ray cluster in it, and nothing else.

Names and types are those of ray-project/kuberay, ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go and of the field
reference of v1.6.2 (docs.ray.io, KubeRay CRD API reference): the openAPIV3Schema of the CRD, with
``additionalProperties: false`` and without descriptions. Pod templates are Kubernetes' own; `kubernetes-validate`
checks them.
"""

from typing import Any

TEXT, WHOLE, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
TEMPLATE = {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}}}
TEMPLATE |= {"additionalProperties": False, "required": ["spec"]}


def record(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*required], "additionalProperties": False}


GROUP = {"rayStartParams": TEXTS, "template": TEMPLATE, "resources": TEXTS, "labels": TEXTS}
HEAD = record(
    ("rayStartParams", "template"),
    **GROUP,
    enableIngress=FLAG,
    headService={"type": "object"},
    serviceType=TEXT,
)
WORKERS = record(
    ("groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"),
    **GROUP,
    groupName=TEXT,
    replicas=WHOLE,
    minReplicas=WHOLE,
    maxReplicas=WHOLE,
    numOfHosts=WHOLE,
    idleTimeoutSeconds=WHOLE,
    suspend=FLAG,
    scaleStrategy={"type": "object"},
)
CLUSTER = record(
    ("headGroupSpec",),
    authOptions=record(mode={"enum": ["disabled", "token"]}, enableK8sTokenAuth=FLAG, secretName=TEXT),
    autoscalerOptions={"type": "object"},
    enableInTreeAutoscaling=FLAG,
    gcsFaultToleranceOptions={"type": "object"},
    headGroupSpec=HEAD,
    headServiceAnnotations=TEXTS,
    managedBy=TEXT,
    networkPolicy={"type": "object"},
    rayVersion=TEXT,
    suspend=FLAG,
    upgradeStrategy={"type": "object"},
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAYJOB = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=record(("name",), name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS),
    spec=record(
        activeDeadlineSeconds=WHOLE,
        backoffLimit=WHOLE,
        clusterSelector=TEXTS,
        deletionStrategy={"type": "object"},
        entrypoint=TEXT,
        entrypointNumCpus=NUMBER,
        entrypointNumGpus=NUMBER,
        entrypointResources=TEXT,
        jobId=TEXT,
        managedBy=TEXT,
        metadata=TEXTS,
        preRunningDeadlineSeconds=WHOLE,
        rayClusterSpec=CLUSTER,
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes=FLAG,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        submitterConfig=record(backoffLimit=WHOLE),
        submitterPodTemplate=TEMPLATE,
        suspend=FLAG,
        ttlSecondsAfterFinished=WHOLE,
    ),
)
