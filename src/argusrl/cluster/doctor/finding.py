"""One line of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from argusrl.cluster.kube_api import KubeApi, KubeError
from argusrl.config.sections import Config

Result = Literal["ok", "warning", "failed", "skipped"]

_VITAL = ("api server", "rights")  # who may see neither knows nothing of the cluster


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `is_fit` says what they come to."""

    name: str
    result: Result
    detail: str
    fix: str = ""  # what to do; empty where there is nothing


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be checked: a namespace, and the needs of a recipe if there is one."""

    kube: KubeApi
    config: Config | None = None

    @property
    def namespace(self) -> str:
        return self.kube.namespace


Check = Callable[[Subject], list[Finding]]


def guarded(name: str, check: Check, subject: Subject) -> list[Finding]:
    """Run a check; what it may not read (403), or what is not answered, becomes a finding."""
    try:
        return check(subject)
    except KubeError as error:
        result: Result = "skipped" if error.status == 403 else "failed"
        return [Finding(name, result, error.message, error.hint)]


def is_fit(findings: Sequence[Finding]) -> bool:
    """Nothing failed, and what tells whether the rest can be believed was looked at."""
    return all(one.result != "failed" and (one.result != "skipped" or one.name not in _VITAL) for one in findings)


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of `v1.7.0` or `1.7`; empty where there are none."""
    numbers = []
    for part in text.lstrip("v").split("-")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
