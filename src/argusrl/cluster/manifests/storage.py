"""The shared file system: a claim that is there, a static FSx for Lustre volume, or one that a storage class makes.

None of them belongs to the job: deleting the job, or all of its objects, never deletes data.
"""

from __future__ import annotations

from argusrl.cluster.manifests.document import Document, metadata
from argusrl.config.cluster_sections import VolumeSection

VOLUME = "shared"


def storage(volume: VolumeSection, namespace: str, labels: dict[str, str]) -> list[Document]:
    """What has to be created before pods can mount the claim; nothing where it exists."""
    if volume.file_system_id is not None:
        return [_static_volume(volume, namespace, labels), _claim(volume, namespace, labels)]
    if volume.storage_class is not None:
        return [_claim(volume, namespace, labels)]
    return []


def volume_name(volume: VolumeSection, namespace: str) -> str:
    """Of the PersistentVolume: cluster-scoped, so the namespace is part of it."""
    return f"{namespace}-{volume.claim}"


def _static_volume(volume: VolumeSection, namespace: str, labels: dict[str, str]) -> Document:
    return Document(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": metadata(volume_name(volume, namespace), None, labels),
            "spec": {
                "capacity": {"storage": volume.capacity},
                "volumeMode": "Filesystem",
                "accessModes": ["ReadWriteMany"],
                "mountOptions": ["flock"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "claimRef": {"namespace": namespace, "name": volume.claim},
                "csi": {
                    "driver": "fsx.csi.aws.com",
                    "volumeHandle": volume.file_system_id,
                    "volumeAttributes": {"dnsname": volume.dns_name, "mountname": volume.mount_name},
                },
            },
        },
        "The FSx for Lustre file system that exists. Retain: nothing in Kubernetes can delete it. claimRef: only the\n"
        "claim below may bind it. This object is cluster-scoped: an administrator applies it once.",
    )


def _claim(volume: VolumeSection, namespace: str, labels: dict[str, str]) -> Document:
    spec: dict[str, object] = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": volume.storage_class or "",
        "resources": {"requests": {"storage": volume.capacity}},
    }
    how = f"Storage class {volume.storage_class} makes the volume; what becomes of it later is that class's rule."
    if volume.file_system_id is not None:
        spec["volumeName"] = volume_name(volume, namespace)
        how = "Bound to the volume above and to no other."
    return Document(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(volume.claim, namespace, labels),
            "spec": spec,
        },
        f"The claim that pods mount. {how} No job owns it: it stays when runs go.",
    )
