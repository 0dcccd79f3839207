"""Small pods that see a run's folder: to read it when everything else of the run is gone, or to try the storage."""

from __future__ import annotations

import copy

from argusrl.cluster.kinds import RAY_JOB
from argusrl.cluster.kube_api import Object
from argusrl.cluster.names import label_of
from argusrl.cluster.overview import RunOverview
from argusrl.config.sections import Config
from argusrl.errors import ConfigError

_LIVES_SECONDS = 3600
_KEPT = ("securityContext", "imagePullSecrets", "nodeSelector", "affinity", "tolerations")


def reader_pod(found: RunOverview) -> Object:
    """A pod that sleeps for an hour. Raises ConfigError where no RayJob of the run is left to copy from."""
    jobs = [one.object for one in found.submissions if one.kind == RAY_JOB.name]
    if not jobs:
        raise ConfigError(
            f"no RayJob of run {found.run} is left to take the volume claim from",
            "argusrl cluster manifest RECIPE shows claim and mount",
        )
    template = jobs[-1]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    return _pod_like(template, f"{found.run}-reader", found.namespace, "reader", ["sleep", str(_LIVES_SECONDS)])


def probe_pods(config: Config, namespace: str) -> list[tuple[str, Object]]:
    """Pods that try the run root where head and workers of a recipe would run: (role, pod). Raises ConfigError."""
    from argusrl.cluster.doctor.probing import probe_command
    from argusrl.cluster.manifests.render import render

    cluster = render(config)[-1].value["spec"]["rayClusterSpec"]
    command = probe_command(str(config.run.root / str(config.run.name)))
    templates = {"head": cluster["headGroupSpec"]["template"], "worker": cluster["workerGroupSpecs"][0]["template"]}
    run = label_of(str(config.run.name))
    return [
        (role, _pod_like(template, f"{run}-probe-{role}", namespace, "probe", command))
        for role, template in templates.items()
    ]


def _pod_like(template: Object, name: str, namespace: str, role: str, command: list[str]) -> Object:
    """With image, user, place and volume claims of a pod of a run; without its GPUs, memory and Ray."""
    spec = template["spec"]
    container = spec["containers"][0]
    volumes = [volume for volume in spec.get("volumes") or [] if "persistentVolumeClaim" in volume]
    names = {volume["name"] for volume in volumes}
    mounts = [mount for mount in container.get("volumeMounts") or [] if mount["name"] in names]
    size = {"cpu": "500m", "memory": "1Gi"}
    secured = {key: container[key] for key in ("securityContext",) if key in container}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            # Not the run's own label: its network policy and its anti-affinity are not for this pod.
            "labels": {"app.kubernetes.io/name": "argusrl", "app.kubernetes.io/component": role},
        },
        "spec": {
            **{key: spec[key] for key in _KEPT if key in spec},
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "activeDeadlineSeconds": _LIVES_SECONDS,
            "containers": [
                {
                    "name": role,
                    "image": container["image"],
                    "command": command,
                    "resources": {"requests": size, "limits": size},
                    "volumeMounts": mounts,
                    **secured,
                }
            ],
            "volumes": volumes,
        },
    }
    return copy.deepcopy(pod)
