"""One run under control, end to end on a cluster in memory: what is recorded, created, deleted and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from argusrl.cluster.kinds import RAY_JOB
from argusrl.cluster.kube_api import NotFound, Unreachable
from argusrl.errors import FencedError
from argusrl.journal.epochs import newest_epoch, renew_epoch
from argusrl.journal.submissions import read_end, read_made, record_submission
from argusrl.storage.sealed_json import read_sealed
from fakes.controlled_run import NODES, ControlledRun


@pytest.fixture
def run(tmp_path: Path) -> ControlledRun:
    return ControlledRun(tmp_path / "runs")


@pytest.fixture
def running(run: ControlledRun) -> ControlledRun:
    """A run whose driver has been seen alive."""
    run.submit()
    run.look()
    run.runs()
    run.wait(20, beating=True)
    return run


def test_what_a_person_submits_is_put_on_record(run):
    submitted = run.submit()
    assert run.look() == "stranger"
    (record,) = run.records()
    assert (record.number, record.reason, record.after_attempt) == (1, "first", 0)
    assert record.name == submitted["metadata"]["name"]
    assert read_made(run.folder, 1).uid == submitted["metadata"]["uid"]
    assert record.gpus == 6.0
    assert run.look() == "starting"


def test_a_living_run_is_left_alone(running):
    assert set(running.wait(300, beating=True)) == {"well"}
    assert len(running.records()) == 1


class TestHeadIsLost:
    @pytest.fixture
    def resubmitted(self, running: ControlledRun) -> ControlledRun:
        running.lose_node(NODES[0])
        running.wait(40)
        return running

    def test_fenced_deleted_and_submitted_again(self, resubmitted):
        assert [record.reason for record in resubmitted.records()] == ["first", "head_lost"]
        with pytest.raises(NotFound):
            resubmitted.job(1)
        assert resubmitted.job(2)["metadata"]["uid"] == read_made(resubmitted.folder, 2).uid
        with pytest.raises(FencedError):
            resubmitted.epoch.check()

    def test_within_a_minute_and_its_seconds_are_written_down(self, resubmitted):
        (event,) = [event for event in resubmitted.events("submitted") if event["submission"] == 2]
        seconds = event["seconds"]
        assert set(seconds) == {"silence", "record", "fence", "remove", "create", "total"}
        assert 30 <= seconds["silence"] <= 40
        assert seconds["total"] < 60

    def test_the_new_job_is_the_old_one_under_its_number(self, resubmitted):
        new, old = resubmitted.job(2), resubmitted.records()[0].manifest
        assert new["metadata"]["labels"]["argusrl.io/submission"] == "2"
        assert new["spec"]["jobId"] == new["metadata"]["name"]
        template = new["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]
        assert template["metadata"]["labels"]["argusrl.io/submission"] == "2"
        assert new["spec"]["entrypoint"] == old["spec"]["entrypoint"]
        assert "suspend" not in resubmitted.records()[1].manifest["spec"]

    def test_somebody_hears_of_it_once(self, resubmitted):
        resubmitted.wait(30)
        resubmitted.look(resubmitted.new_control())
        faults = [notice for notice in resubmitted.told.notices if notice.kind == "fault"]
        assert len(faults) == 1
        assert "submitting again" in faults[0].text

    def test_a_second_controller_changes_nothing(self, resubmitted):
        other = resubmitted.new_control()
        epoch = newest_epoch(resubmitted.folder)
        assert resubmitted.look(other) == "starting"
        assert newest_epoch(resubmitted.folder) == epoch
        assert len(resubmitted.records()) == 2


def test_a_head_that_came_back_empty_is_no_head(running):
    running.drop(running.head())
    running.pod(1, "head", NODES[0], place=9)
    assert "head_lost" in running.wait(40)


def test_the_mark_of_the_head_outlives_the_controller(running):
    running.drop(running.head())
    running.pod(1, "head", NODES[0], place=9)
    running.control = running.new_control()
    assert "head_lost" in running.wait(40)


def test_a_partition_is_left_alone(running):
    running.node(NODES[0], ready=False)
    assert set(running.wait(300, beating=True)) == {"partition"}


@pytest.mark.parametrize("code", [2, 3, 4, 6, 10])
def test_what_would_fail_again_is_never_submitted_again(running, code):
    running.ends(code)
    running.says(1, "Failed", "AppFailed", "FAILED")
    assert running.wait(5) == ["final_code"]
    assert set(running.wait(60)) == {"ended"}
    assert len(running.records()) == 1
    assert running.told.notices[-1].kind == "end"


def test_a_complete_run_ends_whatever_its_job_says(running):
    running.ends(0, "complete")
    running.says(1, "Failed", "JobStatusCheckTimeoutExceeded")
    assert running.wait(10) == ["complete", "ended"]
    assert read_end(running.folder, 1).outcome == "complete"


def test_a_complete_run_with_more_to_do_goes_on(running):
    running.ends(0, "complete")
    running.says(1, "Complete", job_status="SUCCEEDED")
    running.wait(10)
    running.submit(2)
    assert set(running.wait(30)) == {"stranger", "starting"}
    running.runs(2)
    running.wait(20, beating=True)
    running.says(2, "Failed", "AppFailed", "FAILED")
    running.ends(9)
    running.wait(10)
    assert [record.reason for record in running.records()] == ["first", "person", "failed"]


def test_a_complete_run_with_nothing_to_do_ends_again(running):
    running.ends(0, "complete")
    running.says(1, "Complete", job_status="SUCCEEDED")
    running.wait(10)
    running.submit(2)
    running.wait(10)
    running.says(2, "Complete", job_status="SUCCEEDED")
    running.wait(60)
    assert read_end(running.folder, 2).reason == "complete"
    assert len(running.records()) == 2


def test_a_job_that_nobody_ends_is_deleted_after_its_run(running):
    running.ends(0, "complete")
    rows = running.wait(330)
    assert rows[-1] == "ended"
    assert "left_over" in rows
    with pytest.raises(NotFound):
        running.job(1)


def test_a_person_stops_a_run_by_deleting_its_job(running):
    running.kube.delete(RAY_JOB, running.job(1)["metadata"]["name"])
    running.wait(10)
    assert read_end(running.folder, 1).outcome == "stopped"
    running.wait(60)
    assert len(running.records()) == 1


class TestJobThatWasOverIsGone:
    """KubeRay may delete a RayJob itself, 60 s after its end; the run may wait for longer than that."""

    @pytest.fixture
    def backing_off(self, run: ControlledRun) -> ControlledRun:
        """The fourth submission in a row was evicted before a step: two minutes are waited for."""
        run.submit()
        run.look()
        for number in (1, 2, 3, 4):
            run.runs(number)
            run.wait(10, beating=True)
            run.ends(75, "interrupted")
            run.says(number, "Failed", "AppFailed", "FAILED")
            run.wait(65 if number < 4 else 5)
        assert run.look() == "back_off"
        return run

    def delete(self, run: ControlledRun) -> None:
        run.kube.delete(RAY_JOB, run.job(4)["metadata"]["name"])

    def test_by_kuberay(self, backing_off):
        backing_off.wait(60)
        self.delete(backing_off)
        assert set(backing_off.wait(20)) == {"back_off"}
        backing_off.wait(120)
        assert backing_off.records()[-1].number == 5
        assert backing_off.job(5)

    @pytest.mark.parametrize("known", [True, False])
    def test_by_kuberay_with_a_controller_that_did_not_see_it_end(self, backing_off, known):
        """One is new; the other one was there all the time, and looked away."""
        other = backing_off.new_control()
        if known:
            other.reconcile(backing_off.jobs())
        self.delete(backing_off)
        assert other.reconcile(()).row == "back_off"

    @pytest.mark.parametrize("seconds", [10, 100])
    def test_by_a_person(self, backing_off, seconds):
        backing_off.wait(seconds)
        self.delete(backing_off)
        assert backing_off.wait(5) == ["vanished"]
        assert read_end(backing_off.folder, 4).outcome == "stopped"


def test_and_may_submit_it_again(running):
    running.kube.delete(RAY_JOB, running.job(1)["metadata"]["name"])
    running.wait(10)
    running.submit(2)
    running.wait(10)
    assert [record.reason for record in running.records()] == ["first", "person"]
    assert running.look() == "starting"


def test_success_without_a_complete_verdict_is_none(running):
    running.says(1, "Complete", job_status="SUCCEEDED")
    rows = running.wait(40)
    assert "ending" in rows
    assert running.records()[-1].reason == "false_success"


def test_a_run_that_gets_nowhere_ends(run):
    run.submit()
    run.look()
    for number in (1, 2, 3):
        run.runs(number)
        run.wait(10, beating=True)
        run.ends(9, error="WorkerError")
        run.says(number, "Failed", "AppFailed", "FAILED")
        run.wait(120)
    assert [record.reason for record in run.records()] == ["first", "failed", "failed"]
    assert read_end(run.folder, 3).reason == "futile"


def test_kueue_may_take_as_long_as_it_likes(tmp_path):
    run = ControlledRun(tmp_path / "runs", queue=True)
    run.submit()
    name = run.jobs()[0]["metadata"]["name"]
    run.kube.patch(RAY_JOB, name, {"spec": {"suspend": True}})
    run.look()
    assert set(run.wait(600)) == {"not_admitted"}
    run.kube.patch(RAY_JOB, name, {"spec": {"suspend": False}})
    assert set(run.wait(60)) == {"starting"}


def test_after_a_preemption_it_waits_and_goes_on(tmp_path):
    run = ControlledRun(tmp_path / "runs", queue=True)
    run.submit()
    run.look()
    run.runs()
    run.wait(20, beating=True)
    name = run.jobs()[0]["metadata"]["name"]
    run.kube.patch(RAY_JOB, name, {"spec": {"suspend": True}})
    run.says(1, "Suspended")
    run.ends(75, "interrupted")
    for pod in run.pods():
        run.drop(pod)
    assert set(run.wait(600)) == {"not_admitted"}
    run.kube.patch(RAY_JOB, name, {"spec": {"suspend": False}})
    run.generation = "fghij"
    run.says(1, "Initializing")
    assert set(run.wait(120)) == {"starting"}
    run.runs()
    assert set(run.wait(30, beating=True)) == {"well"}
    assert len(run.records()) == 1


def test_pods_that_fit_nowhere_are_waited_for_with_a_limit(run):
    run.submit()
    run.look()
    run.says(1, "Initializing")
    run.pod(1, "head", "", phase="Pending")
    run.control.limits = type(run.control.limits)(capacity_wait_seconds=300.0)
    rows = run.wait(320)
    assert rows[0] == "capacity"
    assert read_end(run.folder, 1).outcome == "capacity"
    assert "0/3 nodes" in next(notice.text for notice in run.told.notices if notice.key.startswith("capacity"))
    with pytest.raises(NotFound):
        run.job(1)


def test_an_intent_that_nobody_carried_out_is(running):
    running.lose_node(NODES[0])
    failing = running.new_control()

    def away(verb, kind, name):
        if verb in ("delete", "create"):
            raise Unreachable("the API server is away")

    running.kube._before = away
    running.control = failing
    running.wait(40)
    assert read_made(running.folder, 2) is None
    running.kube._before = None
    running.look(running.new_control())
    assert read_made(running.folder, 2).uid == running.job(2)["metadata"]["uid"]


def test_nothing_is_decided_while_the_api_server_is_away(running):
    running.lose_node(NODES[0])

    def away(verb, kind, name):
        raise Unreachable("the API server is away")

    running.kube._before = away
    assert {running.control.reconcile(()).row for _ in range(3)} == {"api_unknown"}


def test_nothing_is_decided_while_the_run_folder_is_away(running):
    running.lose_node(NODES[0])
    running.root.rename(running.root.with_name("elsewhere"))
    assert set(running.wait(60)) == {"storage_away"}
    assert running.told.notices[-1].key.startswith("storage_away")


def test_trouble_that_comes_back_is_told_again_and_trouble_that_lasts_is_not(running):
    elsewhere = running.root.with_name("elsewhere")
    for _ in range(3):
        running.root.rename(elsewhere)
        running.wait(600)
        elsewhere.rename(running.root)
        running.wait(30, beating=True)
    assert [notice.kind for notice in running.told.notices if notice.key.startswith("storage_away")] == ["stall"] * 3


def test_trouble_that_comes_and_goes_is_told_every_five_minutes_at_most(running):
    elsewhere = running.root.with_name("elsewhere")
    for _ in range(60):
        running.root.rename(elsewhere)
        running.wait(5)
        elsewhere.rename(running.root)
        running.wait(5, beating=True)
    assert len([notice for notice in running.told.notices if notice.key.startswith("storage_away")]) in (3, 4)


def test_an_outage_that_both_waited_through_is_no_silence(running):
    """The controller sees storage come back before the driver's next heartbeat does."""
    elsewhere = running.root.with_name("elsewhere")
    running.root.rename(elsewhere)
    running.wait(1200)
    elsewhere.rename(running.root)
    assert set(running.wait(10)) == {"well"}
    assert set(running.wait(60, beating=True)) == {"well"}


