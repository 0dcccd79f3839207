"""KubeRay, Kueue and the argusrl controller: whether they are there, and which version."""

from __future__ import annotations

from typing import Any

from argusrl.cluster.doctor.finding import Finding, Result, Subject, version_of
from argusrl.cluster.kinds import CRD, DEPLOYMENT, LOCAL_QUEUE, RAY_CLUSTER, RAY_JOB, Kind
from argusrl.cluster.kube_api import Denied, KubeApi, NotFound, Object, name_of
from argusrl.cluster.kuberay_release import KUBERAY_INSTALL

_UPGRADE = "upgrade KubeRay, its CRDs first (helm does not upgrade CRDs by itself)"
_TESTED = (1, 7)  # manifests are checked against the schemas of this version
_OLDEST = (1, 6)
_DELETES_FINISHED = "DELETE_RAYJOB_CR_AFTER_JOB_FINISHES"
_FIELDS = ("preRunningDeadlineSeconds", "submitterConfig", "ttlSecondsAfterFinished")  # of RayJob, that are rendered


def check_crds(subject: Subject) -> list[Finding]:
    """RayJob and RayCluster v1, with the fields that manifests use."""
    return [_crd(subject, kind) for kind in (RAY_JOB, RAY_CLUSTER)]


def check_operator(subject: Subject) -> list[Finding]:
    """KubeRay's operator: its image, and whether it runs."""
    found = subject.kube.list(DEPLOYMENT, "", labels="app.kubernetes.io/name=kuberay-operator").items
    if not found:
        text = "no Deployment app.kubernetes.io/name=kuberay-operator"
        return [Finding("kuberay operator", "failed", text, KUBERAY_INSTALL)]
    return [Finding("kuberay operator", *_operator(deployment)) for deployment in found]


def _operator(deployment: Object) -> tuple[Result, str, str]:
    place = f"{deployment['metadata'].get('namespace')}/{name_of(deployment)}"
    image = _image(deployment)
    version = version_of(image.rpartition(":")[2])
    text = f"{place} {image.rpartition('/')[2]}"
    if not (deployment.get("status") or {}).get("availableReplicas"):
        return "failed", f"{text} does not run", f"kubectl describe deployment -n {place.replace('/', ' ')}"
    if not version:
        return "warning", f"{text}: its tag says no version", "1.6 or newer is needed"
    if version[:2] < _OLDEST:
        return "failed", f"{text} is too old", _UPGRADE
    if _deletes_finished(deployment):
        detail = f"{text} deletes RayJobs that are over ({_DELETES_FINISHED}): what it says about them goes with them"
        return "warning", detail, "take that variable off: a run that is stopped within seconds of it comes back"
    if version[:2] != _TESTED:
        detail = f"{text}; manifests are checked against the schemas of 1.7"
        return "warning", detail, "argusrl cluster manifest RECIPE --live"
    return "ok", text, ""


def check_controller(subject: Subject) -> list[Finding]:
    """The argusrl controller, without which a run that lost its head stays away."""
    labels = "app.kubernetes.io/name=argusrl,app.kubernetes.io/component=controller"
    try:
        found = subject.kube.list(DEPLOYMENT, "", labels=labels).items
    except Denied:
        found = subject.kube.list(DEPLOYMENT, labels=labels).items
    running = [one for one in found if (one.get("status") or {}).get("availableReplicas")]
    if running:
        return [Finding("argusrl controller", "ok", ", ".join(f"{name_of(one)} {_image(one)}" for one in running))]
    detail = "is there and does not run" if found else "is not installed: nobody submits a run again that lost its head"
    return [Finding("argusrl controller", "warning", detail, "an administrator runs: argusrl cluster install")]


def check_queue(subject: Subject) -> list[Finding]:
    """Kueue's local queue of the recipe; nothing without one."""
    section = subject.config.cluster.kubernetes if subject.config is not None else None
    if section is None or section.queue is None:
        return []
    name = section.queue.name
    try:
        subject.kube.get(LOCAL_QUEUE, name)
    except NotFound:
        there = _names(subject.kube, LOCAL_QUEUE)
        fix = f"queues there: {there}" if there else "task governance names them hyperpod-ns-TEAM-localqueue"
        return [Finding("queue", "failed", f"namespace {subject.namespace} has no LocalQueue {name}", fix)]
    return [Finding("queue", "ok", name)]


def _crd(subject: Subject, kind: Kind) -> Finding:
    name = f"{kind.plural}.{kind.group}"
    try:
        definition = subject.kube.get(CRD, name)
    except NotFound:
        return Finding(f"crd {kind.name}", "failed", f"{name} is not installed", KUBERAY_INSTALL)
    except Denied:  # cluster-scoped; whether the kind is served can be seen in the namespace, too
        try:
            subject.kube.list(kind)
        except NotFound:
            return Finding(f"crd {kind.name}", "failed", f"{name} is not installed", KUBERAY_INSTALL)
        return Finding(f"crd {kind.name}", "ok", f"{kind.api_version} is served (you may not read the CRD itself)")
    versions: dict[str, Object] = {one["name"]: one for one in definition["spec"]["versions"]}
    version = kind.api_version.rpartition("/")[2]
    if not versions.get(version, {}).get("served"):
        detail = f"{name} serves {', '.join(versions)}, not {version}"
        return Finding(f"crd {kind.name}", "failed", detail, _UPGRADE)
    fields = _spec_fields(versions[version])
    absent = [field for field in _FIELDS if field not in fields] if kind is RAY_JOB and fields else []
    if absent:
        return Finding(f"crd {kind.name}", "failed", f"{name} does not know {', '.join(absent)}", _UPGRADE)
    return Finding(f"crd {kind.name}", "ok", f"{name} {version}")


def _spec_fields(version: Object) -> dict[str, Any]:
    schema = (version.get("schema") or {}).get("openAPIV3Schema") or {}
    fields: dict[str, Any] = ((schema.get("properties") or {}).get("spec") or {}).get("properties") or {}
    return fields


def _deletes_finished(deployment: Object) -> bool:
    variables = deployment["spec"]["template"]["spec"]["containers"][0].get("env") or []
    return any(one["name"] == _DELETES_FINISHED and str(one.get("value")).lower() == "true" for one in variables)


def _image(deployment: Object) -> str:
    return str(deployment["spec"]["template"]["spec"]["containers"][0].get("image", ""))


def _names(kube: KubeApi, kind: Kind) -> str:
    try:
        return ", ".join(name_of(one) for one in kube.list(kind).items)
    except NotFound:
        return ""
