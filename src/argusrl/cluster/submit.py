"""Giving a run to a cluster: as a RayJob with a Ray cluster of its own, or as a job of a Ray cluster that is there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from argusrl.cluster.kinds import CLAIM, RAY_CLUSTER, RAY_JOB, SERVICE_ACCOUNT, VOLUME, kind_of
from argusrl.cluster.kube_api import (
    Conflict,
    Denied,
    KubeApi,
    KubeError,
    NotFound,
    Object,
    annotations_of,
    labels_of,
    name_of,
)
from argusrl.cluster.manifests.document import Document
from argusrl.cluster.manifests.recipe import PodFiles
from argusrl.cluster.names import (
    FOLDER_ANNOTATION,
    JOB_ANNOTATION,
    RUN_FOLDER_VARIABLE,
    RUN_LABEL,
    SUBMISSION_LABEL,
    SUBMISSION_VARIABLE,
    label_of,
    submission_name,
)
from argusrl.cluster.numbering import remembered_number
from argusrl.cluster.packed_recipe import ENTRYPOINT, pack
from argusrl.cluster.ray_jobs import RayJobs, RayJobView
from argusrl.cluster.sighting import is_leaving, is_live, submission_of
from argusrl.config.sections import Config
from argusrl.errors import ClusterError, ConfigError

_STORAGE = {VOLUME.name, CLAIM.name}


@dataclass(frozen=True, slots=True)
class Submitted:
    """What was created."""

    run: str
    number: int
    name: str  # RayJob, or submission id of the Ray job
    where: str  # namespace/RayJob, or the dashboard


def next_number(kube: KubeApi, run: str, namespace: str, recorded: int = 0) -> int:
    """The number of the next submission, above all that were there. Raises ClusterError while one is active.

    Objects of old submissions may be deleted; the run's service account remembers the highest number, and so does the
    run folder, where somebody sees it (`recorded`).
    """
    label = label_of(run)
    jobs = kube.list(RAY_JOB, namespace, labels=f"{RUN_LABEL}={label}").items
    for job in jobs:
        if is_leaving(job):
            raise ClusterError(
                f"RayJob {name_of(job)} of run {run} is being deleted", "wait until it is gone: argusrl cluster status"
            )
        if is_live(job):
            raise ClusterError(
                f"run {run} is in the cluster already: RayJob {name_of(job)}",
                f"argusrl cluster status {run} shows it; argusrl cluster stop {run} ends it",
            )
    return max([recorded, remembered_number(kube, run, namespace), *map(submission_of, jobs)]) + 1


def submit_documents(kube: KubeApi, documents: Sequence[Document], run: str, number: int) -> Submitted:
    """Create what `render` made, in order; the RayJob is the last. Raises KubeError, ClusterError."""
    *others, job = [document.value for document in documents]
    for document in others:
        if document["kind"] == SERVICE_ACCOUNT.name:
            document["metadata"].setdefault("annotations", {})[SUBMISSION_LABEL] = str(number)
        if document["kind"] in _STORAGE:
            _create_storage(kube, document)
        else:
            kube.apply(document)
    try:
        made = kube.create(RAY_JOB, job, job["metadata"]["namespace"])
    except Conflict as error:
        if not error.exists:
            raise
        raise ClusterError(
            f"RayJob {name_of(job)} was created by somebody else at this moment", f"argusrl cluster status {run}"
        ) from error
    return Submitted(run, number, name_of(made), f"{made['metadata']['namespace']}/{name_of(made)}")


def _create_storage(kube: KubeApi, document: Object) -> None:
    """What is there stays as it is: a file system is nobody's to change by submitting a run."""
    kind, name = kind_of(document), name_of(document)
    place = document["metadata"].get("namespace", "")
    try:
        kube.get(kind, name, place)
    except NotFound:
        pass
    except Denied:  # cluster-scoped things may be an administrator's: whether the claim is bound shows in status
        return
    else:
        return
    try:
        kube.create(kind, document, place)
    except Denied as error:
        raise Denied(
            f"{kind.name} {name} does not exist, and you may not create it: {error.message}",
            "an administrator creates it once: argusrl cluster install RECIPE "
            f"--run-namespace {_namespace_of(document)} --apply",
        ) from error


def _namespace_of(document: Object) -> str:
    """Of the claim, also where this is its volume."""
    claim = document["spec"].get("claimRef") or document["metadata"]
    return str(claim.get("namespace", ""))