def test_a_controller_that_slept_hears_first(running):
    running.node(NODES[0], ready=False)
    running.seconds += 3600
    assert running.look() == "partition"
    assert set(running.wait(20, beating=True)) == {"partition"}


def test_a_damaged_record_is_for_a_person(running):
    running.folder.submission(1).write_bytes(b"{}")
    running.control = running.new_control()
    assert running.wait(5) == ["damaged"]


def test_what_a_late_request_created_is_removed(running):
    """It bears the mark of controllers, and no record knows its id."""
    running.lose_node(NODES[0])
    running.wait(40)
    stray = dict(running.records()[1].manifest)
    stray["metadata"] = {**stray["metadata"], "name": "stray"}
    running.kube.create(RAY_JOB, stray)
    running.wait(10)
    with pytest.raises(NotFound):
        running.kube.get(RAY_JOB, "stray")
    assert running.job(2)


def test_nobody_takes_a_run_from_another_namespace(running):
    job = dict(running.records()[0].manifest)
    job["metadata"] = {**job["metadata"], "namespace": "intruder", "name": "theirs"}
    theirs = running.kube.create(RAY_JOB, job, "intruder")
    running.control.reconcile([*running.jobs(), theirs])
    assert len(running.records()) == 1
    assert running.job(1)
    assert "intruder" in running.events("trouble")[0]["message"]


