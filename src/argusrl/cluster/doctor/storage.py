"""The shared file system: whether its claim is bound, and fit to hold runs."""

from __future__ import annotations

from argusrl.cluster.doctor.access import may
from argusrl.cluster.doctor.finding import Finding, Result, Subject
from argusrl.cluster.kinds import CLAIM, STORAGE_CLASS, VOLUME
from argusrl.cluster.kube_api import Denied, NotFound, Object, name_of
from argusrl.cluster.manifests.storage import volume_name
from argusrl.config.cluster_sections import VolumeSection

_OBJECT_STORE = "s3.csi.aws.com"


def check_claim(subject: Subject) -> list[Finding]:
    """The recipe's claim, its volume and its storage class."""
    section = subject.config.cluster.kubernetes if subject.config is not None else None
    volume = section.volume if section is not None else VolumeSection()
    try:
        claim = subject.kube.get(CLAIM, volume.claim)
    except NotFound:
        if volume.file_system_id is not None:
            return [_claim_to_be(volume), *_static_volume(subject, volume)]
        if volume.storage_class is not None:
            return [_claim_to_be(volume), *_class(subject, volume)]
        return [_no_claim(subject, volume, "failed" if section is not None else "warning")]
    phase = str((claim.get("status") or {}).get("phase", "unknown"))
    modes = claim["spec"].get("accessModes") or []
    if phase != "Bound":
        fix = f"kubectl describe pvc -n {subject.namespace} {volume.claim}"
        return [Finding("claim", "failed", f"{volume.claim} is {phase}", fix)]
    if "ReadWriteMany" not in modes:
        detail = f"{volume.claim} is {', '.join(modes) or 'without an access mode'}, and all pods of a run write there"
        return [Finding("claim", "failed", detail, "a shared file system: FSx for Lustre, EFS or NFS, ReadWriteMany")]
    return [Finding("claim", "ok", f"{volume.claim} is bound, {', '.join(modes)}"), *_volume(subject, claim)]


def check_presence(subject: Subject) -> list[Finding]:
    """Whether a recipe's claim that nothing of argusrl creates is there at all; nothing where it is."""
    section = subject.config.cluster.kubernetes if subject.config is not None else None
    if section is None or section.volume.file_system_id is not None or section.volume.storage_class is not None:
        return []
    try:
        subject.kube.get(CLAIM, section.volume.claim)
    except NotFound:
        return [_no_claim(subject, section.volume, "failed")]
    return []


def _no_claim(subject: Subject, volume: VolumeSection, result: Result) -> Finding:
    return Finding(
        "claim",
        result,
        f"namespace {subject.namespace} has no PersistentVolumeClaim {volume.claim}",
        "give cluster.kubernetes.volume.claim, or file_system_id, dns_name and mount_name of an FSx system",
    )


def _claim_to_be(volume: VolumeSection) -> Finding:
    return Finding("claim", "ok", f"{volume.claim} is not there yet: submit creates it")


def _static_volume(subject: Subject, volume: VolumeSection) -> list[Finding]:
    """The volume that the claim will be bound to: cluster-scoped, so users may rarely create it."""
    name = volume_name(volume, subject.namespace)
    fix = f"an administrator runs: argusrl cluster install RECIPE --run-namespace {subject.namespace} --apply"
    try:
        subject.kube.get(VOLUME, name, "")
    except NotFound:
        if may(subject.kube, "", "create", VOLUME):
            return [Finding("volume", "ok", f"{name} is not there yet: submit creates it")]
        return [Finding("volume", "failed", f"there is no PersistentVolume {name}, and you may not create it", fix)]
    except Denied as error:
        return [Finding("volume", "warning", f"{name} may be missing: {error.message}", fix)]
    return [Finding("volume", "ok", f"{name} is there")]


def _class(subject: Subject, volume: VolumeSection) -> list[Finding]:
    if volume.storage_class is None:
        return []
    try:
        found = subject.kube.get(STORAGE_CLASS, volume.storage_class)
    except NotFound:
        there = ", ".join(name_of(one) for one in subject.kube.list(STORAGE_CLASS, "").items) or "none"
        return [Finding("storage class", "failed", f"there is no {volume.storage_class}", f"there are: {there}")]
    return [Finding("storage class", "ok", f"{volume.storage_class} of {found.get('provisioner')}")]


def _volume(subject: Subject, claim: Object) -> list[Finding]:
    name = claim["spec"].get("volumeName", "")
    try:
        volume = subject.kube.get(VOLUME, name, "")
    except Denied as error:
        return [Finding("volume", "skipped", error.message, "an administrator can look at PersistentVolumes")]
    driver = str((volume["spec"].get("csi") or {}).get("driver", "no CSI driver"))
    policy = volume["spec"].get("persistentVolumeReclaimPolicy")
    if driver == _OBJECT_STORE:
        detail = f"{name} is a bucket (Mountpoint for S3): it has no rename and no links, which run folders need"
        return [Finding("volume", "failed", detail, "FSx for Lustre, EFS or NFS for run.root; S3 is fine for models")]
    if policy != "Retain":
        detail = f"{name} ({driver}) has reclaim policy {policy}: whoever deletes the claim deletes every run"
        fix = f'kubectl patch pv {name} -p \'{{"spec":{{"persistentVolumeReclaimPolicy":"Retain"}}}}\''
        return [Finding("volume", "warning", detail, fix)]
    return [Finding("volume", "ok", f"{name}: {driver}, {policy}")]
