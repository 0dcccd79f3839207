"""The whole controller on a cluster in memory: which runs it finds, by which settings, and that it ends when asked."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from argusrl.cluster.controller import Controller, standing
from argusrl.cluster.kinds import RAY_CLUSTER, RAY_JOB
from argusrl.cluster.kube_api import NotFound, Unreachable
from argusrl.cluster.names import FOLDER_ANNOTATION, JOB_ANNOTATION, RUN_LABEL, SUBMISSION_LABEL, SUBMISSION_VARIABLE
from argusrl.cluster.run_record import RunRecord
from argusrl.cluster.targets import ClusterJobTarget
from argusrl.config.load import load_config, write_resolved
from argusrl.errors import ClusterError, StorageError
from argusrl.journal.submissions import read_end, read_made, submissions
from argusrl.storage.publish import append_line
from fakes.controlled_run import NODES, RECIPE, ControlledRun


@pytest.fixture
def run(tmp_path: Path) -> ControlledRun:
    return ControlledRun(tmp_path / "runs")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def controller(run: ControlledRun, said: list[str]) -> Controller:
    return new_controller(run, said)


def new_controller(run: ControlledRun, said: list[str], **parts) -> Controller:
    return Controller(
        run.root, run.kube, [run.namespace], say=said.append, clock=lambda: run.seconds, wall=lambda: 1.7e9, **parts
    )


def wait(run: ControlledRun, controller: Controller, seconds: float, *, beating: bool = False) -> None:
    for _ in range(int(seconds / 5)):
        run.seconds += 5
        if beating:
            run.beat()
        controller.reconcile()


def test_a_head_is_lost_and_the_run_comes_back(run, controller, said):
    run.submit()
    wait(run, controller, 5)
    run.runs()
    wait(run, controller, 20, beating=True)
    run.lose_node(NODES[0])
    wait(run, controller, 45)
    (watched,) = controller.reconcile()
    shown = standing(watched)
    assert (shown["run"], shown["submission"], shown["row"]) == ("qwen3vl_8b_hyperpod", 2, "starting")
    assert any("head_lost" in line for line in said)
    assert run.job(2)


def test_nothing_runs_nothing_is_found(controller):
    assert controller.reconcile() == []


def test_run_folders_elsewhere_are_not_its_own(run, controller, said, tmp_path):
    job = run.submit()
    change = {"metadata": {"annotations": {FOLDER_ANNOTATION: str(tmp_path / "elsewhere" / "maze")}}}
    run.kube.patch(RAY_JOB, job["metadata"]["name"], change)
    assert controller.reconcile() == []
    assert "is not below" in said[0]
    assert not (tmp_path / "elsewhere").exists()
    for sneaky in (f"{run.root}/../maze", "maze", ""):
        run.kube.patch(RAY_JOB, job["metadata"]["name"], {"metadata": {"annotations": {FOLDER_ANNOTATION: sneaky}}})
        assert controller.reconcile() == []


def test_an_intent_without_any_object_is_found_by_its_record(run, said):
    first = new_controller(run, said)
    run.submit()
    wait(run, first, 5)
    run.runs()
    wait(run, first, 20, beating=True)
    run.lose_node(NODES[0])

    def no_create(verb, kind, name):
        if verb == "create":
            raise Unreachable("away")

    run.kube._before = no_create
    wait(run, first, 45)
    assert run.jobs() == []
    run.kube._before = None
    wait(run, new_controller(run, said), 5)
    assert read_made(run.folder, 2).uid == run.job(2)["metadata"]["uid"]


def test_budgets_are_the_recipes(run, controller):
    run.submit()
    run.folder.path.mkdir()
    config = load_config(RECIPE, ["cluster.budget.gpu_hours=5", "cluster.budget.resubmissions=1"]).config
    write_resolved(config, run.folder.config)
    (watched,) = controller.reconcile()
    assert watched.control.limits.gpu_hours == 5.0
    assert watched.control.limits.resubmissions == 1


def configured(run: ControlledRun, *changes: str) -> None:
    run.folder.path.mkdir(exist_ok=True)
    write_resolved(load_config(RECIPE, list(changes)).config, run.folder.config)


def test_a_config_that_cannot_be_read_for_a_moment_is_read_again(run, controller, said, monkeypatch):
    """Meanwhile nothing is decided by limits that are not the recipe's."""
    run.submit()
    configured(run, "cluster.budget.gpu_hours=5")

    def fails(path):
        raise StorageError("input/output error")

    monkeypatch.setattr("argusrl.cluster.controller.read_resolved", fails)
    (watched,) = controller.reconcile()
    assert any("input/output error" in line for line in said)
    assert watched.control.last is None
    monkeypatch.undo()
    controller.reconcile()
    assert watched.control.limits.gpu_hours == 5.0
    assert watched.control.last is not None


