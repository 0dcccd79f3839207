"""What each second of a recovery on a cluster consists of, with raylets as pods: prints JSON.

    python benchmarks/cluster_recovery.py [--out FILE]

The API server, pods and HyperPod are those of the tests (tests/e2e/pods_as_raylets.py); training, drain, controller,
fence and resumption are the real ones. What a real cluster adds is in docs/hyperpod.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from argusrl.journal.commits import CommitChain  # noqa: E402
from argusrl.journal.submissions import submissions  # noqa: E402
from argusrl.journal.verify import verify_run  # noqa: E402
from argusrl.observe.events import event_seconds  # noqa: E402
from e2e.on_kubernetes import OnKubernetes, on_kubernetes  # noqa: E402


def node(run: OnKubernetes) -> dict[str, Any]:
    """From the label of HyperPod to two ranks again."""
    run.until(lambda: run.step() >= 2)
    name = run.pods.node_of(head=False)
    labelled = time.time()
    run.pods.label(name)
    run.until(run.drained)
    (answer,) = run.drained()
    run.until(lambda: name in run.pods.lost)
    run.until(lambda: run.events("larger"))
    whole = run.events("larger")[-1]
    run.commits(1)
    (wish,) = run.events("draining")
    (smaller,) = run.events("smaller")
    return {
        "label_to_wish_seen": event_seconds(wish) - labelled,
        "wish_to_drained": answer.seconds,
        "label_to_drained": answer.time - labelled,
        "handed_over": answer.handed_over,
        "drained_to_going_on": event_seconds(run.events("moved")[-1]) - answer.time,
        "going_on_smaller_at": event_seconds(smaller) - labelled,
        "loss_to_whole_again": event_seconds(whole) - run.pods.lost[name],
        "faults": len(run.events("fault")),
    }


def head(run: OnKubernetes) -> dict[str, Any]:
    """From the loss of the head to training again."""
    run.until(lambda: run.step() >= 2)
    committed = run.step()
    lost = time.time()
    run.pods.lose(run.pods.node_of(head=True))
    run.until(lambda: len(submissions(run.folder)) == 2 and run.submitted())
    again = run.submitted()[-1]
    run.until(lambda: run.step() > committed)
    commit = CommitChain(run.folder).read(committed + 1)
    started = [event for event in run.events("attempt") if event["epoch"] == commit.epoch]
    return {
        "loss_to_resubmission": again["time"] - lost,
        "resubmission": again["seconds"],
        "resubmission_to_driver": event_seconds(started[-1]) - again["time"],
        "driver_to_resumed": event_seconds(run.events("resumed")[-1]) - event_seconds(started[-1]),
        "loss_to_first_commit": commit_seconds(run, committed + 1) - lost,
    }


def commit_seconds(run: OnKubernetes, step: int) -> float:
    return run.folder.commit(step).stat().st_mtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found: dict[str, Any] = {"processors": os.cpu_count()}
    for measure in (node, head):
        with tempfile.TemporaryDirectory(prefix="argusrl-") as root, on_kubernetes(Path(root)) as run:
            found[measure.__name__] = measure(run) | {"problems": verify_run(run.folder)}
    text = json.dumps(_rounded(found), indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
