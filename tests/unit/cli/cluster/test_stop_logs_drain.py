from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import yaml

from argusrl.cli.main import run
from argusrl.cluster.kinds import POD, RAY_CLUSTER, RAY_JOB
from argusrl.cluster.targets import next_manifest, recorded_manifest
from argusrl.journal.attempts import Verdict, next_attempt, write_verdict
from argusrl.journal.drains import Drained, answer_drain, asked_pods, read_drain
from argusrl.journal.submissions import Submission, read_end, record_submission
from argusrl.storage.layout import RunFolder
from fakes.kubernetes_api import ApiServer, Rule
from fakes.kubernetes_recipe import RECIPE
from fakes.ray_cluster_objects import start
from fakes.ray_dashboard import RayDashboard

HEAD, WORKER = "maze-s1-cluster-head", "maze-s1-cluster-worker1"


@pytest.fixture
def running(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> ApiServer:
    """A cluster in which run maze runs: a head on n0, a worker on n1."""
    assert run(["cluster", "submit", str(RECIPE), "run.name=maze"]) == 0
    start(server.store, server.store.objects(RAY_JOB)[0], ["n0", "n1"])
    capsys.readouterr()
    return server


class TestStop:
    def test_job_cluster_and_pods_go_and_the_verdict_is_told(
        self, running: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = RunFolder(tmp_path / "maze")
        verdict = Verdict(outcome="interrupted", exit_code=75, reason="stopped by SIGTERM", step=4)
        write_verdict(folder, next_attempt(folder), verdict)
        assert run(["cluster", "stop", "maze", "--root", str(tmp_path)]) == 0
        for kind in (RAY_JOB, RAY_CLUSTER, POD):
            assert running.store.objects(kind) == []
        text = capsys.readouterr().out
        assert "RayJob maze-s1 and its pods are gone" in text
        assert "interrupted after step 4: stopped by SIGTERM" in text

    def test_pods_are_waited_for(self, running: ApiServer) -> None:
        running.store.kubelets = False
        done: list[int] = []
        thread = threading.Thread(target=lambda: done.append(run(["cluster", "stop", "maze"])))
        thread.start()
        while ("watch", "rayjobs", "") not in running.asked:
            time.sleep(0.01)
        assert all("deletionTimestamp" in pod["metadata"] for pod in running.store.objects(POD))
        assert running.store.objects(RAY_JOB)[0]["metadata"]["finalizers"] == ["foregroundDeletion"]
        running.store.finish_pods()
        thread.join(20)
        assert done == [0]

    def test_a_pod_that_stays_is_told(self, running: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
        running.store.dead_nodes.add("n1")
        assert run(["cluster", "stop", "maze", "--wait", "0.3"]) == 7
        assert "RayJob maze-s1 is still being deleted" in capsys.readouterr().err

    def test_there_is_nothing_to_stop(self, running: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
        running.store.patch(
            RAY_JOB, "maze-s1", {"status": {"jobDeploymentStatus": "Complete"}}, "default", sub="status"
        )
        assert run(["cluster", "stop", "maze"]) == 2
        assert "run maze has no RayJob that runs" in capsys.readouterr().err

    def test_a_run_that_waits_to_be_submitted_again(
        self, running: ApiServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Its RayJob failed. The controller, which would submit it again, finds it gone: a person stopped the run."""
        running.store.patch(RAY_JOB, "maze-s1", {"status": {"jobDeploymentStatus": "Failed"}}, "default", sub="status")
        assert run(["cluster", "stop", "maze"]) == 0
        assert running.store.objects(RAY_JOB) == []
        text = capsys.readouterr().out
        assert "RayJob maze-s1, which was over (failed), is deleted: the run is not submitted again" in text
        assert "stop it again" in text  # a decision that is on record already is not seen from here

    @pytest.mark.parametrize("there", [True, False])
    def test_a_submission_that_the_controller_has_decided_on_is_not_made(
        self, there: bool, running: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = RunFolder(tmp_path / "maze")
        values = {"namespace": "default", "kind": "rayjob", "text": "", "time": 1.0, "manifest": {}}
        record_submission(folder, Submission(number=1, name="maze-s1", reason="first", **values))
        record_submission(folder, Submission(number=2, name="maze-s2", reason="head_gone", before=1, **values))
        if not there:
            running.store.delete(RAY_JOB, "maze-s1", "default")
        assert run(["cluster", "stop", "maze", "--root", str(tmp_path)]) == 0
        assert running.store.objects(RAY_JOB) == []
        end = read_end(folder, 2)
        assert end is not None
        assert (end.outcome, end.reason) == ("stopped", "person")
        assert "maze-s2, which the controller was about to submit, is not submitted" in capsys.readouterr().out
        assert run(["cluster", "stop", "maze", "--root", str(tmp_path)]) == 2

    def test_the_number_of_what_the_controller_submitted_is_not_given_again(self, running: ApiServer) -> None:
        job = running.store.objects(RAY_JOB)[0]
        running.store.delete(RAY_JOB, "maze-s1", "default")
        running.connect().create(RAY_JOB, next_manifest(recorded_manifest(job), "maze", 2))
        assert run(["cluster", "stop", "maze"]) == 0
        assert run(["cluster", "submit", str(RECIPE), "run.name=maze"]) == 0
        assert [one["metadata"]["name"] for one in running.store.objects(RAY_JOB)] == ["maze-s3"]

    def test_a_ray_cluster_is_released_with_what_was_decided_for_it(self, server: ApiServer, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path / "maze")
        values = {"namespace": "default", "kind": "job", "text": "", "time": 1.0, "manifest": {"cluster": "studio"}}
        record_submission(folder, Submission(number=2, name="maze-s2", reason="head_gone", **values))
        head = {"rayStartParams": {}, "template": {"spec": {"containers": [{"name": "ray", "image": "x"}]}}}
        notes = {"argusrl.io/run-folder": "/fsx/argusrl/runs/maze", "argusrl.io/job": "{}"}
        server.store.seed(
            {
                "kind": "RayCluster",
                "metadata": {"name": "studio", "labels": {"argusrl.io/run": "maze"}, "annotations": notes},
                "spec": {"headGroupSpec": head},
            }
        )
        assert run(["cluster", "stop", "maze", "--cluster", "studio", "--root", str(tmp_path)]) == 7  # no head yet
        assert read_end(folder, 2) is not None
        assert "argusrl.io/job" not in server.store.get(RAY_CLUSTER, "studio", "default")["metadata"]["annotations"]

    def test_jobs_of_a_ray_cluster(self, capsys: pytest.CaptureFixture[str]) -> None:
        with RayDashboard() as dashboard:
            dashboard.set("maze-s2", "RUNNING")
            dashboard.set("maze-extra-s1", "RUNNING")
            assert run(["cluster", "stop", "maze", "--address", dashboard.url]) == 0
            assert [job["status"] for job in dashboard.jobs.values()] == ["STOPPED", "RUNNING"]
            assert run(["cluster", "stop", "maze", "--address", dashboard.url]) == 2
        assert "job maze-s2: STOPPED" in capsys.readouterr().out


class TestLogs:
    def test_the_drivers_unless_somebody_else_is_meant(
        self, running: ApiServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        running.logs[HEAD, ""] = "step 1\nstep 2\n"
        running.logs[WORKER, ""] = "engine\n"
        assert run(["cluster", "logs", "maze", "--tail", "1"]) == 0
        assert capsys.readouterr().out == "step 2\n"
        for choice in (["--role", "worker"], ["--node", "n1"], ["--pod", WORKER]):
            assert run(["cluster", "logs", *choice]) == 0
            assert capsys.readouterr().out == "engine\n"

    def test_secrets_are_masked(
        self, running: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_verysecretvalue")
        running.logs[HEAD, ""] = "token hf_verysecretvalue\n"
        assert run(["cluster", "logs"]) == 0
        assert "verysecret" not in capsys.readouterr().out

    def test_following_takes_one_pod(self, running: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
        running.logs[HEAD, ""] = "x\n"
        assert run(["cluster", "logs", "--follow"]) == 0
        running.store.patch(POD, HEAD, {"metadata": {"labels": {"ray.io/node-type": "worker"}}}, "default")
        assert run(["cluster", "logs", "--follow", "--role", "worker"]) == 2
        assert WORKER in capsys.readouterr().err

    def test_what_an_attempt_left_in_the_run_folder(
        self, running: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = RunFolder(tmp_path / "maze")
        for text in ("first", "second"):
            logs = folder.attempt(next_attempt(folder)) / "logs"
            (logs / "driver.log").write_text(f"driver, {text}\n")
            (logs / "worker").mkdir()
            (logs / "worker/raylet.log").write_text(f"raylet, {text}\n")
        root = ["--root", str(tmp_path)]
        assert run(["cluster", "logs", "maze", "--attempt", "1", *root]) == 0
        assert "driver, first" in capsys.readouterr().out
        running.store.delete(RAY_JOB, "maze-s1", "default")
        assert run(["cluster", "logs", "maze", "--role", "worker", *root]) == 0
        text = capsys.readouterr().out
        assert "raylet, second" in text
        assert "driver" not in text
        assert run(["cluster", "logs", "maze", "--role", "nobody", *root]) == 2
        assert "a pod is a head or a worker" in capsys.readouterr().err

    def test_where_the_folder_is_not_seen_a_pod_could_read_it(
        self, running: ApiServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        finished = {"status": {"jobDeploymentStatus": "Failed"}}
        running.store.patch(RAY_JOB, "maze-s1", finished, "default", sub="status")
        running.store.delete(RAY_CLUSTER, "maze-s1-cluster", "default")
        assert run(["cluster", "logs", "maze"]) == 2
        text = capsys.readouterr().err
        assert "/fsx/argusrl/runs/maze/attempts/*/logs" in text
        assert "--reader" in text
        assert run(["cluster", "logs", "maze", "--reader"]) == 0
        text = capsys.readouterr().out
        pod = yaml.safe_load(text)
        running.connect().create(POD, pod)  # it is valid
        (container,) = pod["spec"]["containers"]
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/fsx"]
        assert "nvidia.com/gpu" not in json.dumps(pod)
        assert "kubectl cp default/maze-reader:/fsx/argusrl/runs/maze/attempts attempts" in text

    def test_a_run_that_has_not_started(self, running: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
        reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        condition = {**reason, "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}
        for name in (HEAD, WORKER):
            status = {"phase": "Pending", "conditions": [condition], "containerStatuses": None}
            running.store.patch(POD, name, {"spec": {"nodeName": None}, "status": status}, "default", sub="status")
        assert run(["cluster", "logs", "maze"]) == 2
        error = capsys.readouterr().err
        assert "maze-s1 has not started: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu" in error
        assert "no fitting node has enough free GPUs" in error
        assert "any more" not in error
        running.store.delete(RAY_CLUSTER, "maze-s1-cluster", "default")
        assert run(["cluster", "logs", "maze"]) == 2
        assert "KubeRay has not made its pods yet" in capsys.readouterr().err

    def test_of_jobs(self, capsys: pytest.CaptureFixture[str]) -> None:
        with RayDashboard() as dashboard:
            dashboard.set("maze-s1", "FAILED", start_time=1)
            dashboard.set("maze-s2", "RUNNING", start_time=2)
            dashboard.logs["maze-s2"] = "step 1\n"
            assert run(["cluster", "logs", "maze", "--address", dashboard.url]) == 0
            assert capsys.readouterr().out == "step 1\n"
            assert run(["cluster", "logs", "other", "--address", dashboard.url]) == 2


class TestDrain:
    def test_through_a_run_folder_that_is_seen(
        self, running: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = RunFolder(tmp_path / "maze")
        folder.path.mkdir()
        asked: list[tuple[str, str, str]] = []

        def driver() -> None:
            while not (wishes := asked_pods(folder)):
                time.sleep(0.01)
            wish = read_drain(folder, next(iter(wishes)))
            asked.append((wish.pod, wish.node, wish.asked_by))
            answer_drain(folder, Drained(pod=wish.pod, outcome="drained", seconds=1.5))

        thread = threading.Thread(target=driver)
        thread.start()
        assert run(["cluster", "drain", "maze", "--node", "n1", "--root", str(tmp_path)]) == 0
        thread.join()
        assert asked == [(WORKER, "n1", "person")]
        assert f"{WORKER}: drained, 1.5 s" in capsys.readouterr().out

    def test_through_the_head_pod(self, running: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
        asked = []

        def program(command: list[str]) -> tuple[int, str]:
            asked.append(command)
            return 11, "nobody answered"

        running.programs[HEAD] = program
        assert run(["cluster", "drain", "maze", "--pod", WORKER, "--reason", "fan noise"]) == 11
        assert asked[0][:2] == ["argusrl", "drain"]
        assert asked[0][-1] == "fan noise"
        assert f"{WORKER}: nobody answered" in capsys.readouterr().out

    def test_through_the_controller_where_commands_in_pods_are_not_allowed(self, running: ApiServer) -> None:
        running.rules.append(Rule(verb="create", resource="pods/exec", status=403))
        assert run(["cluster", "drain", "maze", "--pod", WORKER]) == 0
        found = running.store.get(POD, WORKER, "default")["metadata"]
        assert found["annotations"] == {"argusrl.io/drain": "asked by a person"}

    @pytest.mark.parametrize("choice", [[], ["--node", "n1", "--pod", WORKER], ["--node", "n9"], ["--pod", "x"]])
    def test_what_is_not_clear_is_refused(
        self, choice: list[str], running: ApiServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["cluster", "drain", "maze", *choice]) == 2
        assert capsys.readouterr().err


def test_the_command_that_asks_for_a_drain_in_a_pod_takes_these_options(
    running: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options that go to the head pod exist there."""
    asked: list[list[str]] = []

    def program(command: list[str]) -> tuple[int, str]:
        asked.append(command)
        return 0, "ok"

    running.programs[HEAD] = program
    run(["cluster", "drain", "maze", "--pod", WORKER])
    words = [word for word in asked[0][1:] if word != "--wait"]
    words[words.index("--run") + 1] = str(tmp_path / "nowhere")
    assert run(words) != 2
