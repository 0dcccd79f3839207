"""Every path of a run folder, once. The folder is an API: docs/architecture.md describes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FORMAT_VERSION = 1  # of the run folder; a reader refuses a folder with a higher one


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<root>/<run>`: names only, touches nothing. Methods return absolute paths; `relative` shortens one."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def epochs(self) -> Path:
        return self.path / "epochs"

    def epoch(self, epoch: int) -> Path:
        return self.epochs / f"{epoch:04d}.json"

    @property
    def commits(self) -> Path:
        return self.path / "commits"

    def commit(self, step: int) -> Path:
        return self.commits / f"{step:06d}.json"

    def trajectories(self, step: int) -> Path:
        return self.path / "trajectories" / f"{step:06d}"

    def segment(self, step: int, writer: str, epoch: int) -> Path:
        return self.trajectories(step) / f"{writer}.e{epoch:04d}.seg"

    def images(self, step: int) -> Path:
        return self.path / "images" / f"{step:06d}"

    def image_segment(self, step: int, writer: str, epoch: int) -> Path:
        return self.images(step) / f"{writer}.e{epoch:04d}.seg"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    def adapter(self, version: int, epoch: int) -> Path:
        return self.adapters / f"v{version:06d}.e{epoch:04d}"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int, epoch: int) -> Path:
        return self.checkpoints / f"{step:06d}.e{epoch:04d}"

    @property
    def retired(self) -> Path:
        return self.path / "retired"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    def suspect(self, rank: int) -> Path:
        """What a rank was computing when it died."""
        return self.path / "suspects" / f"rank{rank}.json"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    def evaluation(self, step: int) -> Path:
        return self.evaluations / f"{step:06d}.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, attempt: int) -> Path:
        return self.attempts / f"{attempt:03d}"

    def node_reports(self, attempt: int) -> Path:
        """What the probes on the nodes found last."""
        return self.attempt(attempt) / "nodes.json"

    @property
    def drains(self) -> Path:
        return self.path / "drains"

    def drain(self, pod: str) -> Path:
        """The wish that a pod's node be emptied."""
        return self.drains / f"{pod}.json"

    def drained(self, pod: str) -> Path:
        """The answer to it."""
        return self.drains / f"{pod}.done.json"

    @property
    def submissions(self) -> Path:
        """How often the run was given to a cluster, and why."""
        return self.path / "submissions"

    def submission(self, number: int) -> Path:
        """The intent, recorded before anything is asked of the cluster."""
        return self.submissions / f"{number:04d}.json"

    def submission_made(self, number: int) -> Path:
        """That the object of it was there, and under which id."""
        return self.submissions / f"{number:04d}.made.json"

    def submission_end(self, number: int) -> Path:
        """Why no further one follows it."""
        return self.submissions / f"{number:04d}.end.json"

    @property
    def node_actions(self) -> Path:
        """What the controller did to nodes and to pods on them."""
        return self.path / "node_actions"

    def node_action(self, key: str) -> Path:
        return self.node_actions / f"{key}.json"

    def node_answer(self, key: str) -> Path:
        return self.node_actions / f"{key}.answer.json"

    @property
    def controller_events(self) -> Path:
        """What controllers saw, decided and told; appended by any of them."""
        return self.path / "controller.jsonl"

    @property
    def rehearsal_plan(self) -> Path:
        return self.path / "rehearsal.json"

    @property
    def rehearsal(self) -> Path:
        return self.path / "rehearsal"

    def shot(self, number: int) -> Path:
        return self.rehearsal / f"{number:03d}.json"

    def running_tokens(self, shot: int) -> Path:
        return self.rehearsal / f"{shot:03d}.running_tokens"

    def phases(self, attempt: int) -> Path:
        return self.attempt(attempt) / "phases.jsonl"

    def checked(self, attempt: int) -> Path:
        """What the check of model and data found at the start of an attempt."""
        return self.attempt(attempt) / "checked.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def relative(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def absolute(self, relative: str) -> Path:
        return self.path / relative
