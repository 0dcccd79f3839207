"""The real journal, publish and commit code with a fault at every system call it makes on its run folder.

`make test-faults` sweeps all of them; `make test` a fixed sample. One point again:
ARGUSRL_SWEEP=fsync:12:EIO python -m pytest tests/faults/test_syscall_sweep.py
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from argusrl.storage.layout import RunFolder
from fakes.run_folder import memory_folder
from faults.small_driver import SmallDriver, logical_content
from faults.syscall_sweep import FAULTS, SECONDS, Point, disturb, judge, points, start, strace

EXHAUSTIVE = os.environ.get("ARGUSRL_FAULTS") == "all"
SAMPLE = 120  # runs of a quarter of a second
ONLY = os.environ.get("ARGUSRL_SWEEP")


@pytest.fixture
def root():
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def undisturbed(root):
    run = RunFolder(root / "undisturbed")
    SmallDriver(run, lambda *_: None).drive()
    return logical_content(run)


def faulted(root: Path, name: str, run: object, undisturbed: list[dict[str, object]]) -> list[str]:
    """Run `run` in a folder of its own and judge it; the problems, with what to rerun."""
    folder = root / "run-of-the-sweep"
    folder.mkdir()
    try:
        wrong = judge(folder, run(folder), undisturbed)
    except subprocess.TimeoutExpired:
        wrong = [f"wedged: still running after {SECONDS} s"]
    except Exception as error:
        wrong = [f"the resume failed: {type(error).__name__}: {error}"]
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    return [f"{name}: {problem}" for problem in wrong]


def test_every_system_call_may_fail_or_be_the_last(root, undisturbed):
    if strace() is None:
        pytest.skip("no strace that may inject faults here: install strace, allow ptrace, to run the syscall sweep")
    (root / "baseline").mkdir()
    found = points(root / "baseline")
    assert len(found) > 150, "the program makes more calls than that on its run folder"
    assert {"write", "fsync", "openat"} < {point.call for point in found}
    cases = [(point, fault) for point in found for fault in FAULTS]
    if ONLY:
        cases = [(point, fault) for point, fault in cases if f"{point.call}:{point.number}:{fault}" == ONLY]
        assert cases, f"ARGUSRL_SWEEP={ONLY} is no point of this program"
    elif not EXHAUSTIVE:
        cases = cases[:: max(1, len(cases) // SAMPLE)]
    failed = []
    for point, fault in cases:

        def run(folder: Path, point: Point = point, fault: str = fault) -> subprocess.CompletedProcess[str]:
            ended = disturb(folder, point, fault)
            hit = (
                ended.returncode in (-9, 137) if fault == "SIGKILL" else "(INJECTED)" in (folder / "trace").read_text()
            )
            assert hit, f"{point} was not reached"
            return ended

        failed += faulted(root, f"{point.call}:{point.number}:{fault} {point.text}", run, undisturbed)
    assert not failed, f"{len(failed)} problems in {len(cases)} runs:\n" + "\n".join(failed)


def test_every_write_may_be_short(root, undisturbed):
    """Half of a write is taken and the program goes on, or half of it and then the disk is full."""
    failed, number, survived = [], 1, False
    while not survived:
        for short in (number, -number):
            codes = []

            def run(folder: Path, short: int = short, codes: list[int] = codes) -> subprocess.CompletedProcess[str]:
                ended = start(folder, short_write=short)
                codes.append(ended.returncode)
                return ended

            failed += faulted(root, f"short write {short}", run, undisturbed)
            survived = short < 0 and codes == [0]  # the disk was not needed any more
        number += 1 if EXHAUSTIVE else 4
    assert number > 30, "the program writes more often than that"
    assert not failed, "\n".join(failed)
