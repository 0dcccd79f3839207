"""What each second of a recovery on a cluster consists of, with raylets as pods: prints JSON.

    python benchmarks/cluster_recovery.py [--only label|death|head] [--out FILE]

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
from argusrl.journal.verify import verify_run  # noqa: E402
from argusrl.observe.events import event_seconds  # noqa: E402
from e2e.on_kubernetes import OnKubernetes, on_kubernetes  # noqa: E402

_REPLACED_SECONDS = 10.0


def label(run: OnKubernetes) -> dict[str, Any]:
    """From HyperPod's label to all ranks and engines again."""
    name, labelled = _worker(run), time.time()
    run.pods.label(name)
    run.until(run.drained)
    (answer,) = run.drained()
    run.until(lambda: run.events("moved"))
    (wish,), (moved,) = run.events("draining"), run.events("moved")
    return {
        "label_to_wish_seen": event_seconds(wish) - labelled,
        "wish_seen_to_drained": answer.seconds,
        "label_to_drained": answer.time - labelled,
        "handed_over": answer.handed_over,
        "drained_to_going_on": event_seconds(moved) - answer.time,
        **_whole_again(run, name),
        "faults": len(run.events("fault")),
    }


def death(run: OnKubernetes) -> dict[str, Any]:
    """From the sudden loss of a node to all ranks and engines again; HyperPod replaces it ten seconds later."""
    name, lost = _worker(run), time.time()
    run.pods.lose(name)
    run.until(lambda: run.events("fault"))
    run.until(lambda: time.time() - lost > _REPLACED_SECONDS)
    run.pods.replace(name)
    run.until(lambda: run.events("recovered"))
    return {
        "death_to_found": event_seconds(run.events("fault")[0]) - lost,
        "death_to_going_on": event_seconds(run.events("recovered")[0]) - lost,
        **_whole_again(run, name),
    }


def _worker(run: OnKubernetes) -> str:
    run.until(lambda: run.step() >= 2)
    return run.pods.node_of(head=False)


def _whole_again(run: OnKubernetes, node: str) -> dict[str, float]:
    """What the cluster takes for a new pod, and what the run takes from then on."""

    def back() -> list[dict[str, Any]]:
        return [event for event in run.events("healed") if event["member"].startswith("engine")]

    run.until(lambda: run.events("larger") and back())
    pod = max(run.pods.ran.values())
    return {
        "loss_to_new_pod": pod - run.pods.lost[node],
        "new_pod_to_all_ranks": event_seconds(run.events("larger")[-1]) - pod,
        "new_pod_to_all_engines": event_seconds(back()[-1]) - pod,
    }


def head(run: OnKubernetes) -> dict[str, Any]:
    """From the loss of the head to training again."""
    run.until(lambda: run.step() >= 2)
    committed = run.step()
    lost = time.time()
    run.pods.lose(run.pods.node_of(head=True))
    run.until(lambda: run.submitted()[-1]["submission"] == 2)
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
    parser.add_argument("--only", choices=["label", "death", "head"])
    arguments = parser.parse_args()
    found: dict[str, Any] = {"processors": os.cpu_count()}
    for measure in (label, death, head):
        if arguments.only not in (None, measure.__name__):
            continue
        one = ["cluster.slots=1", "cluster.kubernetes.workers.nodes=1"] if measure is head else []
        with tempfile.TemporaryDirectory(prefix="argusrl-") as root:
            with on_kubernetes(Path(root), *one) as run:
                measured = measure(run)
            found[measure.__name__] = measured | {"problems": verify_run(run.folder)}
    text = json.dumps(_rounded(found), indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
