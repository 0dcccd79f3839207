"""Submissions: each time that a run was given to a cluster. All that controllers know is in these records.

    submissions/0003.json        the intent, before anything is asked of the cluster
    submissions/0003.made.json   that its object was there, and under which id
    submissions/0003.end.json    why no further one follows
    node_actions/<key>.json      what was about to be done to a node or a pod, and <key>.answer.json what came of it

Each is written once under a name that follows from what it says, so two controllers that want the same find the same
record: the second one reads what the first one wrote, and whoever finds an intent that was not carried out does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from argusrl.errors import CorruptionError, FencedError
from argusrl.journal.epochs import numbered
from argusrl.storage.files import exists, list_folder
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import publish_file
from argusrl.storage.sealed_json import encode_sealed, read_sealed

Record = TypeVar("Record", bound=msgspec.Struct)

RAY_JOB_KIND, JOB_KIND = "rayjob", "job"  # kinds: an object of Kubernetes, or a job of a Ray cluster that is there


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The intent to give a run to the cluster."""

    number: int  # from 1, rising; a person may leave some out
    name: str  # of the RayJob, or submission id of the Ray job
    namespace: str
    kind: str  # RAY_JOB_KIND | JOB_KIND
    reason: str  # row of the decision table, "first" or "person"
    text: str  # for people
    time: float  # seconds since 1970
    manifest: dict[str, Any]  # what is created: a RayJob, or {"cluster", "entrypoint", "runtime_env"} of a job
    before: int = 0  # number of the submission that it follows
    replaces: str = ""  # id of that one's object, which has to be gone before
    after_attempt: int = 0  # newest attempt then: later ones are of this submission
    after_epoch: int = 0  # newest epoch then: the fence is above it
    steps: int = 0  # committed then
    finished: bool = False  # whether the run was complete then: a person submits it with more to do
    gpus: float = 0.0  # that it occupies

    @property
    def by_controller(self) -> bool:
        """Whether a controller made it, and may do so again; what a person submitted is only put on record."""
        return self.reason not in ("first", "person")


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """The object of a submission was there."""

    number: int
    uid: str
    time: float


class SubmissionEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why no submission follows this one."""

    number: int
    reason: str  # row of the decision table
    outcome: str  # "complete" | "stopped" | "failed" | "budget" | "capacity"
    text: str
    time: float
    clear: bool = False  # whether its object is to be deleted
    attempt: int = 0  # newest one of the run then


class NodeAction(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is about to be done to a node, or to a pod on it."""

    action: str  # "reboot" | "replace" | "delete_pod"
    node: str
    instance: str = ""
    pod: str = ""
    pod_uid: str = ""
    reason: str
    time: float
    evidence: str = ""  # what it was done for, so that the same is not taken for more

    @property
    def key(self) -> str:
        """The same for the same fault: an instance is rebooted once and replaced once, a pod is deleted once."""
        return f"{self.action}-{self.pod_uid or self.instance}"


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    key: str
    done: bool
    text: str = ""
    time: float = 0.0


def record_submission(run: RunFolder, submission: Submission) -> Submission:
    """Write the intent; the one that stands under its number already is returned instead. Raises StorageError."""
    if _publish(run.submission(submission.number), submission):
        return submission
    return read_submission(run, submission.number)


def read_submission(run: RunFolder, number: int) -> Submission:
    """One submission. Raises StorageError."""
    return _read(run.submission(number), Submission)


def submissions(run: RunFolder) -> list[Submission]:
    """All, oldest first. Raises StorageError."""
    return [read_submission(run, number) for number in numbered(run.submissions, ".json")]


def newest_submission(run: RunFolder) -> int:
    """The number of the newest one, 0 if there is none. Raises StorageError."""
    return max(numbered(run.submissions, ".json"), default=0)


def record_made(run: RunFolder, made: Made) -> Made:
    """Write that the object is there, once. Raises StorageError."""
    if _publish(run.submission_made(made.number), made):
        return made
    return read_made(run, made.number) or made


def read_made(run: RunFolder, number: int) -> Made | None:
    """None while nobody has seen the object. Raises StorageError."""
    return _read(run.submission_made(number), Made) if exists(run.submission_made(number)) else None


def record_end(run: RunFolder, end: SubmissionEnd) -> SubmissionEnd:
    """Write why it ends; the reason that stands already is returned instead. Raises StorageError."""
    if _publish(run.submission_end(end.number), end):
        return end
    return read_end(run, end.number) or end


def read_end(run: RunFolder, number: int) -> SubmissionEnd | None:
    """None while the run is to go on. Raises StorageError."""
    return _read(run.submission_end(number), SubmissionEnd) if exists(run.submission_end(number)) else None


def record_action(run: RunFolder, action: NodeAction) -> bool:
    """Write what is about to be done; False if somebody has written it before. Raises StorageError."""
    return _publish(run.node_action(action.key), action)


def node_actions(run: RunFolder) -> list[NodeAction]:
    """All, oldest first. Raises StorageError."""
    paths = [path for path in list_folder(run.node_actions) if path.suffix == ".json" and path.name[0] != "."]
    found = [_read(path, NodeAction) for path in paths if not path.name.endswith(".answer.json")]
    return sorted(found, key=lambda action: (action.time, action.key))


def record_answer(run: RunFolder, answer: NodeAnswer) -> None:
    """Write what came of an action, once. Raises StorageError."""
    _publish(run.node_answer(answer.key), answer)


def read_answer(run: RunFolder, key: str) -> NodeAnswer | None:
    """None while nothing is known. Raises StorageError."""
    return _read(run.node_answer(key), NodeAnswer) if exists(run.node_answer(key)) else None


def require_newest(run: RunFolder, number: int) -> None:
    """To be asked by what runs inside of submission `number` before and after it claims an epoch; 0 is none.

    Raises FencedError where a later one is on record: the run was given to the cluster again. Raises StorageError.
    """
    newest = newest_submission(run) if number else 0
    if newest <= number or read_end(run, newest) is not None:
        return
    standing = read_submission(run, newest)
    if not standing.by_controller:  # a manifest applied again carries the number it was made with
        return
    raise FencedError(
        f"{run.path} was given to the cluster again as submission {newest}, this is submission {number}",
        "let that one go on; `argusrl cluster status` shows it",
    )


def _publish(path: Path, record: msgspec.Struct) -> bool:
    try:
        publish_file(path, encode_sealed(msgspec.to_builtins(record)))
    except FileExistsError:
        return False
    return True


def _read(path: Path, kind: type[Record]) -> Record:
    try:
        return msgspec.convert(read_sealed(path), kind)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"{path} is no {kind.__name__}: {error}") from error