def test_an_end_that_another_controller_recorded_meanwhile_stands(running):
    """One saw the head lost, the other that a person deleted the job: both wrote it down."""
    running.lose_node(NODES[0])
    running.kube.delete(RAY_JOB, running.job(1)["metadata"]["name"])
    running.wait(5)
    assert read_end(running.folder, 1).reason == "vanished"
    intent = running.records()[0]
    late = type(intent)(**{name: getattr(intent, name) for name in intent.__struct_fields__} | {
        "number": 2, "before": 1, "reason": "head_lost", "name": f"{running.label}-s2",
    })  # fmt: skip
    record_submission(running.folder, late)
    assert set(running.wait(60)) == {"ended"}
    assert running.jobs() == []


def test_gpu_hours_are_what_attempts_took(running):
    running.beats = read_sealed(running.folder.epoch(1))["time"] + 3600
    running.beat()
    running.look()
    assert running.control.view.gpu_hours == pytest.approx(6.0, rel=0.01)


def test_a_driver_that_heals_itself_goes_on_spending(running):
    """It claims another epoch, for the same attempt."""
    running.beats = read_sealed(running.folder.epoch(1))["time"] + 3600
    running.beat()
    renew_epoch(running.epoch, {"attempt": 1})
    running.look()
    assert running.control.view.gpu_hours == pytest.approx(6.0, rel=0.01)
