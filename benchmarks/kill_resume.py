"""Kill the driver at random moments and compare with an undisturbed run: same final adapter, nothing sampled twice.

    python benchmarks/kill_resume.py [--recipe recipes/quickstart.yaml] [--kills 3] [--steps 8] [--seed 0]

Prints JSON. The kills are SIGKILLs of the driver process; the supervisor restarts it. Just after each kill the journal
of the open step is read: every trajectory that was finished by then must not be started again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from argusrl.journal.commits import CommitChain
from argusrl.journal.episodes import read_records
from argusrl.journal.records import Finished, Started
from argusrl.journal.verify import verify_run
from argusrl.storage.layout import RunFolder


def start(recipe: str, root: Path, name: str, overrides: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "argusrl.cli.main", "train", recipe, f"run.root={root}", f"run.name={name}"]
    return subprocess.Popen([*command, "observe.display=plain", *overrides], stdout=sys.stderr)


def finished_keys(folder: RunFolder, step: int) -> set[tuple[str, int]]:
    """(prompt, sample) of every finished trajectory in the journal of an open step."""
    keys = set()
    for path in sorted(folder.trajectories(step).glob("*.seg")):
        for record in read_records(path, require_sealed=False):
            if isinstance(record, Finished):
                keys.add((record.trajectory.key.prompt_id, record.trajectory.key.sample))
    return keys


def started_later(folder: RunFolder, step: int, epoch: int) -> set[tuple[str, int]]:
    """(prompt, sample) of every trajectory that an epoch after `epoch` began in `step`."""
    keys = set()
    for path in sorted(folder.trajectories(step).glob("*.seg")):
        if int(path.name.split(".e")[1][:4]) > epoch:
            for record in read_records(path, require_sealed=True):
                if isinstance(record, Started):
                    keys.add((record.key.prompt_id, record.key.sample))
    return keys


def driver_of(process: subprocess.Popen[bytes]) -> psutil.Process | None:
    for child in psutil.Process(process.pid).children():
        if "argusrl.training.driver" in " ".join(child.cmdline()):
            return child
    return None


def kill_once(
    process: subprocess.Popen[bytes], folder: RunFolder, after_epoch: int, rng: random.Random
) -> dict[str, object] | None:
    """Wait until a driver later than `after_epoch` plays a step, wait a random moment more, kill; what it had done."""
    while process.poll() is None:
        epoch = len(list(folder.epochs.glob("*.json")))
        step = committed(folder) + 1
        if epoch > after_epoch and step > 1 and list(folder.trajectories(step).glob(f"*.e{epoch:04d}.seg")):
            break
        time.sleep(0.05)
    if process.poll() is not None:
        return None
    time.sleep(rng.uniform(0.0, 2.5))
    driver = driver_of(process)
    if driver is None:
        return None
    os.kill(driver.pid, signal.SIGKILL)
    time.sleep(3.0)  # workers notice that their driver is gone and end
    step = committed(folder) + 1
    keys = finished_keys(folder, step) if folder.trajectories(step).is_dir() else set()
    return {"epoch": epoch, "step": step, "finished": sorted(keys)}


def committed(folder: RunFolder) -> int:
    steps = [int(path.stem) for path in folder.commits.glob("*.json")] if folder.commits.is_dir() else []
    return max(steps, default=-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    overrides = [f"algorithm.num_steps={options.steps}", "evaluate.every_steps=0", *options.overrides]
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="argusrl-kill-") as root:
        began = time.monotonic()
        if start(options.recipe, Path(root), "calm", overrides).wait() != 0:
            return 1
        calm_seconds = time.monotonic() - began
        began = time.monotonic()
        process = start(options.recipe, Path(root), "killed", overrides)
        folder = RunFolder(Path(root) / "killed")
        kills: list[dict[str, object]] = []
        while len(kills) < options.kills:
            kill = kill_once(process, folder, kills[-1]["epoch"] if kills else 0, rng)
            if kill is None:
                break
            kills.append(kill)
        code = process.wait()
        report = {
            "kills": [{**kill, "finished": len(kill["finished"])} for kill in kills],
            "exit_code": code,
            "sampled_again": sum(
                len(set(kill["finished"]) & started_later(folder, kill["step"], kill["epoch"])) for kill in kills
            ),
            "broken_invariants": verify_run(folder),
            "calm_seconds": round(calm_seconds, 1),
            "killed_seconds": round(time.monotonic() - began, 1),
        }
        heads = [CommitChain(RunFolder(Path(root) / name)).head() for name in ("calm", "killed")]
        report["adapters"] = [head.adapter.sha256 for head in heads if head]
        report["state_digests_equal"] = heads[0].state_digest == heads[1].state_digest
        report["adapters_equal"] = len(set(report["adapters"])) == 1
    print(json.dumps(report, indent=1))
    return 0 if report["adapters_equal"] and not report["sampled_again"] and not report["broken_invariants"] else 1


if __name__ == "__main__":
    sys.exit(main())