def test_a_config_that_was_read_holds_while_a_changed_one_cannot_be(run, controller, said):
    run.submit()
    configured(run, "cluster.budget.gpu_hours=5")
    (watched,) = controller.reconcile()
    run.folder.config.write_text("torn")
    controller.reconcile()
    assert watched.control.limits.gpu_hours == 5.0
    assert watched.control.last.row == "starting"
    assert any("config.yaml" in line for line in said)


def test_a_channel_that_cannot_be_opened_is_said_and_the_rest_of_the_recipe_holds(run, controller, said, monkeypatch):
    monkeypatch.delenv("NO_SUCH_HOOK", raising=False)
    run.submit()
    configured(run, "cluster.notify.webhook=env:NO_SUCH_HOOK", "cluster.replace_nodes=true")
    (watched,) = controller.reconcile()
    assert watched.control.last is not None
    assert watched.care.section.replace_nodes
    assert sum("NO_SUCH_HOOK" in line for line in said) == 1
    controller.reconcile()
    assert sum("NO_SUCH_HOOK" in line for line in said) == 1


def test_a_run_that_spent_its_gpu_hours_is_stopped(run, controller):
    run.submit()
    run.folder.path.mkdir()
    write_resolved(load_config(RECIPE, ["cluster.budget.gpu_hours=5"]).config, run.folder.config)
    wait(run, controller, 5)
    run.runs()
    from argusrl.storage.sealed_json import read_sealed

    run.beats = int(read_sealed(run.folder.epoch(1))["time"]) + 3600  # six GPUs for an hour
    wait(run, controller, 10, beating=True)
    assert read_end(run.folder, 1).outcome == "budget"
    wait(run, controller, 5)
    with pytest.raises(NotFound):
        run.job(1)


def test_a_collapse_of_the_reward_is_told(run, controller):
    run.submit()
    wait(run, controller, 5)
    run.runs()
    for step, reward in enumerate([0.1] * 5 + [0.8] * 10 + [0.1] * 8, 1):
        run.step()
        append_line(run.folder.metrics, {"step": step, "reward/mean": reward})
    wait(run, controller, 10, beating=True)
    (told,) = [event for event in run.events("told") if event["about"] == "reward"]
    assert "fell from" in told["text"]


def test_one_broken_run_does_not_hold_up_the_others(run, controller, said, monkeypatch):
    run.submit()
    wait(run, controller, 5)
    (watched,) = controller.runs.values()
    monkeypatch.setattr(type(watched.care), "look", lambda self: 1 / 0)
    controller.reconcile()
    assert any("ZeroDivisionError" in line for line in said)


def test_a_run_that_is_over_and_gone_is_forgotten(run, controller):
    run.submit()
    wait(run, controller, 5)
    run.kube.delete(RAY_JOB, run.job(1)["metadata"]["name"])
    wait(run, controller, 10)
    assert read_end(run.folder, 1).outcome == "stopped"
    assert controller.reconcile() == []
    run.submit(2)
    wait(run, controller, 5)
    assert len(submissions(run.folder)) == 2


def test_it_goes_on_while_the_api_server_is_away(run, controller, said):
    run.submit()
    wait(run, controller, 5)

    def away(verb, kind, name):
        raise Unreachable("the API server is away")

    run.kube._before = away
    wait(run, controller, 60)
    assert said.count("the API server is away") == 1
    run.kube._before = None
    wait(run, controller, 5)
    assert len(submissions(run.folder)) == 1


