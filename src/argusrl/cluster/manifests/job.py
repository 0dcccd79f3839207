"""The RayJob of a submission, and the same job under the number of a later one."""

from __future__ import annotations

import copy
from typing import Any

from argusrl.cluster.manifests.document import Document, metadata
from argusrl.cluster.manifests.pods import HEAD_OBJECT_STORE_BYTES, head_pod, worker_pod
from argusrl.cluster.manifests.recipe import RECIPE, PodFiles
from argusrl.cluster.manifests.setup import RECIPE_FOLDER, Setup
from argusrl.cluster.manifests.sizes import object_store_bytes
from argusrl.cluster.names import SUBMISSION_LABEL, submission_name

RAY_VERSION = "2.60.0"
"""Of the image that deploy/Dockerfile builds."""

FINISHED_SECONDS = 60
"""Pods stay so long after the job ended, for whoever reads their logs."""

STARTING_SECONDS = 1800
"""For pulling the image and staging weights, on top of the time that is waited for nodes."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
_STUDIO = "access.sagemaker.amazonaws.com"


def ray_job(setup: Setup, files: PodFiles) -> Document:
    """The job: its own Ray cluster, one attempt at running `argusrl train` in it."""
    queue = setup.kubernetes.queue
    labels = dict(setup.labels)
    if queue is not None:
        labels[QUEUE_LABEL] = queue.name
        if queue.priority is not None:
            labels[PRIORITY_LABEL] = queue.priority
    annotations = dict(setup.folder_annotation)
    if setup.kubernetes.studio != "off":
        annotations[f"{_STUDIO}/enabled"] = "true"
        annotations[f"{_STUDIO}/access-strategy"] = f"ray-access-strategy-{setup.kubernetes.studio}"
    waiting_seconds = int(setup.config.cluster.budget.capacity_wait_seconds) + STARTING_SECONDS
    return Document(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": metadata(setup.name, setup.kubernetes.namespace, labels, **annotations),
            "spec": {
                "entrypoint": f"argusrl train {RECIPE_FOLDER / RECIPE}",
                "jobId": setup.name,
                "metadata": {"run": str(setup.config.run.name), "submission": str(setup.submission)},
                "submissionMode": "HTTPMode",
                "backoffLimit": 0,
                "submitterConfig": {"backoffLimit": 0},
                "preRunningDeadlineSeconds": waiting_seconds,
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": FINISHED_SECONDS,
                "rayClusterSpec": _ray_cluster(setup, files),
            },
        },
        _comment(waiting_seconds, queued=queue is not None),
    )


def _ray_cluster(setup: Setup, files: PodFiles) -> dict[str, Any]:
    nodes = setup.kubernetes.workers.nodes
    return {
        "rayVersion": RAY_VERSION,
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {
                "dashboard-host": "0.0.0.0",
                "num-cpus": "0",
                "num-gpus": "0",
                "object-store-memory": str(HEAD_OBJECT_STORE_BYTES),
            },
            "template": head_pod(setup, files),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": nodes,
                "minReplicas": nodes,
                "maxReplicas": nodes,
                "numOfHosts": 1,
                "rayStartParams": {"object-store-memory": str(object_store_bytes(setup.workers.memory_bytes))},
                "template": worker_pod(setup, files),
            }
        ],
    }


def _comment(waiting_seconds: int, *, queued: bool) -> str:
    lines = [
        "The run itself: a Ray cluster of its own, and one attempt at `argusrl train` on its head.",
        "- backoffLimit 0, twice: only the argusrl controller submits again, after it fenced the attempt before. The",
        "  operator's retry would start a second cluster beside a first one that may still write.",
        "- HTTPMode: the operator hands the job in. A submitter pod would be one more thing whose loss ends the job.",
        f"- preRunningDeadlineSeconds: pods that never come up free what they hold after {waiting_seconds} s; the",
        "  controller gives up earlier and says why (cluster.budget.capacity_wait_seconds).",
        "- The head has 0 CPUs for Ray, so no rank, engine or episode worker goes there, and a small object store.",
        "- restartPolicy Never: a pod that failed is replaced as a whole, elsewhere; a head that came back in place",
        "  would be an empty Ray that knows no job.",
        "- The base weights are copied to the node's NVMe once and mounted over model.path: the recipe stays the same.",
    ]
    if queued:
        lines += [
            "- Kueue owns spec.suspend. Its limits are kept: one worker group, no autoscaling, shutdown when finished.",
            "  Deleting the job, or submitting it again, gives its admitted quota back.",
        ]
    return "\n".join(lines)


def renumbered(job: dict[str, Any], run: str, submission: int) -> dict[str, Any]:
    """A rendered or running RayJob as another submission of the same run: a new object to create.

    What the API server or controllers added (status, uid, resourceVersion, owners, spec.suspend) is left out.
    """
    name, old = submission_name(run, submission), job["metadata"]
    new = copy.deepcopy({key: job[key] for key in ("apiVersion", "kind", "spec")})
    kept = {key: copy.deepcopy(old[key]) for key in ("namespace", "labels", "annotations") if key in old}
    new = {
        "apiVersion": new["apiVersion"],
        "kind": new["kind"],
        "metadata": {"name": name, **kept},
        "spec": new["spec"],
    }
    spec = new["spec"]
    spec.pop("suspend", None)
    spec["jobId"] = name
    spec["metadata"] = {**spec.get("metadata", {}), "submission": str(submission)}
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    for holder in [new, *(group["template"] for group in groups)]:
        holder["metadata"].setdefault("labels", {})[SUBMISSION_LABEL] = str(submission)
    return new
