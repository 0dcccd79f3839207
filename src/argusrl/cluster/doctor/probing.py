"""What pods can do on the shared file system: tried by those of a run, or by some made for it."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from argusrl.cluster.doctor.finding import Finding
from argusrl.cluster.kinds import EVENT, POD
from argusrl.cluster.kube_api import KubeApi, KubeError, Object, name_of
from argusrl.cluster.manifests.job import RAY_VERSION
from argusrl.cluster.overview import RunOverview
from argusrl.cluster.waiting import waiting_pods
from argusrl.errors import ArgusError

_SLOW_FSYNC_SECONDS = 0.1
_SLOW_BYTES_PER_SECOND = 50e6
_PROBE_SECONDS = 60.0
_POD_SECONDS = 300.0  # for a probe pod to be scheduled, pull its image and run
_SKEW_SECONDS = 2.0


def probe_run(kube: KubeApi, found: RunOverview) -> list[Finding]:
    """Write, rename and link in the run root from the head and a worker of a run, and look at clocks and versions."""
    findings: list[Finding] = []
    for role in ("head", "worker"):
        pods = [pod for pod in found.pods if pod.role == role and pod.phase == "Running"]
        if not pods:
            findings.append(Finding(f"storage from {role}", "skipped", f"no {role} pod of run {found.run} runs"))
            continue
        try:
            command, container = probe_command(found.folder), pods[0].container
            code, output = kube.execute(
                pods[0].name, command, found.namespace, container=container, seconds=_PROBE_SECONDS
            )
        except ArgusError as error:
            findings.append(Finding(f"storage from {role}", "skipped", error.message, error.hint))
            continue
        findings += probe_findings(role, pods[0].name, output if code == 0 else output or f"exit code {code}")
    return findings


def probe_with_pods(kube: KubeApi, pods: Iterable[tuple[str, Object]]) -> list[Finding]:
    """The same from pods made for it, (role, manifest), which are deleted again."""
    findings: list[Finding] = []
    for role, pod in pods:
        name, place = name_of(pod), pod["metadata"]["namespace"]
        try:
            kube.delete(POD, name, place, grace_seconds=0)
            kube.create(POD, pod, place)
            output = _output_of(kube, name, place)
            findings += probe_findings(role, name, output)
        except ArgusError as error:
            findings.append(Finding(f"storage from {role}", "failed", error.message, error.hint))
        finally:
            try:
                kube.delete(POD, name, place, grace_seconds=0)
            except KubeError as error:
                findings.append(
                    Finding(f"pod {name}", "warning", error.message, f"kubectl delete pod -n {place} {name}")
                )
    return findings


def _output_of(kube: KubeApi, name: str, place: str) -> str:
    deadline = time.monotonic() + _POD_SECONDS
    for change in kube.watch(POD, place, fields=f"metadata.name={name}", seconds=_POD_SECONDS):
        phase = (change.object.get("status") or {}).get("phase")
        if phase in ("Succeeded", "Failed"):
            return "\n".join(kube.logs(name, place))
        if time.monotonic() > deadline:
            break
    pod = kube.get(POD, name, place)
    why = waiting_pods([pod], kube.list(EVENT, place, fields="involvedObject.kind=Pod").items)
    text = "; ".join(one.text for one in why if one.text) or "it did not end"
    raise KubeError(f"pod {name} after {_POD_SECONDS:.0f} s: {text}", next((one.hint for one in why if one.hint), ""))


def probe_command(folder: str) -> list[str]:
    """What a pod runs to try the root of a run folder."""
    return ["python", "-m", "argusrl.cluster.root_probe", str(PurePosixPath(folder).parent)]


def probe_findings(role: str, pod: str, output: str) -> list[Finding]:
    """What the output of root_probe means; its last line is JSON."""
    last = (output.strip().splitlines() or [""])[-1]
    try:
        seen: dict[str, Any] = json.loads(last)
    except ValueError:
        return [Finding(f"storage from {role}", "failed", f"pod {pod}: {last or 'no output'}", "argusrl cluster logs")]
    return [_storage(role, pod, seen), *_clock(role, pod, seen), *_versions(role, seen)]


def _storage(role: str, pod: str, seen: dict[str, Any]) -> Finding:
    name = f"storage from {role}"
    if "error" in seen:
        return Finding(name, "failed", f"pod {pod}: {seen['error']}", seen.get("hint", ""))
    speed, fsync = seen["write_bytes_per_second"], seen["fsync_seconds"]
    text = (
        f"{seen['root']} ({seen['file_system']}): write, rename and link work; {speed / 1e6:.0f} MB/s, "
        f"fsync {fsync * 1000:.0f} ms, {seen['free_bytes'] / 1e9:.0f} GB free"
    )
    if speed < _SLOW_BYTES_PER_SECOND or fsync > _SLOW_FSYNC_SECONDS:
        fix = "a larger file system or a higher throughput tier: argusrl plan says what the recipe needs"
        return Finding(name, "warning", text, fix)
    return Finding(name, "ok", text)


def _clock(role: str, pod: str, seen: dict[str, Any]) -> list[Finding]:
    skew = seen["time"] - time.time()
    if abs(skew) <= _SKEW_SECONDS:
        return []
    return [Finding(f"clock of {role}", "warning", f"pod {pod} is {skew:+.1f} s off this machine", "chrony")]


def _versions(role: str, seen: dict[str, Any]) -> list[Finding]:
    """Of the image, against the manifest's Ray and against what is installed here."""
    here = platform.python_version()
    found = [
        Finding(f"versions of {role}", "ok", f"Ray {seen['ray']}, argusrl {seen['argusrl']}, Python {seen['python']}")
    ]
    if seen["ray"] != RAY_VERSION:
        text = f"the image has Ray {seen['ray']}, manifests say rayVersion {RAY_VERSION}"
        found.append(Finding(f"ray of {role}", "warning", text, "build the image by deploy/Dockerfile of this version"))
    if seen["python"] != here:
        text = f"{seen['python']} in the image, {here} here"
        fix = "Ray Client and Studio's ray sidecar need the same patch version; RayJobs and jobs do not"
        found.append(Finding(f"python of {role}", "warning", text, fix))
    return found
