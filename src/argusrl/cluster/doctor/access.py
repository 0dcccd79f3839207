"""The API server: whether it answers, what time it thinks it is, and what you may do."""

from __future__ import annotations

from argusrl.cluster.doctor.finding import Finding, Result, Subject, version_of
from argusrl.cluster.kinds import (
    ACCESS_REVIEW,
    CONFIG_MAP,
    EVENT,
    LEASE,
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    SERVICE_ACCOUNT,
    Kind,
)
from argusrl.cluster.kube_api import Denied, KubeApi, KubeError, NotFound, name_of
from argusrl.cluster.overview import seconds_since

_SKEW_SECONDS = 5.0  # the header that tells the time knows it to a second
_FAR_SKEW_SECONDS = 60.0  # tokens and signatures stop working
_LEASE_AHEAD_SECONDS = 2.0
_LEASE_LATE_SECONDS = 40.0  # Kubernetes' own grace for a node that is silent
_OLDEST_SERVER = (1, 27)  # fieldValidation=Strict for everything

Right = tuple[str, Kind, str]  # verb, kind, subresource

NEEDED: dict[str, tuple[Right, ...]] = {
    "submit": (
        ("create", RAY_JOB, ""),
        ("list", RAY_JOB, ""),
        ("patch", CONFIG_MAP, ""),
        ("create", CONFIG_MAP, ""),
        ("patch", SERVICE_ACCOUNT, ""),
        ("create", SERVICE_ACCOUNT, ""),
        ("patch", NETWORK_POLICY, ""),
        ("create", NETWORK_POLICY, ""),
    ),
    "status": (
        ("list", RAY_JOB, ""),
        ("watch", RAY_JOB, ""),
        ("list", RAY_CLUSTER, ""),
        ("list", POD, ""),
        ("list", EVENT, ""),
    ),
    "logs": (("get", POD, "log"),),
    "stop": (("delete", RAY_JOB, ""),),
}
"""Rights in the namespace without which a sub-verb does nothing."""

WANTED: dict[str, tuple[Right, ...]] = {
    "node health in status": (("get", NODE, ""), ("list", NODE, "")),
    "drain, and the run's record in status": (("get", POD, "exec"), ("create", POD, "exec")),
    "drain without running commands in pods": (("patch", POD, ""),),
    "doctor --probe": (("create", POD, ""), ("delete", POD, "")),
    "--cluster from outside": (("get", POD, "portforward"), ("create", POD, "portforward"), ("patch", RAY_CLUSTER, "")),
}
"""Rights without which a sub-verb does less. Web sockets begin as GET, and newer servers ask for create on top."""


def check_server(subject: Subject) -> list[Finding]:
    """Whether it answers, and its version."""
    version = subject.kube.version()
    if version_of(version)[:2] < _OLDEST_SERVER:
        return [Finding("api server", "failed", version, "Kubernetes 1.27 or newer is needed: upgrade the cluster")]
    return [Finding("api server", "ok", f"{version}, namespace {subject.namespace}")]


def check_namespace(subject: Subject) -> list[Finding]:
    """Whether the namespace is there; nothing where it is, or where you may not know."""
    try:
        subject.kube.get(NAMESPACE, subject.namespace)
    except NotFound:
        there = ", ".join(name_of(one) for one in subject.kube.list(NAMESPACE).items)
        return [Finding("namespace", "failed", f"there is no namespace {subject.namespace}", f"there are: {there}")]
    except Denied:
        pass
    return []


def check_clocks(subject: Subject) -> list[Finding]:
    """The server's clock against this machine's, and the nodes' against the server's."""
    skew = subject.kube.clock_skew_seconds()
    text = f"the API server is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine"
    if abs(skew) <= _SKEW_SECONDS:
        found = [Finding("clock", "ok", "this machine and the API server agree to within seconds")]
    else:
        result: Result = "failed" if abs(skew) > _FAR_SKEW_SECONDS else "warning"
        found = [Finding("clock", result, text, "set this machine's clock: chrony or ntp")]
    try:
        leases = subject.kube.list(LEASE, "kube-node-lease").items
    except KubeError as error:
        return [*found, Finding("node clocks", "skipped", error.message, "the right to list leases in kube-node-lease")]
    if not leases:
        return [*found, Finding("node clocks", "skipped", "no node leases in kube-node-lease")]
    ages = {
        name_of(lease): seconds_since(renewed) + skew
        for lease in leases
        if (renewed := (lease.get("spec") or {}).get("renewTime"))
    }
    ahead = sorted(name for name, age in ages.items() if age < -_LEASE_AHEAD_SECONDS - 1)
    late = sorted(name for name, age in ages.items() if age > _LEASE_LATE_SECONDS)
    if ahead:
        found.append(
            Finding("node clocks", "warning", f"ahead of the API server: {', '.join(ahead)}", "chrony on those nodes")
        )
    if late:
        found.append(
            Finding(
                "node heartbeats", "warning", f"nothing heard for 40 s or more of {', '.join(late)}", "see node health"
            )
        )
    if not ahead and not late:
        found.append(Finding("node clocks", "ok", f"{len(ages)} nodes renew their leases in time"))
    return found


def check_rights(subject: Subject) -> list[Finding]:
    """What you may do in the namespace, sub-verb by sub-verb, and what is missing."""
    known: dict[Right, bool] = {}

    def missing(rights: tuple[Right, ...]) -> list[str]:
        for right in rights:
            if right not in known:
                known[right] = may(subject.kube, subject.namespace, *right)
        return [_text(right) for right in rights if not known[right]]

    lacking = {verb: gaps for verb, rights in NEEDED.items() if (gaps := missing(rights))}
    lesser = {what: gaps for what, rights in WANTED.items() if (gaps := missing(rights))}
    fix = "ask an administrator: argusrl cluster install --group GROUP, or an EKS access entry with a cluster policy"
    found = [
        Finding(f"rights: {verb}", "failed", f"you may not {', '.join(gaps)} in {subject.namespace}", fix)
        for verb, gaps in lacking.items()
    ]
    found += [
        Finding("rights", "warning", f"you may not {', '.join(gaps)}, needed for {what}", fix)
        for what, gaps in lesser.items()
    ]
    return found or [Finding("rights", "ok", f"submit, status, logs, drain and stop in {subject.namespace}")]


def may(kube: KubeApi, namespace: str, verb: str, kind: Kind, sub: str = "") -> bool:
    """Whether the caller has a right. Raises KubeError."""
    asked = {"verb": verb, "group": kind.group, "resource": kind.plural}
    if sub:
        asked["subresource"] = sub
    if kind.namespaced:
        asked["namespace"] = namespace
    answer = kube.create(ACCESS_REVIEW, {"metadata": {}, "spec": {"resourceAttributes": asked}}, "")
    return bool((answer.get("status") or {}).get("allowed"))


def _text(right: Right) -> str:
    verb, kind, sub = right
    return f"{verb} {kind.plural}{f'/{sub}' if sub else ''}"
