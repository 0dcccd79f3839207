"""Commits: a step exists when its record is durable. One write-once record per step, chained to the one before.

Record 0 is the root: the adapter before the first step. Whatever no commit names is garbage.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from argusrl.errors import CorruptionError, FencedError, StorageError
from argusrl.journal.epochs import Epoch, numbered
from argusrl.journal.segments import SealedSegment
from argusrl.storage.digests import sha256_bytes
from argusrl.storage.files import exists, read_file
from argusrl.storage.layout import FORMAT_VERSION, RunFolder
from argusrl.storage.publish import encode_line, fsync_path, publish_file, read_lines, replace_file, storage_faults
from argusrl.storage.sealed_json import decode_sealed, encode_sealed
from argusrl.storage.visibility import await_visible
from argusrl.types import AdapterRef, EpisodeFailure, TrajectoryKey

_REMEMBERED_ADAPTERS = 256

Scalar = bool | int | float | str | None


class CommittedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that counts in this step, and where it lies."""

    key: TrajectoryKey
    segment: int  # index into Commit.segments
    offset: int
    length: int
    reward: float


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a step consists of. `previous` is filled in by CommitChain.append."""

    step: int
    epoch: int
    outcome: Literal["initial", "updated", "skipped"]
    adapter: AdapterRef  # after this step
    state_digest: str  # logical digest of adapter, Adam and RNG after this step
    config_sha256: str = ""
    segments: tuple[SealedSegment, ...] = ()
    trajectories: tuple[CommittedTrajectory, ...] = ()
    failures: tuple[EpisodeFailure, ...] = ()
    algorithm_state: dict[str, Any] = {}
    prompt_position: int = 0  # prompts taken so far: where the next step goes on
    plan: dict[str, Any] = {}  # row → rank → micro-batch; JSON-like
    conditions: dict[str, Any] = {}  # what a bit-exact replay needs: ranks, threads, versions, processor
    metrics: dict[str, Scalar] = {}
    time: float = msgspec.field(default_factory=time.time)  # seconds since 1970
    nonce: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    previous: str = ""  # sha256 of the bytes of the commit before; "" in the root
    format_version: int = FORMAT_VERSION


class Adopted(Exception):
    """An earlier epoch committed this step first. Drop the open step and go on from `commit`."""

    def __init__(self, commit: Commit) -> None:
        super().__init__(commit)
        self.commit = commit


class CommitChain:
    """The commits of a run. Reading checks seals and the hash chain; appending needs the driver's epoch."""

    def __init__(self, run: RunFolder, epoch: Epoch | None = None) -> None:
        self._run = run
        self._epoch = epoch
        self._head: Commit | None = None
        self._head_sha256 = ""
        self._failed: StorageError | None = None
        self._adapters: dict[int, AdapterRef] = {}

    def head(self) -> Commit | None:
        """The newest commit, None in a run without its root. Goes on from where the last call stopped.

        Raises CorruptionError if a record is damaged, missing in the middle, or does not follow the one before.
        """
        while True:
            seen = self._head
            self._walk()
            if self._epoch is not None and self._head is not seen:
                with storage_faults(self._run.commits):
                    fsync_path(self._run.commits)  # a driver builds on it; who wrote it may have died before this
            step = -1 if self._head is None else self._head.step
            if max(numbered(self._run.commits, ".json"), default=-1) <= step:
                return self._head
            if not exists(self._run.commit(step + 1)):
                raise CorruptionError(f"{self._run.commit(step + 1)} is missing, later commits exist")

    def read(self, step: int) -> Commit:
        """One commit by its step; its seal is checked. Raises CorruptionError if it is missing or damaged."""
        return self.read_bytes(step)[0]

    def read_bytes(self, step: int) -> tuple[Commit, str]:
        """One commit and the sha256 of its file (what a checkpoint's manifest names)."""
        path = self._run.commit(step)
        try:
            data = read_file(path)
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing") from None
        return decode_commit(data, path), sha256_bytes(data)

    def sha256(self, step: int) -> str:
        """sha256 of one commit's file, unread. Raises CorruptionError if it is missing."""
        path = self._run.commit(step)
        try:
            return sha256_bytes(read_file(path))
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing") from None

    def adapter(self, step: int) -> AdapterRef:
        """The adapter after one step. The driver asks again after every step, so those of late are remembered."""
        if step not in self._adapters:
            self._adapters[step] = self.read(step).adapter
            while len(self._adapters) > _REMEMBERED_ADAPTERS:
                del self._adapters[min(self._adapters)]
        return self._adapters[step]

    @property
    def head_sha256(self) -> str:
        """sha256 of the file of the commit that head() or append() returned last."""
        return self._head_sha256

    def append(self, commit: Commit) -> Commit:
        """Make the step exist; returns the record as written. May be repeated with the same commit.

        Raises Adopted if an earlier epoch committed this step, FencedError if a later one owns the run,
        StorageError if storage fails: then it is unknown whether the step exists. This chain appends no more, because
        an fsync that failed once may seem to succeed the second time; the head() of a new driver tells.
        """
        if self._failed is not None:
            raise self._failed
        if self._epoch is None or commit.epoch != self._epoch.number:
            raise ValueError(f"a commit of epoch {commit.epoch} needs the chain of that epoch's driver")
        self._epoch.check()
        self._walk_to(commit.step - 1)
        if self._head is not None and self._head.step >= commit.step:
            return self._resolve(commit)
        if self._head is not None and self._head.epoch > self._epoch.number:
            raise FencedError(  # a listing may be late to show that epoch; its commit is here
                f"step {self._head.step} was committed by epoch {self._head.epoch}, this driver holds epoch "
                f"{self._epoch.number}",
                "let the driver that wrote it go on",
            )
        newest = -1 if self._head is None else self._head.step
        if commit.step != newest + 1:
            raise ValueError(f"commit {commit.step} does not follow the newest commit, {newest}")
        commit = msgspec.structs.replace(commit, previous=self._head_sha256)
        data = encode_commit(commit)
        try:
            publish_file(self._run.commit(commit.step), data)
        except FileExistsError:
            return self._resolve(commit)
        except StorageError as error:
            self._failed = error
            raise
        self._head, self._head_sha256 = decode_commit(data, self._run.commit(commit.step)), sha256_bytes(data)
        self._epoch.check()
        return self._head

    def _resolve(self, commit: Commit) -> Commit:
        """The name is taken: by this very commit, by an earlier driver, or by a later one."""
        assert self._epoch is not None
        await_visible(self._run.commit(commit.step))  # that the name is taken proves that it is there
        self._walk_to(commit.step)
        there = self.read(commit.step)
        self._epoch.check()
        if there.nonce == commit.nonce:
            return there
        if there.epoch < self._epoch.number:
            raise Adopted(there)
        raise FencedError(
            f"step {commit.step} was committed by epoch {there.epoch}, this driver holds epoch {self._epoch.number}",
            "let the driver that wrote it go on",
        )

    def _walk(self) -> None:
        while self._step_forward():
            pass

    def _walk_to(self, step: int) -> None:
        while (self._head is None or self._head.step < step) and self._step_forward():
            pass

    def _step_forward(self) -> bool:
        step = 0 if self._head is None else self._head.step + 1
        if not exists(self._run.commit(step)):
            return False
        commit, sha256 = self.read_bytes(step)
        check_link(self._head, self._head_sha256, commit, self._run.commit(step))
        self._head, self._head_sha256 = commit, sha256
        return True


