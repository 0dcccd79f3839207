"""Runs sweep_program.py with one system call of it failing, then a clean driver on what is left, and judges the end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from argusrl.journal.verify import verify_run
from argusrl.storage import publish
from argusrl.storage.layout import RunFolder
from faults.small_driver import SmallDriver, broken_promises, logical_content

CALLS = (
    "write", "pwrite64", "writev", "fsync", "fdatasync", "rename", "renameat", "renameat2", "link", "linkat", "unlink",
    "unlinkat", "rmdir", "openat", "mkdir", "mkdirat", "ftruncate",
)  # fmt: skip
FAULTS = ("SIGKILL", "EIO", "ENOSPC")
_ROOT = Path(__file__).parents[2]
_PROGRAM = Path(__file__).with_name("sweep_program.py")
_LINE = re.compile(r"^\d+ +(\w+)\((.*)")
_EXIT_CODES = frozenset({0, 5, 137, -9})  # survived, StorageError, and killed as a shell or Python says it
SECONDS = 60  # a run takes a tenth of one; longer is a wedge


@dataclass(frozen=True, slots=True)
class Point:
    """System call number `number` of its kind, from 1; `text` is for people."""

    call: str
    number: int
    text: str = ""


@cache
def strace() -> str | None:
    """Path of an strace that may trace here, installed if root and apt are there; None without one."""
    if shutil.which("strace") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "strace"]):
            subprocess.run(command, capture_output=True, timeout=240, check=False)
    found = shutil.which("strace")
    if found is None:
        return None
    inject = [found, "-qq", "-o", os.devnull, "-e", "trace=getppid", "-e", "inject=getppid:error=EIO:when=1", "true"]
    return found if subprocess.run(inject, capture_output=True, check=False).returncode == 0 else None


def start(root: Path, *, tracer: list[str] | None = None, short_write: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the program on `root`/run to its end. Raises TimeoutExpired if it wedges."""
    paths = (_ROOT / "src", _ROOT / "tests")
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    command = [*(tracer or []), sys.executable, str(_PROGRAM), str(root / "run")]
    return subprocess.run(
        command + ([str(short_write)] if short_write else []),
        env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def points(root: Path) -> list[Point]:
    """Every traced call that the undisturbed program makes on its run folder, in order."""
    trace = root / "trace"
    tracer = [str(strace()), "-f", "--seccomp-bpf", "-y", "-o", str(trace), "-e", f"trace=?{',?'.join(CALLS)}"]
    ended = start(root, tracer=tracer)
    assert ended.returncode == 0, ended.stderr
    found, counts = [], Counter()
    for line in trace.read_text().splitlines():
        match = _LINE.match(line)
        if match:
            counts[match[1]] += 1
            if f"{root}/run" in match[2] or f'"{root}"' in match[2]:
                found.append(Point(match[1], counts[match[1]], match[2][:120].replace(str(root), "")))
    return found


def disturb(root: Path, point: Point, fault: str) -> subprocess.CompletedProcess[str]:
    """Run the program with `fault` at `point`."""
    kind = f"signal={fault}" if fault.startswith("SIG") else f"error={fault}"
    inject = f"inject={point.call}:{kind}:when={point.number}"
    # Its filter makes strace twice as fast, but a signal is not injected then.
    faster = [] if fault.startswith("SIG") else ["--seccomp-bpf"]
    tracer = [str(strace()), "-f", *faster, "-qq", "-o", str(root / "trace")]
    return start(root, tracer=[*tracer, "-e", f"trace={point.call}", "-e", inject])


def judge(root: Path, ended: subprocess.CompletedProcess[str], undisturbed: list[dict[str, object]]) -> list[str]:
    """What is wrong after the fault, and after a clean driver went on; empty is as it should be."""
    run = RunFolder(root / "run")
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    wrong = []
    if ended.returncode not in _EXIT_CODES:
        wrong.append(f"exit code {ended.returncode}: {ended.stderr[-800:]}")
    if run.config.exists():
        wrong += [f"before the resume: {problem}" for problem in verify_run(run)]
    wrong += [f"before the resume: {promise}" for promise in broken_promises(run, said)]
    publish._settled.clear()  # the driver that resumes stands for another process: it knows no folder yet
    SmallDriver(run, lambda *words: said.append(list(words))).drive()
    wrong += verify_run(run)
    wrong += broken_promises(run, said)
    if logical_content(run) != undisturbed:
        wrong.append("the run ended with another content than the undisturbed one")
    return wrong
