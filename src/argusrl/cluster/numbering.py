"""Which numbers of a run's submissions are taken, as its service account remembers it when their objects are gone."""

from __future__ import annotations

from argusrl.cluster.kinds import SERVICE_ACCOUNT
from argusrl.cluster.kube_api import KubeApi, KubeError, NotFound, annotations_of
from argusrl.cluster.names import SUBMISSION_LABEL, label_of


def remembered_number(kube: KubeApi, run: str, namespace: str) -> int:
    """The highest number on the account; 0 without an account. Raises KubeError."""
    try:
        account = kube.get(SERVICE_ACCOUNT, label_of(run), namespace)
    except NotFound:
        return 0
    text = annotations_of(account).get(SUBMISSION_LABEL, "")
    return int(text) if text.isdecimal() else 0


def remember_number(kube: KubeApi, run: str, namespace: str, number: int) -> None:
    """Write on the account that a number is taken.

    What forbids it is no reason to fail: the number is in the run folder, too.
    """
    try:
        if remembered_number(kube, run, namespace) < number:
            change = {"metadata": {"annotations": {SUBMISSION_LABEL: str(number)}}}
            kube.patch(SERVICE_ACCOUNT, label_of(run), change, namespace)
    except KubeError:
        return