def test_it_ends_when_asked(run, controller):
    run.submit()
    stop = threading.Event()
    thread = threading.Thread(target=controller.run, args=(stop, 0.01))
    thread.start()
    for _ in range(500):
        if run.folder.submission_made(1).exists():
            break
        threading.Event().wait(0.01)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert len(submissions(run.folder)) == 1


class TestStorageThatHangs:
    """A call to it does not come back for as long as the test lasts."""

    @pytest.fixture
    def hang(self):
        released = threading.Event()
        yield lambda *_: released.wait(30)
        released.set()

    @pytest.fixture
    def live(self, run, controller):
        """The controller, watching in a thread; the event that ends it."""
        run.submit()
        stop = threading.Event()
        thread = threading.Thread(target=controller.run, args=(stop, 0.01))
        yield thread, stop
        stop.set()
        thread.join(10)

    def until(self, holds) -> bool:
        return any(holds() or threading.Event().wait(0.01) for _ in range(500))

    def test_does_not_hold_up_the_end(self, controller, live, hang, monkeypatch):
        closed = threading.Event()
        monkeypatch.setattr(RunRecord, "look", hang)
        monkeypatch.setattr(Controller, "close", lambda self: closed.set())
        thread, stop = live
        thread.start()
        assert self.until(lambda: any(watched.busy for watched in controller.runs.values()))
        stop.set()
        thread.join(5)
        assert not thread.is_alive()
        assert closed.is_set()

    def test_does_not_hold_up_runs_that_are_there(self, run, live, hang, monkeypatch):
        """Where it hangs for the folders of others, which are looked through for what is not finished."""
        (run.root / "other" / "submissions").mkdir(parents=True)
        monkeypatch.setattr("argusrl.cluster.controller.newest_submission", hang)
        live[0].start()
        assert self.until(run.folder.submission_made(1).exists)


