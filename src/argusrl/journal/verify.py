"""`argusrl runs verify`: every invariant of a run folder, checked from the bytes on disk.

A changed or missing byte in anything that a commit, a checkpoint or the run itself names is found. Of the invariants
of docs/recovery.md a run folder alone shows

    I1   every (prompt, sample) of a step is a trajectory or a failure, in one commit, with no hole below the head
    I2   commits are consecutive and hash-chained, their epochs claimed and never falling
    I3   every trajectory was sampled under the adapter committed before its step (with rollout.staleness: 1, under
         the one before that)
    I5   whatever is named is whole
    I10  committed adapters are finite; a skipped step leaves the state as it was
    I11  every commit, adapter and checkpoint is of a claimed epoch

It does not show that acknowledged steps are still there (I6, I13: ask who was told), equality with another run (I4),
that the run never hung or leaked (I7, I8), lengths (I9), the agreement of engine and trainer (I12: a metric), or
repeated calls (I14).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argusrl.errors import StorageError
from argusrl.journal.attempts import checked_verdict, newest_attempt, read_verdict
from argusrl.journal.commits import Commit, CommitChain, check_link, sampling_step
from argusrl.journal.episodes import parse_segment_name
from argusrl.journal.epochs import numbered
from argusrl.journal.records import Finished, ImageBytes, decode_record
from argusrl.journal.retention import durable_checkpoints, is_retired, retired_record
from argusrl.journal.segments import read_header, read_segment
from argusrl.journal.tensors import not_finite
from argusrl.storage.digests import sha256_bytes, sha256_file
from argusrl.storage.layout import FORMAT_VERSION, RunFolder
from argusrl.storage.manifest import has_manifest, verify_manifest
from argusrl.storage.publish import read_lines
from argusrl.storage.sealed_json import read_sealed
from argusrl.types import ImageRef


def verify_run(run: RunFolder) -> list[str]:
    """What is broken, one line each; empty is healthy. Reads everything, changes nothing."""
    if not run.path.is_dir():
        return [f"{run.path} does not exist"]
    return _Verification(run).result()


def canonical_config_sha256(config: Any) -> str:
    """Digest of a resolved configuration as config.yaml records it: over its JSON with sorted keys, without spaces."""
    return sha256_bytes(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())


@dataclass
class _Verification:
    run: RunFolder
    problems: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    commits: list[tuple[Commit, str]] = field(default_factory=list)  # with the sha256 of each file

    def result(self) -> list[str]:
        checks: list[Callable[[], None]] = [
            self._config,
            self._epochs,
            self._chain,
            self._steps,
            self._adapters,
            self._checkpoints,
            self._retired,
            self._attempts,
            self._metrics,
            self._events,
        ]
        for check in checks:
            with self._reporting():
                check()
        return self.problems

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """A check that cannot go on is one problem; the others still run."""
        try:
            yield
        except StorageError as error:
            self.problems.append(error.message)
        except (OSError, KeyError, TypeError, ValueError) as error:
            self.problems.append(f"unreadable: {type(error).__name__}: {error}")

    def _config(self) -> None:
        import yaml

        path = self.run.config
        if not path.is_file():
            self.problems.append(f"{path} is missing")
            return
        try:
            fields = yaml.safe_load(path.read_bytes())
            version, recorded, config = fields["format_version"], fields["sha256"], fields["config"]
            digest = canonical_config_sha256(config)
            self.config = config
        except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            self.problems.append(f"{path} is damaged: {type(error).__name__}: {error}")
            return
        if not isinstance(version, int) or version > FORMAT_VERSION:
            self.problems.append(f"{path} has format version {version}, this argusrl reads up to {FORMAT_VERSION}")
        if digest != recorded:
            self.problems.append(f"{path} has sha256 {digest}, it says {recorded}")

    def _epochs(self) -> None:
        """A number may be missing: a claim that was never acknowledged can be lost with the power."""
        for number in numbered(self.run.epochs, ".json"):
            with self._reporting():
                record = read_sealed(self.run.epoch(number))
                if record["epoch"] != number:
                    self.problems.append(f"{self.run.epoch(number)} is the record of epoch {record['epoch']}")

    def _chain(self) -> None:
        chain = CommitChain(self.run)
        numbers = numbered(self.run.commits, ".json")
        if numbers != list(range(len(numbers))):
            self.problems.append(f"{self.run.commits} is not consecutive: {numbers}")
        previous, previous_sha256 = None, ""
        for number in numbers:
            commit, sha256 = chain.read_bytes(number)
            check_link(previous, previous_sha256, commit, self.run.commit(number))
            if not self.run.epoch(commit.epoch).exists():
                self.problems.append(f"{self.run.commit(number)} is of epoch {commit.epoch}, which nobody claimed")
            self.commits.append((commit, sha256))
            previous, previous_sha256 = commit, sha256

    def _steps(self) -> None:
        for (previous, _), (commit, _) in zip(self.commits, self.commits[1:], strict=False):
            with self._reporting():
                self._step(previous, commit)

    def _step(self, previous: Commit, commit: Commit) -> None:
        step = commit.step
        if commit.outcome == "skipped" and commit.state_digest != previous.state_digest:
            self.problems.append(f"commit {step} is skipped, yet its state digest differs from commit {step - 1}'s")
        self._holes(commit)
        if self._gone(self.run.trajectories(step)):
            return
        finished: dict[tuple[str, int, int], Finished] = {}
        images: dict[tuple[str, int, int], str] = {}
        for segment in commit.segments:
            with self._reporting():
                path = self.run.absolute(segment.path)
                if (digest := sha256_file(path)) != segment.sha256:
                    self.problems.append(f"{path} has sha256 {digest}, commit {step} says {segment.sha256}")
                self._segment_header(path, step)
                records = 0
                for location, payload in read_segment(path, require_sealed=True):
                    records += 1
                    place = (segment.path, location.offset, location.length)
                    record = decode_record(payload)
                    if isinstance(record, Finished):
                        finished[place] = record
                    elif isinstance(record, ImageBytes):
                        images[place] = sha256_bytes(record.data)
                if (records, path.stat().st_size) != (segment.records, segment.bytes):
                    self.problems.append(
                        f"{path} has {records} records in {path.stat().st_size} bytes, "
                        f"commit {step} says {segment.records} in {segment.bytes}"
                    )
        self._trajectories(commit, finished, images)

    def _holes(self, commit: Commit) -> None:
        """Every sample of every prompt of the step has a record of what became of it."""
        section = self.config.get("algorithm", {})
        prompts, group_size = section.get("prompts_per_step"), section.get("group_size")
        if not isinstance(prompts, int) or not isinstance(group_size, int):
            return  # a run of no driver
        keys = {item.key for item in commit.trajectories} | {failure.key for failure in commit.failures}
        groups: dict[str, set[int]] = {}
        for key in keys:
            groups.setdefault(key.prompt_id, set()).add(key.sample)
        where = f"commit {commit.step}"
        if len(groups) != prompts:
            self.problems.append(f"{where} accounts for {len(groups)} prompts, a step has {prompts}")
        for prompt, samples in groups.items():
            if samples != set(range(group_size)):
                lacking = sorted(set(range(group_size)) - samples)
                self.problems.append(f"{where}: prompt {prompt} has samples {sorted(samples)}, lacks {lacking}")
        self.problems += [f"{where} counts {key} of another step" for key in sorted(keys) if key.step != commit.step]

    def _segment_header(self, path: Path, step: int) -> None:
        header = read_header(path)
        if header.step != step or parse_segment_name(path.name) != (header.writer, header.epoch):
            self.problems.append(f"{path} was written as {header.writer}.e{header.epoch:04d} of step {header.step}")

    def _trajectories(
        self,
        commit: Commit,
        finished: dict[tuple[str, int, int], Finished],
        images: dict[tuple[str, int, int], str],
    ) -> None:
        where = f"commit {commit.step}"
        served = self.commits[sampling_step(commit.step, self._staleness())][0].adapter
        counts = Counter(item.key for item in commit.trajectories)
        counts.update(failure.key for failure in commit.failures)
        self.problems += [f"{where} counts {key} {count} times" for key, count in counts.items() if count > 1]
        for item in commit.trajectories:
            if not 0 <= item.segment < len(commit.segments):
                self.problems.append(f"{where} names segment {item.segment} of {len(commit.segments)}")
                continue
            record = finished.get((commit.segments[item.segment].path, item.offset, item.length))
            if record is None or record.trajectory.key != item.key or item.key.step != commit.step:
                self.problems.append(f"{where}: {item.key} is not at byte {item.offset} of its segment")
                continue
            if record.trajectory.reward != item.reward:
                self.problems.append(f"{where}: {item.key} has reward {record.trajectory.reward}, not {item.reward}")
            for index, turn in enumerate(record.trajectory.turns):
                sampled = (turn.adapter_version, turn.adapter_sha256)
                if sampled != (served.version, served.sha256):
                    self.problems.append(f"{where}: turn {index} of {item.key} was sampled under adapter {sampled}")
                self.problems += [
                    f"{where}: an image of turn {index} of {item.key} is missing: {ref.sha256} in {ref.segment}"
                    for ref in turn.images
                    if images.get(_place(ref)) != ref.sha256
                ]

    def _staleness(self) -> int:
        return int(self.config.get("rollout", {}).get("staleness", 0))

    def _adapters(self) -> None:
        previous = None
        for commit, _ in self.commits:
            adapter = commit.adapter
            kept = commit.outcome == "skipped" and adapter == previous  # a skipped step may publish nothing
            previous = adapter
            if adapter.version != commit.step and not kept:
                self.problems.append(f"commit {commit.step} publishes adapter version {adapter.version}")
            folder = self.run.absolute(adapter.path)
            if kept or self._gone(folder):
                continue
            with self._reporting():
                manifest = verify_manifest(folder)
                for name, value in (
                    ("version", adapter.version),
                    ("epoch", adapter.epoch),
                    ("sha256", adapter.sha256),
                ):
                    if manifest.get(name) != value:
                        self.problems.append(f"{folder} has {name} {manifest[name]}, commit {commit.step} says {value}")
                self.problems += not_finite(folder / manifest["file"])
                weights = manifest["files"].get(manifest["file"], {}).get("sha256")
                if weights != adapter.file_sha256:
                    says = f"commit {commit.step} says {adapter.file_sha256}"
                    self.problems.append(f"{folder} has file_sha256 {weights}, {says}")

    def _checkpoints(self) -> None:
        folders = sorted(self.run.checkpoints.iterdir()) if self.run.checkpoints.is_dir() else []
        for folder in folders:
            if folder.name.startswith(".") or not has_manifest(folder) or self._gone(folder):
                continue
            with self._reporting():
                manifest = verify_manifest(folder)
                step = manifest["step"]
                if folder != self.run.checkpoint(step, manifest["epoch"]):
                    self.problems.append(f"{folder} is the checkpoint {step} of epoch {manifest['epoch']}")
                commit, sha256 = self.commits[step] if 0 <= step < len(self.commits) else (None, "")
                if commit is None or manifest["commit_sha256"] != sha256:
                    self.problems.append(f"{folder} belongs to a commit {step} that is not in this run")
                elif manifest["state_digest"] != commit.state_digest:
                    self.problems.append(f"{folder} has another state digest than commit {step}")

    def _retired(self) -> None:
        """Nothing is retired unless a whole checkpoint stays from which a restart can go on."""
        last = None
        for path in sorted(self.run.retired.glob("*.json")):
            with self._reporting():
                last = read_sealed(path)["path"]
                if path != retired_record(self.run, last):
                    self.problems.append(f"{path} is the record of {last}")
        if last is not None and not durable_checkpoints(self.run, CommitChain(self.run)):
            self.problems.append(f"{self.run.checkpoints} holds no whole checkpoint, though {last} was retired")

    def _attempts(self) -> None:
        for attempt in numbered(self.run.attempts):
            with self._reporting():
                checked_verdict(self.run, attempt)

    def _metrics(self) -> None:
        """One line per committed step. The newest may be missing after a crash: a resume writes it again."""
        steps = Counter(line["step"] for line in read_lines(self.run.metrics) if line.get("step", 0) != 0)
        committed = [commit.step for commit, _ in self.commits[1:]]
        owed = committed if self._complete() else committed[:-1]
        self.problems += [f"{self.run.metrics} has no line of step {step}" for step in owed if step not in steps]
        for step, count in steps.items():
            if step not in committed:
                self.problems.append(f"{self.run.metrics} has a line of step {step}, which is not committed")
            elif count > 1:
                self.problems.append(f"{self.run.metrics} has {count} lines of step {step}")

    def _events(self) -> None:
        """Events are one object a line with time, kind and message; a torn line is what a crash leaves."""
        for number, event in enumerate(read_lines(self.run.events), 1):
            if not all(isinstance(event.get(name), str) for name in ("time", "kind", "message")):
                self.problems.append(f"{self.run.events}: event {number} lacks a time, kind or message")

    def _complete(self) -> bool:
        attempt = newest_attempt(self.run)
        verdict = read_verdict(self.run, attempt) if attempt else None
        return verdict is not None and verdict.complete

    def _gone(self, path: Path) -> bool:
        """Deleted on purpose (or about to be): a record says so."""
        return is_retired(self.run, self.run.relative(path))


def _place(ref: ImageRef) -> tuple[str, int, int]:
    return ref.segment, ref.offset, ref.length
