"""Drains: somebody wants a node emptied before it goes; the driver of the run answers when nothing is left on it.

A wish is write-once and named by the pod, so a hook in the pod, the controller and a person may all ask for the same.
"""

from __future__ import annotations

import time

import msgspec

from argusrl.errors import StorageError
from argusrl.storage.files import exists, list_folder
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import publish_file
from argusrl.storage.sealed_json import encode_sealed, read_sealed

DRAIN_SECONDS = 30.0  # what is not handed over by then is abandoned
_WISH, _ANSWER = ".json", ".done.json"


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """The wish that the node of a pod be emptied."""

    pod: str
    node: str = ""  # Kubernetes node
    reason: str
    asked_by: str  # "hook" | "controller" | "person"
    time: float  # seconds since 1970
    deadline_seconds: float = DRAIN_SECONDS


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    pod: str
    outcome: str  # "drained" | "abandoned" | "nothing there"
    seconds: float  # from the moment the driver saw the wish
    handed_over: int = 0  # unfinished trajectories that others go on with
    time: float = 0.0


def ask_for_drain(run: RunFolder, drain: Drain) -> Drain:
    """Write the wish; the one that stands already is returned instead. Raises StorageError."""
    try:
        publish_file(run.drain(drain.pod), encode_sealed(msgspec.to_builtins(drain)))
    except FileExistsError:
        return read_drain(run, drain.pod)
    return drain


def read_drain(run: RunFolder, pod: str) -> Drain:
    """The wish for a pod. Raises StorageError, FileNotFoundError."""
    return msgspec.convert(read_sealed(run.drain(pod)), Drain)


def asked_pods(run: RunFolder) -> dict[str, bool]:
    """Pods that there is a wish for, and whether it is answered: by one look at one folder. Raises StorageError."""
    names = {path.name for path in list_folder(run.drains) if not path.name.startswith(".")}
    wishes = [name for name in names if name.endswith(_WISH) and not name.endswith(_ANSWER)]
    return {pod: pod + _ANSWER in names for pod in (name.removesuffix(_WISH) for name in wishes)}


def answer_drain(run: RunFolder, answer: Drained) -> None:
    """Say what became of a wish, once. Raises StorageError."""
    try:
        publish_file(run.drained(answer.pod), encode_sealed(msgspec.to_builtins(answer)))
    except FileExistsError:
        return


def read_drained(run: RunFolder, pod: str) -> Drained | None:
    """The answer; None while there is none. Raises StorageError."""
    if not exists(run.drained(pod)):
        return None
    return msgspec.convert(read_sealed(run.drained(pod)), Drained)


def await_drained(run: RunFolder, pod: str, deadline_seconds: float, poll_seconds: float = 0.2) -> Drained | None:
    """Wait for the answer; None after the deadline. Storage that is away for a moment is waited for, too."""
    deadline = time.monotonic() + deadline_seconds
    while True:
        try:
            answer = read_drained(run, pod)
        except StorageError:
            answer = None
        if answer is not None or time.monotonic() >= deadline:
            return answer
        time.sleep(poll_seconds)