class FakeJobs:
    """The jobs of one Ray cluster."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.given: list[tuple[str, str, dict, dict]] = []
        self.away = False

    def status(self, submission_id):
        if self.away:
            raise ClusterError("the dashboard does not answer")
        return self.jobs.get(submission_id)

    def submit(self, submission_id, entrypoint, runtime_env, metadata):
        if self.away:
            raise ClusterError("the dashboard does not answer")
        self.given.append((submission_id, entrypoint, runtime_env, metadata))
        return self.jobs.setdefault(submission_id, "RUNNING") == "RUNNING"

    def stop(self, submission_id):
        if self.jobs.get(submission_id) == "RUNNING":
            self.jobs[submission_id] = "STOPPED"
        return True


class TestClusterThatIsThere:
    """A RayCluster that somebody made, with the job on its annotation."""

    @pytest.fixture
    def jobs(self) -> FakeJobs:
        return FakeJobs()

    @pytest.fixture
    def controller(self, run, said, jobs) -> Controller:
        name = f"{run.label}-s1"
        notes = {
            JOB_ANNOTATION: json.dumps({"entrypoint": "argusrl train r.yaml", "runtime_env": {"env_vars": {"A": "1"}}}),
            FOLDER_ANNOTATION: str(run.folder.path),
            SUBMISSION_LABEL: "1",
        }
        run.store.seed(
            {
                "apiVersion": "ray.io/v1",
                "kind": "RayCluster",
                "metadata": {
                    "name": f"{run.label}-s1-abcde",
                    "namespace": run.namespace,
                    "labels": {RUN_LABEL: run.label},
                    "annotations": notes,
                },
                "spec": run._manifest()["spec"]["rayClusterSpec"],
            }
        )
        jobs.jobs[name] = "RUNNING"
        controller = new_controller(run, said, jobs_of=lambda cluster: jobs)
        wait(run, controller, 5)
        for place, node in enumerate(NODES):
            run.pod(1, "head" if place == 0 else "worker", node, place)
        from argusrl.journal.attempts import next_attempt
        from argusrl.journal.epochs import claim_epoch

        claim_epoch(run.folder, {"attempt": next_attempt(run.folder)})
        wait(run, controller, 20, beating=True)
        return controller

    def row(self, controller) -> str:
        (watched,) = controller.reconcile()
        return watched.control.last.row

    def test_is_put_on_record(self, run, controller):
        (record,) = submissions(run.folder)
        assert (record.kind, record.name, record.reason) == ("job", f"{run.label}-s1", "first")
        assert self.row(controller) == "well"

    def test_a_head_that_was_started_anew_gets_the_job_again(self, run, controller, jobs):
        jobs.jobs.clear()
        run.drop(run.head())
        run.pod(1, "head", NODES[0], place=9)
        wait(run, controller, 45)
        ((name, entrypoint, runtime_env, metadata),) = jobs.given
        assert name == f"{run.label}-s2"
        assert entrypoint == "argusrl train r.yaml"
        assert runtime_env["env_vars"] == {"A": "1", SUBMISSION_VARIABLE: "2"}
        assert metadata["submission"] == "2"
        wait(run, controller, 10)
        assert len(submissions(run.folder)) == 2

    def test_a_head_that_is_not_back_yet_is_waited_for(self, run, controller, jobs):
        jobs.jobs.clear()
        jobs.away = True
        run.drop(run.head())
        wait(run, controller, 300)
        assert len(submissions(run.folder)) == 2
        assert jobs.given == []
        jobs.away = False
        run.pod(1, "head", NODES[0], place=9)
        wait(run, controller, 10)
        assert [given[0] for given in jobs.given] == [f"{run.label}-s2"]

    def test_a_job_that_failed_is_submitted_again(self, run, controller, jobs):
        run.ends(9)
        jobs.jobs[f"{run.label}-s1"] = "FAILED"
        wait(run, controller, 10)
        assert [given[0] for given in jobs.given] == [f"{run.label}-s2"]

    def test_a_job_that_a_person_stopped_is_not(self, run, controller, jobs):
        run.ends(75, "interrupted")
        jobs.jobs[f"{run.label}-s1"] = "STOPPED"
        wait(run, controller, 60)
        assert read_end(run.folder, 1).outcome == "stopped"
        assert jobs.given == []

    @pytest.mark.parametrize("how", ["annotation", "cluster"])
    def test_taking_the_run_off_the_cluster_ends_it(self, run, controller, jobs, how):
        name = f"{run.label}-s1-abcde"
        if how == "cluster":
            run.kube.delete(RAY_CLUSTER, name)
        else:
            run.kube.patch(RAY_CLUSTER, name, {"metadata": {"annotations": {JOB_ANNOTATION: None}}})
        wait(run, controller, 60)
        assert read_end(run.folder, 1).outcome == "stopped"
        assert jobs.given == []

    @pytest.mark.parametrize("how", ["annotation", "cluster"])
    def test_taking_it_off_keeps_an_intent_from_being_carried_out(self, run, controller, jobs, how):
        """The head was lost and the next submission is on record; the person is faster than the new head."""
        jobs.jobs.clear()
        jobs.away = True
        run.drop(run.head())
        wait(run, controller, 60)
        assert len(submissions(run.folder)) == 2
        name = f"{run.label}-s1-abcde"
        if how == "cluster":
            run.kube.delete(RAY_CLUSTER, name)
        else:
            run.kube.patch(RAY_CLUSTER, name, {"metadata": {"annotations": {JOB_ANNOTATION: None}}})
        jobs.away = False
        run.pod(1, "head", NODES[0], place=9)
        wait(run, controller, 60)
        assert jobs.given == []
        assert read_end(run.folder, 2).outcome == "stopped"

    def test_nothing_is_submitted_to_a_cluster_that_was_taken_off(self, run, controller, jobs):
        """Between the look and the request."""
        (record,) = submissions(run.folder)
        target = ClusterJobTarget(run.kube, lambda cluster: jobs)
        run.kube.patch(RAY_CLUSTER, f"{run.label}-s1-abcde", {"metadata": {"annotations": {JOB_ANNOTATION: None}}})
        assert target.create(record) == ""
        assert jobs.given == []

    def test_a_dashboard_that_does_not_answer_is_no_reason_for_anything(self, run, controller, jobs):
        jobs.away = True
        wait(run, controller, 300, beating=True)
        assert len(submissions(run.folder)) == 1