def encode_commit(commit: Commit) -> bytes:
    """Sealed JSON of a commit."""
    return encode_sealed(msgspec.to_builtins(commit, enc_hook=_scalar))


def decode_commit(data: bytes, path: Path) -> Commit:
    """Raises CorruptionError if the bytes are damaged, StorageError if a newer argusrl wrote them."""
    fields = decode_sealed(data, path)
    version = fields.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise StorageError(
            f"{path} has format version {version}, this argusrl reads up to {FORMAT_VERSION}",
            "use the argusrl that wrote the run, or a newer one",
        )
    try:
        return msgspec.convert(fields, Commit)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"{path} is not a commit: {error}") from error


def sampling_step(step: int, staleness: int) -> int:
    """The step whose adapter the trajectories of `step` are sampled under; `staleness` is the recipe's, 0 or 1."""
    return max(0, step - 1 - staleness)


def check_link(previous: Commit | None, previous_sha256: str, commit: Commit, path: Path) -> None:
    """Raises CorruptionError unless `commit` (at `path`) follows `previous`."""
    step = 0 if previous is None else previous.step + 1
    if commit.step != step:
        raise CorruptionError(f"{path} is the commit of step {commit.step}, expected {step}")
    if commit.previous != previous_sha256:
        raise CorruptionError(f"{path} does not follow the commit before it: the hash chain is broken")
    if previous is not None and commit.epoch < previous.epoch:
        raise CorruptionError(f"{path} is of epoch {commit.epoch}, the commit before it of {previous.epoch}")
    if (commit.outcome == "initial") != (step == 0):
        raise CorruptionError(f"{path} of step {step} has outcome {commit.outcome}")


def metrics_line(commit: Commit) -> dict[str, Any]:
    """The line of metrics.jsonl that belongs to a commit."""
    return {"step": commit.step, **commit.metrics}


def rebuild_metrics(run: RunFolder) -> None:
    """Write metrics.jsonl anew from the commits, so that no step is doubled or missing. Raises StorageError.

    Lines of step 0 (before the first step) are kept, no commit holds them.
    """
    chain = CommitChain(run)
    head = chain.head()
    lines = [encode_line(metrics_line(chain.read(step))) for step in range(1, (head.step if head else 0) + 1)]
    replace_file(run.metrics, b"".join([*_lines_of_step_zero(run), *lines]))


def _lines_of_step_zero(run: RunFolder) -> list[bytes]:
    return [encode_line(line) for line in read_lines(run.metrics) if line.get("step") == 0]


def _scalar(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a commit cannot hold a {type(value).__qualname__}")