def job_of_recipe(config: Config) -> tuple[str, dict[str, dict[str, str]]]:
    """Entry point and runtime environment by which any Ray cluster with argusrl in its image runs this recipe.

    Raises ConfigError where pods would not see a file that the recipe names.
    """
    root = config.run.root
    if not root.is_absolute():
        raise ConfigError(f"run.root {root}: give the absolute path of the shared file system as pods see it")
    kubernetes = config.cluster.kubernetes
    mount = kubernetes.volume.mount if kubernetes is not None else Path(*root.parts[:2])
    run = str(config.run.name)
    variables = pack(PodFiles(config, mount, PurePosixPath()).texts, root, run)
    return ENTRYPOINT, {"env_vars": {RUN_FOLDER_VARIABLE: str(root / run), **variables}}


def submit_job(jobs: RayJobs, config: Config, remembered: int = 0) -> Submitted:
    """Submit to a Ray cluster by its Jobs API, above number `remembered`: a new head knows no old jobs.

    Raises ClusterError while a job of the run is active.
    """
    run = str(config.run.name)
    entrypoint, runtime_env = job_of_recipe(config)
    mine = jobs_of_run(jobs, run)
    active = [job for job in mine if not job.ended]
    if active:
        raise ClusterError(
            f"run {run} is in that cluster already: job {active[0].submission_id} is {active[0].status}",
            f"argusrl cluster stop {run} --address {jobs.address} ends it",
        )
    number = max([remembered, *map(_number, mine)]) + 1
    name = submission_name(run, number)
    runtime_env["env_vars"][SUBMISSION_VARIABLE] = str(number)
    if not jobs.submit(name, entrypoint, runtime_env, {"run": run, "submission": str(number)}):
        raise ClusterError(
            f"job {name} was submitted by somebody else at this moment", "look at it: argusrl cluster logs"
        )
    return Submitted(run, number, name, jobs.address)


def jobs_of_run(jobs: RayJobs, run: str) -> list[RayJobView]:
    """Jobs of a run, newest first; those of maze-small are none of maze."""
    name = re.compile(re.escape(label_of(run)) + r"-s[1-9][0-9]*")
    return [job for job in jobs.list() if name.fullmatch(job.submission_id)]


def submit_to_cluster(
    kube: KubeApi, jobs: RayJobs, cluster: str, namespace: str, config: Config, recorded: int = 0
) -> Submitted:
    """Submit to a RayCluster that somebody made, and write on it what the controller needs to do it again.

    `recorded` is the highest number that the run folder knows, 0 where nobody sees it.

    Raises ClusterError where it runs another run, or a job of this one is active.
    """
    run = label_of(str(config.run.name))
    found = kube.get(RAY_CLUSTER, cluster, namespace)
    annotations = annotations_of(found)
    other = labels_of(found).get(RUN_LABEL, run)
    if other != run and JOB_ANNOTATION in annotations:
        raise ClusterError(
            f"RayCluster {cluster} is run {other}'s",
            f"argusrl cluster stop {other} --cluster {cluster} first, or take another cluster",
        )
    remembered = int(annotations.get(SUBMISSION_LABEL, "0")) if other == run else 0
    made = submit_job(jobs, config, max(recorded, remembered))
    entrypoint, runtime_env = job_of_recipe(config)
    notes = {
        JOB_ANNOTATION: json.dumps({"entrypoint": entrypoint, "runtime_env": runtime_env}, sort_keys=True),
        FOLDER_ANNOTATION: str(config.run.root / str(config.run.name)),
        SUBMISSION_LABEL: str(made.number),
    }
    try:
        kube.patch(RAY_CLUSTER, cluster, {"metadata": {"labels": {RUN_LABEL: run}, "annotations": notes}}, namespace)
    except KubeError as error:
        raise ClusterError(
            f"job {made.name} runs, but the controller will not submit it again after a fault: RayCluster {cluster} "
            f"could not be annotated: {error.message}",
            error.hint,
        ) from error
    return made


def release_cluster(kube: KubeApi, cluster: str, namespace: str) -> None:
    """Take the run off a RayCluster, so that the controller does not submit it again."""
    change = {"metadata": {"annotations": {JOB_ANNOTATION: None}, "labels": {RUN_LABEL: None}}}
    kube.patch(RAY_CLUSTER, cluster, change, namespace)


def _number(job: RayJobView) -> int:
    return int(job.submission_id.rpartition("-s")[2])
