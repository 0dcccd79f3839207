"""Why pods of a run ended, in `attempts/NNN/logs/pods.jsonl`: Kubernetes forgets a pod with its object, and its events.

The pods' own logs and Ray's are copied by the run itself (training/probing.py);
what only Kubernetes knows is kept here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argusrl.cluster.kinds import EVENT
from argusrl.cluster.kube_api import KubeApi, KubeError, Object, name_of
from argusrl.errors import StorageError
from argusrl.storage.files import exists
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import append_line, read_lines

_MOST_EVENTS = 20  # of a pod, the newest
_MOST_CHARACTERS = 1000  # of a message


@dataclass(slots=True)
class PodEnds:
    """Of one run. `look` at its pods every few seconds; it never raises."""

    run: RunFolder
    kube: KubeApi
    wall: Callable[[], float] = time.time
    _there: dict[str, Object] = field(default_factory=dict)  # pods of the last look, by uid
    _kept: dict[int, set[str]] = field(default_factory=dict)  # keys on file, by attempt

    def look(self, attempt: int, pods: Sequence[Object]) -> None:
        """Keep what ended since the last look: containers by their status, and pods that are not there any more."""
        now = {str(pod["metadata"].get("uid", "")): pod for pod in pods}
        gone = [pod for uid, pod in self._there.items() if uid not in now]
        self._there = now
        try:
            if attempt == 0 or not exists(self.run.attempt(attempt)):
                return
            for pod in pods:
                for key, end in container_ends(pod):
                    self._keep(attempt, key, pod, end)
            for pod in gone:
                key = f"{pod['metadata'].get('uid')}/gone"
                self._keep(attempt, key, pod, {"reason": "gone", "asked_to_end": _asked_to_end(pod)})
        except StorageError:  # nothing depends on it
            return

    def _keep(self, attempt: int, key: str, pod: Object, end: dict[str, Any]) -> None:
        path = self._path(attempt)
        if attempt not in self._kept:
            self._kept[attempt] = {str(line.get("key")) for line in read_lines(path)}
        if key in self._kept[attempt]:
            return
        self._kept[attempt].add(key)
        line = {
            "time": self.wall(),
            "key": key,
            "pod": name_of(pod),
            "node": str((pod.get("spec") or {}).get("nodeName") or ""),
            "phase": str((pod.get("status") or {}).get("phase") or ""),
            **end,
            "events": self._events(pod),
        }
        append_line(path, line)

    def _path(self, attempt: int) -> Path:
        return self.run.attempt(attempt) / "logs" / "pods.jsonl"

    def _events(self, pod: Object) -> list[dict[str, Any]]:
        place = pod["metadata"].get("namespace")
        try:
            found = self.kube.list(EVENT, place, fields=f"involvedObject.name={name_of(pod)}").items
        except KubeError:
            return []
        lines = [
            {
                "time": event.get("lastTimestamp") or event.get("eventTime") or "",
                "reason": event.get("reason", ""),
                "message": str(event.get("message", ""))[:_MOST_CHARACTERS],
                "count": event.get("count", 1),
            }
            for event in found
        ]
        return sorted(lines, key=lambda line: str(line["time"]))[-_MOST_EVENTS:]


def container_ends(pod: Object) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, what is known) of every container that ended, restarted ones included, and of a pod that was evicted."""
    uid, status = pod["metadata"].get("uid"), pod.get("status") or {}
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        name, restarts = container.get("name", ""), container.get("restartCount", 0)
        for state, number in (("lastState", restarts - 1), ("state", restarts)):
            over = (container.get(state) or {}).get("terminated")
            if not over or (over.get("reason") == "Completed" and over.get("exitCode") == 0):
                continue
            yield (
                f"{uid}/{name}/{number}",
                {
                    "container": name,
                    "reason": over.get("reason", ""),
                    "exit_code": over.get("exitCode"),
                    "signal": over.get("signal"),
                    "message": str(over.get("message", ""))[:_MOST_CHARACTERS],
                    "started": over.get("startedAt", ""),
                    "finished": over.get("finishedAt", ""),
                },
            )
    if status.get("phase") == "Failed" and status.get("reason"):  # "Evicted", "NodeLost", …
        message = str(status.get("message", ""))[:_MOST_CHARACTERS]
        yield f"{uid}/pod", {"reason": status["reason"], "message": message}


def _asked_to_end(pod: Object) -> str:
    return str(pod["metadata"].get("deletionTimestamp") or "")
