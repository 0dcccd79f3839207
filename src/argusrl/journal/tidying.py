"""Tidying up a run that nobody drives: leavings go, and what its retention lets go. The run goes on being verifiable.

Only what retention.py allows is touched, with the same write-once records. A run that may be under way is left alone:
the heartbeat says so, and the epoch, which is looked at again before everything that is removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from argusrl.errors import FencedError
from argusrl.journal.attempts import newest_attempt, read_heartbeat, read_verdict
from argusrl.journal.commits import Commit, CommitChain
from argusrl.journal.epochs import newest_epoch, numbered
from argusrl.journal.retention import adapter_folders, checkpoint_folders, collect_garbage, is_temporary, remove
from argusrl.journal.usage import Size, size_of
from argusrl.storage.files import list_folder
from argusrl.storage.layout import RunFolder

ALIVE_SECONDS = 600.0
"""An attempt without a verdict that gave a sign of life so lately may be under way: clocks differ, supervisors wait."""

_ENDED = ("complete", "interrupted")  # after any other outcome a supervisor may be about to start the next attempt
PROBE_LEAVINGS = ".probe."  # how names begin of what probes leave that die: here those of a run root (storage/probe.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What has to stay. See collect_garbage."""

    keep_checkpoints: int
    keep_adapters: int
    keep_trajectories: bool
    protected_versions: Collection[int] = ()
    finished: bool = False  # nobody will adopt what was begun and not committed


@dataclass(slots=True)
class Tidied:
    """What was removed, or would have been, relative to the run folder."""

    leavings: list[str] = field(default_factory=list)  # what no commit names
    retired: list[str] = field(default_factory=list)  # what one names, with a record that says that it went
    size: Size = field(default_factory=Size)


def last_sign_of_life(run: RunFolder) -> float:
    """When somebody last worked on the run, in seconds since 1970; 0 where nobody ever did."""
    attempt = newest_attempt(run)
    signs = [_changed(run.epoch(newest_epoch(run))), _changed(run.commits)]
    if attempt:
        verdict, heartbeat = read_verdict(run, attempt), read_heartbeat(run, attempt)
        signs += [verdict.time if verdict else 0.0, heartbeat.time if heartbeat else 0.0]
        signs += [_changed(run.attempt(attempt)), _changed(run.attempt(attempt) / "heartbeat.json")]
    return max(signs)


def may_be_running(run: RunFolder) -> bool:
    """Whether the newest attempt gave a sign of life lately and is not known to have ended for good."""
    attempt = newest_attempt(run)
    verdict = read_verdict(run, attempt) if attempt else None
    if not attempt or (verdict is not None and verdict.outcome in _ENDED):
        return False
    return time.time() - last_sign_of_life(run) < ALIVE_SECONDS


def tidy(run: RunFolder, rules: Rules, *, dry_run: bool = False) -> Tidied:
    """Remove leavings and what `rules` let go; in a dry run only say what.

    Raises FencedError where a driver has the run or takes it meanwhile, StorageError, and CorruptionError where the
    commits are damaged: nothing is removed from a run whose commits cannot be read.
    """
    epoch, done = newest_epoch(run), Tidied()

    def allow(path: Path) -> bool:
        if not dry_run and (newest_epoch(run) != epoch or may_be_running(run)):
            raise FencedError(f"{run.path} is being driven", "tidy up when the run has ended")
        done.size += size_of(path)
        return not dry_run

    if may_be_running(run):
        raise FencedError(f"{run.path} is being driven", "tidy up when the run has ended")
    head = CommitChain(run).head()
    if head is None:
        return done
    collected = collect_garbage(
        run,
        CommitChain(run),
        keep_checkpoints=rules.keep_checkpoints,
        keep_adapters=rules.keep_adapters,
        protected_versions=rules.protected_versions,
        keep_trajectories=rules.keep_trajectories,
        # What interrupted tries of a step left is the evidence that a rehearsal is judged by.
        from_step=head.step + 1 if run.rehearsal_plan.exists() else 0,
        allow=allow,
    )
    done.retired = collected.retired
    done.leavings = collected.garbage
    others = [*_temporaries(run.path), *(_uncommitted(run, head) if rules.finished else ())]
    for path in others:
        done.leavings.append(run.relative(path))
        if allow(path):
            remove(path)
    return done


def tidy_root(root: Path, remove_it: Callable[[Path], bool]) -> Size:
    """What probes that died left in a run root, old enough that none of them can be at work."""
    size = Size()
    for path in list_folder(root):
        if path.name.startswith(PROBE_LEAVINGS) and is_temporary(path) and _age(path) > ALIVE_SECONDS:
            size += size_of(path)
            if remove_it(path):
                remove(path)
    return size


def _temporaries(folder: Path) -> Iterator[Path]:
    """Everything half published or half deleted, wherever it lies."""
    for path in list_folder(folder):
        if is_temporary(path):
            yield path
        elif path.is_dir():
            yield from _temporaries(path)


def _uncommitted(run: RunFolder, head: Commit) -> Iterator[Path]:
    """What was begun after the last commit, by whichever driver."""
    for parent in (run.trajectories(0).parent, run.images(0).parent):
        yield from (parent / f"{step:06d}" for step in numbered(parent) if step > head.step)
    for version, epoch, path in adapter_folders(run):
        if version > head.step or (epoch > head.epoch and run.relative(path) != head.adapter.path):
            yield path
    for step, _, path in checkpoint_folders(run):
        if step > head.step:
            yield path


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _age(path: Path) -> float:
    return time.time() - _changed(path)
