"""Evaluations of a run on disk, and what they say about the best adapter and about stopping early."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argusrl.config.sections import EvaluateSection
from argusrl.errors import ConfigError
from argusrl.journal.commits import Commit, CommitChain
from argusrl.journal.epochs import numbered
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import verify_manifest
from argusrl.storage.publish import publish_file


def write_evaluation(folder: RunFolder, step: int, record: dict[str, Any]) -> None:
    """Publish evaluations/<step>.json, once."""
    try:
        publish_file(folder.evaluation(step), json.dumps(record, indent=1).encode())
    except FileExistsError:
        return  # an interrupted attempt had come this far; its result stands


def read_evaluation(folder: RunFolder, step: int) -> dict[str, Any] | None:
    """The evaluation after a step, if there is one."""
    path = folder.evaluation(step)
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def read_evaluations(folder: RunFolder, last_step: int) -> Iterator[dict[str, Any]]:
    """All evaluations up to a step, in order."""
    for step in numbered(folder.evaluations, ".json"):
        record = read_evaluation(folder, step) if step <= last_step else None
        if record is not None:
            yield record


def history(folder: RunFolder) -> list[dict[str, Any]]:
    """The row of every committed step, evaluations included, as metrics.jsonl holds them."""
    rows: list[dict[str, Any]] = []
    chain = CommitChain(folder)
    head = chain.head()
    for step in range((head.step if head else -1) + 1):
        evaluation = read_evaluation(folder, step)
        if step == 0 and evaluation is None:
            continue
        metrics = evaluation["metrics"] if evaluation else {}
        rows.append({"step": step, **(chain.read(step).metrics if step else {}), **metrics})
    return rows


def choose_commit(folder: RunFolder, which: str) -> Commit:
    """The commit of a step: its number, "last", or "best" (by the run's own evaluations). Raises ConfigError."""
    chain = CommitChain(folder)
    head = chain.head()
    if head is None:
        raise ConfigError(f"run {folder.name} has no committed step yet")
    if which == "last":
        return head
    if which == "best":
        best = BestAdapter.of(folder, head.step)
        if best.accuracy < 0:
            raise ConfigError(f"run {folder.name} has no evaluation, so none is best", "give a step, or last")
        return chain.read(best.step)
    if not which.isdecimal() or int(which) > head.step:
        raise ConfigError(f"step {which!r} is none of run {folder.name}", f"give 0 to {head.step}, last or best")
    return chain.read(int(which))


def require_adapter(folder: RunFolder, commit: Commit) -> Path:
    """Folder of a commit's adapter, every digest checked. Raises ConfigError if retention removed it."""
    path = folder.absolute(commit.adapter.path)
    if not path.is_dir():
        kept = sorted({int(other.name[1:7]) for other in folder.adapters.iterdir() if other.name.startswith("v")})
        raise ConfigError(
            f"the adapter of step {commit.step} was removed by retention (checkpoint.keep_adapters)",
            f"adapters of steps {', '.join(map(str, kept))} are there",
        )
    verify_manifest(path)
    return path


@dataclass(slots=True)
class BestAdapter:
    """Which step's adapter did best on the held-out set (sampled accuracy; a tie goes to the later one)."""

    step: int = 0
    accuracy: float = -1.0
    last: float = -1.0  # accuracy of the newest evaluation
    since_best: int = 0  # evaluations since the best one

    @classmethod
    def of(cls, folder: RunFolder, last_step: int) -> BestAdapter:
        best = cls()
        for record in read_evaluations(folder, last_step):
            best.see(record["step"], record)
        return best

    def see(self, step: int, record: dict[str, Any]) -> None:
        """Take a new evaluation into account."""
        self.last = record["sampled"]["accuracy"]
        if self.last >= self.accuracy:
            improved = self.last > self.accuracy
            self.step, self.accuracy = step, self.last
            self.since_best = 0 if improved else self.since_best + 1
        else:
            self.since_best += 1

    def stop_reason(self, section: EvaluateSection) -> str:
        """Why the recipe's rule ends the run now; empty if it goes on."""
        if section.stop_at is not None and self.last >= section.stop_at:
            return f"held-out accuracy {self.last:.3f} reached evaluate.stop_at = {section.stop_at}"
        if section.stop_after is not None and self.since_best >= section.stop_after:
            return f"{self.since_best} evaluations without a new best (evaluate.stop_after = {section.stop_after})"
        return ""
