"""Names by which a run, its submissions and their objects in a cluster find each other."""

from __future__ import annotations

import hashlib
import re

RUN_LABEL = "argusrl.io/run"  # name of the run, made fit for a label
SUBMISSION_LABEL = "argusrl.io/submission"  # "3": the third time that the run was given to the cluster
FOLDER_ANNOTATION = "argusrl.io/run-folder"  # as pods see it: /fsx/argusrl/runs/maze
DRAIN_ANNOTATION = "argusrl.io/drain"  # on a pod: why its node is to be emptied; the controller asks the driver
JOB_ANNOTATION = "argusrl.io/job"  # on a RayCluster that somebody else made: JSON {entrypoint, runtime_env}

RUN_FOLDER_VARIABLE = "ARGUSRL_RUN_FOLDER"  # in every pod of a run
SUBMISSION_VARIABLE = "ARGUSRL_SUBMISSION"  # number of the submission that a pod is of
POD_VARIABLE = "POD_NAME"
NODE_VARIABLE = "NODE_NAME"
HOST_VARIABLE = "HOST_IP"

RAYJOB_NAME_LENGTH = 47  # KubeRay refuses longer ones


def label_of(run: str) -> str:
    """The name of a run as a label or part of an object's name: lower case, DNS-1035, unambiguous."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not slug or not slug[0].isalpha():
        slug = f"run-{slug}".rstrip("-")
    longest = RAYJOB_NAME_LENGTH - len("-s9999")
    if slug == run and len(slug) <= longest:
        return slug
    mark = hashlib.sha256(run.encode()).hexdigest()[:6]
    return f"{slug[: longest - len(mark) - 1].rstrip('-')}-{mark}"


def submission_name(run: str, number: int) -> str:
    """The name of the RayJob, or submission id of the Ray job, of a run's n-th submission, counted from 1.

    It follows from the run alone, so whoever creates it second finds it there.
    """
    return f"{label_of(run)}-s{number}"
