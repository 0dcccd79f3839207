from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argusrl.cli.main import run
from argusrl.cluster.kinds import RAY_JOB
from argusrl.journal.attempts import Heartbeat, Verdict, next_attempt, write_heartbeat, write_verdict
from argusrl.journal.submissions import Submission, SubmissionEnd, record_end, record_submission
from argusrl.storage.layout import RunFolder
from fakes.kubernetes_api import ApiServer, Rule
from fakes.kubernetes_recipe import RECIPE
from fakes.ray_cluster_objects import node, start
from fakes.ray_dashboard import RayDashboard


def submitted(server: ApiServer, *overrides: str) -> dict[str, Any]:
    """The RayJob of run maze."""
    assert run(["cluster", "submit", str(RECIPE), "run.name=maze", *overrides]) == 0
    return server.store.objects(RAY_JOB)[-1]


def status(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert run(["cluster", "status", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_with_its_pods_and_their_nodes(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.store.seed(node("head", gpus=0))
    server.store.seed(node("hyperpod-i-0123456789abcdef0", node_health_status="Schedulable"))
    server.store.seed(
        node("sick", node_health_status="UnschedulablePendingReplacement", fault_types="NvidiaErrorTerminate")
    )
    start(server.store, submitted(server), ["head", "hyperpod-i-0123456789abcdef0", "sick"])
    (found,) = status(capsys, "maze", "--brief")["runs"]
    assert found["state"] == "running"
    assert [(one["name"], one["number"], one["state"]) for one in found["submissions"]] == [("maze-s1", 1, "running")]
    assert [(pod["role"], pod["node"], pod["phase"]) for pod in found["pods"]] == [
        ("head", "head", "Running"),
        ("worker", "hyperpod-i-0123456789abcdef0", "Running"),
        ("worker", "sick", "Running"),
    ]
    assert [(one["name"], one["healthy"]) for one in found["nodes"]] == [
        ("head", True),
        ("hyperpod-i-0123456789abcdef0", True),
        ("sick", False),
    ]
    assert found["folder"] == "/fsx/argusrl/runs/maze"
    assert run(["cluster", "status", "--brief"]) == 0
    text = capsys.readouterr().out
    for words in ("maze  running", "maze-s1-cluster-head", "UnschedulablePendingReplacement", "NvidiaErrorTerminate"):
        assert words in text


def test_pods_that_fit_nowhere(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.store.seed(node("head"))
    _, worker = start(server.store, submitted(server), ["head", "n1"], phase="Initializing")
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    waiting = {**worker, "spec": {"containers": worker["spec"]["containers"]}}
    server.store.seed({**waiting, "status": {"phase": "Pending", "conditions": [condition]}})
    (found,) = status(capsys, "--brief")["runs"]
    assert found["state"] == "waiting for nodes"
    assert [(one["what"], one["kind"], one["text"]) for one in found["waiting"]] == [
        (worker["metadata"]["name"], "capacity", message.rstrip("."))
    ]


def test_a_queue_that_has_not_admitted_it(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.store.seed({"kind": "LocalQueue", "metadata": {"name": "team-queue"}, "spec": {}})
    job = submitted(server, "cluster.kubernetes.queue.name=team-queue")
    server.store.seed({**job, "spec": {**job["spec"], "suspend": True}})
    conditions = [{"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "no quota for gpu"}]
    owner = {"kind": "RayJob", "uid": job["metadata"]["uid"], "name": "maze-s1", "apiVersion": "ray.io/v1"}
    workload = {"name": "w", "ownerReferences": [owner]}
    server.store.seed({"kind": "Workload", "metadata": workload, "status": {"conditions": conditions}})
    (found,) = status(capsys, "--brief")["runs"]
    assert found["state"] == "waiting for quota"
    assert "no quota for gpu" in found["waiting"][0]["text"]


def test_attempts_and_heartbeat_come_from_a_run_folder_that_is_seen(
    server: ApiServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start(server.store, submitted(server), [])
    folder = RunFolder(tmp_path / "maze")
    write_config(folder)
    given = {"namespace": "default", "kind": "rayjob", "time": 0.0, "manifest": {}}
    first_time = Submission(number=1, name="maze-s1", reason="first", text="a person submitted it", **given)
    record_submission(folder, first_time)
    end = SubmissionEnd(number=1, reason="final_code", outcome="failed", text="NaN in the loss", time=0.0)
    record_end(folder, end)
    first = next_attempt(folder)
    write_verdict(folder, first, Verdict(outcome="failed", exit_code=9, reason="a rank was lost"))
    heartbeat = Heartbeat(time=0.0, pid=1, host="head", epoch=2, step=4, phase="rollout")
    write_heartbeat(folder, next_attempt(folder), heartbeat)
    (found,) = status(capsys, "maze", "--root", str(tmp_path))["runs"]
    assert found["record_source"] == str(folder.path)
    assert [one["outcome"] for one in found["record"]["attempts"]] == ["failed", None]
    assert found["record"]["heartbeat"]["phase"] == "rollout"
    assert found["record"]["submissions"][0]["end"] == {"outcome": "failed", "text": "NaN in the loss"}
    assert run(["cluster", "status", "maze", "--root", str(tmp_path)]) == 0
    assert "submission 1 (first): a person submitted it → failed: NaN in the loss" in capsys.readouterr().out
    server.store.delete(RAY_JOB, "maze-s1", "default")
    (found,) = status(capsys, "maze", "--root", str(tmp_path))["runs"]
    assert found["state"] == "nothing in the cluster"
    assert len(found["record"]["attempts"]) == 2


def write_config(folder: RunFolder) -> None:
    from argusrl.config.load import write_resolved
    from fakes.kubernetes_recipe import kubernetes_config

    folder.path.mkdir()
    write_resolved(kubernetes_config("run.name=maze"), folder.config)


def test_the_head_pod_is_asked_where_the_run_folder_is_not_seen(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.store.seed(node("n0"))
    start(server.store, submitted(server), ["n0"])
    asked = []
    record = {"state": "running (train)", "steps": 3, "total": 9, "attempts": [], "heartbeat": None}

    def program(command: list[str]) -> tuple[int, str]:
        asked.append(command)
        return 0, f"a warning\n{json.dumps(record)}\n"

    server.programs["maze-s1-cluster-head"] = program
    (found,) = status(capsys)["runs"]
    assert found["record"] == record
    assert found["record_source"] == "pod maze-s1-cluster-head"
    assert asked == [["argusrl", "runs", "show", "maze", "--root", "/fsx/argusrl/runs", "--json"]]
    server.programs["maze-s1-cluster-head"] = lambda _: (2, "error: no such run: maze")
    (found,) = status(capsys)["runs"]
    assert found["record"] is None
    assert found["unknown"] == ["pod maze-s1-cluster-head says: error: no such run: maze"]


def test_what_may_not_be_read_is_said_and_the_rest_shown(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    start(server.store, submitted(server), ["n0"])
    server.rules.append(Rule(resource="nodes|events", status=403))
    (found,) = status(capsys, "--brief")["runs"]
    assert len(found["pods"]) == 1
    assert found["nodes"] == []
    assert len(found["unknown"]) == 3  # events, the node, and the folder that is not seen from here


def test_a_node_that_is_gone(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    start(server.store, submitted(server), ["n0"])
    (found,) = status(capsys, "--brief")["runs"]
    assert [(one["name"], one["health"], one["healthy"]) for one in found["nodes"]] == [("n0", "gone", False)]


def test_names_that_are_not_there(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "status"]) == 0
    assert "no runs in namespace default" in capsys.readouterr().out
    submitted(server)
    assert run(["cluster", "status", "labyrinth"]) == 2
    assert "runs there: maze" in capsys.readouterr().err


def test_jobs_of_a_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    with RayDashboard() as dashboard:
        dashboard.set("maze-s1", "FAILED", message="out of memory")
        dashboard.set("other", "RUNNING")
        found = status(capsys, "maze", "--address", dashboard.url)
        assert found["ray"] == "2.60.0"
        assert [(job["submission_id"], job["status"]) for job in found["jobs"]] == [("maze-s1", "FAILED")]
        assert run(["cluster", "status", "--address", dashboard.url]) == 0
    assert "out of memory" in capsys.readouterr().out
