"""When a job that is gone counts as deleted by KubeRay, by what was seen of it and when."""

from __future__ import annotations

import pytest

from argusrl.cluster.job_ends import JobEnds, ends_in
from argusrl.cluster.sighting import Sighting
from argusrl.journal.submissions import RAY_JOB_KIND, Submission

RUNNING, FAILED, ABSENT = Sighting(job="running"), Sighting(job="failed", job_reason="AppFailed"), Sighting()


def submission(number: int = 1, **spec) -> Submission:
    spec = {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": 60, **spec}
    return Submission(
        number=number, name="maze-s1", namespace="team", kind=RAY_JOB_KIND, reason="first", text="", time=0.0,
        manifest={"spec": spec},
    )  # fmt: skip


def looked(*looks: tuple[float, Sighting], ends: JobEnds | None = None, one: Submission | None = None):
    """After looks that took a second each, as one controller saw them."""
    ends = ends or JobEnds()
    for seconds, sight in looks:
        ends.see(one or submission(), sight, seconds, seconds + 1)
    return ends.as_it_was(one or submission())


@pytest.mark.parametrize(
    ("looks", "by_kuberay"),
    [
        ([(0, RUNNING), (5, FAILED), (60, FAILED), (65, ABSENT)], True),
        ([(0, RUNNING), (5, FAILED), (70, ABSENT)], True),  # between the two it may have gone at any time
        ([(0, RUNNING), (5, FAILED), (10, FAILED), (15, ABSENT)], False),  # too soon
        ([(0, RUNNING), (5, FAILED), (100, FAILED), (105, ABSENT)], False),  # KubeRay would have done it before
        ([(0, RUNNING), (5, ABSENT)], False),
        ([(0, FAILED), (5, ABSENT)], True),  # nobody knows how long it had been over
        ([(0, RUNNING), (5, FAILED), (10, FAILED), (15, Sighting(job="deleting")), (90, ABSENT)], False),
        ([(0, RUNNING), (5, FAILED), (60, FAILED), (65, Sighting(job="unknown")), (70, ABSENT)], True),
        ([(0, ABSENT), (5, RUNNING), (90, FAILED), (140, FAILED), (150, ABSENT)], True),  # it was not created yet
        ([(0, RUNNING), (5, FAILED), (60, RUNNING), (65, ABSENT)], True),  # the second of an old list
    ],
)
def test_by_its_time(looks, by_kuberay):
    found = looked(*looks)
    assert (found is not None) == by_kuberay
    assert found is None or (found.job, found.job_reason) == ("failed", "AppFailed")


def test_where_its_manifest_keeps_jobs_kuberay_deletes_none():
    one = submission(shutdownAfterJobFinishes=False)
    assert looked((0, FAILED), (60, ABSENT), one=one) is None


def test_an_end_is_worth_writing_down_once():
    ends = JobEnds()
    assert [ends.see(submission(), sight, 0, 0) for sight in (RUNNING, FAILED, FAILED, ABSENT)] == [
        False, True, False, False,
    ]  # fmt: skip


def test_what_another_controller_wrote_down_counts():
    event = {"kind": "job_over", "submission": 1, "job": "failed", "reason": "AppFailed", "stopped": False}
    known = ends_in([{"kind": "told", "key": "k"}, event])
    assert looked((0, ABSENT), ends=JobEnds(known)) == FAILED
    assert looked((0, ABSENT)) is None


def test_each_submission_counts_by_itself():
    ends = JobEnds()
    looked((0, RUNNING), (5, FAILED), (10, ABSENT), ends=ends)
    looked((20, RUNNING), ends=ends, one=submission(2))
    assert looked((25, ABSENT), ends=ends, one=submission(2)) is None
