"""Nodes of a run on a cluster in memory, with a HyperPod that answers as it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from argusrl.cluster.hyperpod import Instance, RepairAnswer
from argusrl.cluster.kinds import POD
from argusrl.cluster.kube_api import KubeError
from argusrl.cluster.names import DRAIN_ANNOTATION
from argusrl.cluster.node_care import NodeCare
from argusrl.config.sections import ClusterSection
from argusrl.errors import ClusterError
from argusrl.journal.drains import Drained, answer_drain, asked_pods, read_drain
from argusrl.journal.node_reports import Finding, NodeReport, write_node_reports
from argusrl.journal.submissions import node_actions, read_answer
from fakes.controlled_run import NODES, ControlledRun

WORKER = NODES[1]
INSTANCE = WORKER.removeprefix("hyperpod-")


class FakeHyperPod:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.status = "Running"
        self.refusal = ""
        self.away = False
        self.named: list[str] = []  # nodes whose instance was asked for

    def repair(self, action, instances):
        if self.away:
            raise ClusterError("no answer")
        self.asked += [(action, one) for one in instances]
        return [RepairAnswer(instance=one, accepted=not self.refusal, code=self.refusal) for one in instances]

    def describe(self, instance):
        return Instance(instance=instance, status=self.status)

    def instance_of(self, node):
        self.named.append(node)
        return "i-00000000000000001" if node == "ip-10-0-0-1" else ""

    def events(self, instance, most):
        return [{"EventTime": "then", "Description": f"{instance} is unhealthy"}]


@pytest.fixture
def run(tmp_path: Path) -> ControlledRun:
    found = ControlledRun(tmp_path / "runs")
    found.submit()
    found.look()
    found.runs()
    found.wait(20, beating=True)
    return found


@pytest.fixture
def service() -> FakeHyperPod:
    return FakeHyperPod()


@pytest.fixture
def care(run: ControlledRun, service: FakeHyperPod) -> NodeCare:
    return new_care(run, service)


def new_care(run: ControlledRun, service: FakeHyperPod, *, replace_nodes: bool = True) -> NodeCare:
    return NodeCare(
        run.control,
        run.kube,
        section=ClusterSection(replace_nodes=replace_nodes),
        hyperpod=lambda cluster: service if cluster == "ml" else None,
        clock=lambda: run.seconds,
        wall=lambda: run.seconds,
    )


def look(run: ControlledRun, care: NodeCare, seconds: float = 5.0) -> None:
    run.wait(seconds, beating=True)
    care.look()


def worker(run: ControlledRun) -> str:
    return next(name for name in run.pods() if "worker-1" in name)


def ecc(run: ControlledRun, start: int = 1, node: str = WORKER) -> None:
    """What the probe tells with every reading once there was an error: the same, now."""
    found = Finding(kind="ecc", cause="hardware", text="uncorrected errors", time=run.seconds, count=1)
    report = NodeReport(
        ray_node=f"r{start}", address="a", head=False, pod=worker(run), node=node, time=run.seconds, findings=[found]
    )
    write_node_reports(run.folder, 1, [report])


def test_nothing_happens_on_healthy_nodes(run, care, service):
    look(run, care)
    assert asked_pods(run.folder) == {}
    assert node_actions(run.folder) == []
    assert service.asked == []


@pytest.mark.parametrize("status", ["UnschedulablePendingReplacement", "UnschedulablePendingReboot"])
def test_a_node_that_is_about_to_go_is_drained(run, care, status):
    run.node(WORKER, node_health_status=status)
    look(run, care)
    look(run, care)
    assert asked_pods(run.folder) == {worker(run): False}
    drain = read_drain(run.folder, worker(run))
    assert (drain.pod, drain.node, drain.asked_by) == (worker(run), WORKER, "controller")
    assert status in drain.reason
    assert drain.deadline_seconds == 25.0
    (noted,) = run.events("instance_events")
    assert noted["events"] == [f"then {INSTANCE} is unhealthy"]
    assert [notice.kind for notice in run.told.notices] == ["node"]


def test_a_person_asks_by_annotation(run, care):
    run.kube.patch(POD, worker(run), {"metadata": {"annotations": {DRAIN_ANNOTATION: "maintenance"}}})
    look(run, care)
    assert asked_pods(run.folder) == {worker(run): False}
    drain = read_drain(run.folder, worker(run))
    assert (drain.reason, drain.asked_by) == ("maintenance", "person")


class TestPodsOnDeadNodes:
    def test_not_ready_alone_may_be_a_partition(self, run, care):
        run.node(WORKER, ready=False)
        run.kube.delete(POD, worker(run))
        look(run, care, 60)
        assert worker(run) in run.pods()

    def test_go_when_the_node_is_gone(self, run, care):
        pod = worker(run)
        run.lose_node(WORKER)
        look(run, care)
        assert pod not in run.pods()
        assert [action.action for action in node_actions(run.folder)] == ["delete_pod"]

    def test_go_when_hyperpod_replaces_it(self, run, care):
        pod = worker(run)
        run.node(WORKER, ready=False, node_health_status="UnschedulablePendingReplacement")
        look(run, care)
        assert pod not in run.pods()

    def test_stay_while_a_node_that_will_be_replaced_still_answers(self, run, care):
        run.node(WORKER, node_health_status="UnschedulablePendingReplacement")
        look(run, care)
        assert worker(run) in run.pods()

    def test_stay_through_a_reboot(self, run, care):
        run.node(WORKER, ready=False, node_health_status="UnschedulablePendingReboot")
        look(run, care, 60)
        assert worker(run) in run.pods()

    def test_go_when_the_service_says_that_the_instance_is_gone(self, run, care, service):
        pod = worker(run)
        run.node(WORKER, ready=False)
        look(run, care)
        assert pod in run.pods()
        service.status = "ShuttingDown"
        look(run, care, 40)
        assert pod not in run.pods()

    def test_go_after_the_fence(self, run, care):
        pod = worker(run)
        run.node(WORKER, ready=False)
        run.kube.delete(POD, pod)
        run.drop(run.head())
        run.lose_node(NODES[0])
        run.wait(60)
        assert run.records()[-1].number == 2
        care.look()
        assert pod not in run.pods()


class TestOwnEvidence:
    def test_only_tells_by_default(self, run, service):
        care = new_care(run, service, replace_nodes=False)
        ecc(run)
        look(run, care)
        look(run, care)
        assert service.asked == []
        (notice,) = run.told.notices
        assert "uncorrected errors" in notice.text

    def test_drains_reboots_and_then_replaces(self, run, care, service):
        ecc(run)
        look(run, care)
        assert service.asked == []
        assert asked_pods(run.folder) == {worker(run): False}
        answer_drain(run.folder, Drained(pod=worker(run), outcome="drained", seconds=1.0))
        look(run, care)
        look(run, care, 300)
        assert service.asked == [("reboot", INSTANCE)]
        for _ in range(3):  # its errors are still there to be read until it goes
            ecc(run)
            look(run, care)
        assert service.asked == [("reboot", INSTANCE)]
        ecc(run, start=2)
        look(run, care)
        look(run, care, 300)
        assert service.asked == [("reboot", INSTANCE), ("replace", INSTANCE)]
        assert [action.action for action in node_actions(run.folder)] == ["reboot", "replace"]
        assert read_answer(run.folder, f"replace-{INSTANCE}").done

    def test_a_driver_that_does_not_answer_is_not_waited_for_long(self, run, care, service):
        ecc(run)
        look(run, care)
        look(run, care)
        look(run, care, 60)
        assert service.asked == [("reboot", INSTANCE)]

    def test_two_controllers_ask_once(self, run, care, service):
        ecc(run)
        other = new_care(run, service)
        for _ in range(20):
            look(run, care)
            other.look()
        assert service.asked == [("reboot", INSTANCE)]

    def test_a_refusal_is_read_and_told(self, run, care, service):
        service.refusal = "InvalidInstanceStatus"
        ecc(run)
        for _ in range(20):
            look(run, care)
        assert not read_answer(run.folder, f"reboot-{INSTANCE}").done
        assert any("InvalidInstanceStatus" in notice.text for notice in run.told.notices)

    @pytest.fixture
    def drained(self, run, care):
        ecc(run)
        look(run, care)
        answer_drain(run.folder, Drained(pod=worker(run), outcome="drained", seconds=1.0))

    @pytest.mark.usefixtures("drained")
    def test_a_replacement_without_an_answer_is_asked_for_again(self, run, care, service):
        look(run, care)
        service.away = True
        ecc(run, start=2)
        look(run, care)
        assert [action.action for action in node_actions(run.folder)] == ["reboot", "replace"]
        service.away = False
        look(run, care, 60)
        assert service.asked == [("reboot", INSTANCE)]
        look(run, care, 120)
        look(run, care, 120)
        assert service.asked == [("reboot", INSTANCE), ("replace", INSTANCE)]

    @pytest.mark.usefixtures("drained")
    def test_a_reboot_without_an_answer_is_neither_repeated_nor_followed_by_more(self, run, care, service):
        service.away = True
        look(run, care)
        service.away = False
        for _ in range(3):
            ecc(run, start=2)
            look(run, care, 120)
        assert service.asked == []
        assert [action.action for action in node_actions(run.folder)] == ["reboot"]
        assert [notice.text for notice in run.told.notices if notice.key.startswith("unanswered:")] == [
            f"nobody knows whether {INSTANCE} is rebooted: a person decides what follows"
        ]

    @pytest.mark.usefixtures("drained")
    def test_a_reboot_that_was_refused_did_not_fail_to_help(self, run, care, service):
        service.refusal = "InvalidInstanceStatus"
        look(run, care)
        service.refusal = ""
        ecc(run, start=2)
        look(run, care, 300)
        assert service.asked == [("reboot", INSTANCE)]

    def test_who_a_node_is_is_asked_once(self, run, care, service):
        """It takes a list of the whole cluster."""
        run.drop(worker(run))
        run.node("ip-10-0-0-1")
        run.pod(1, "worker", "ip-10-0-0-1", 1)
        for _ in range(20):
            ecc(run, node="ip-10-0-0-1")
            look(run, care)
        assert service.named == ["ip-10-0-0-1"]
        assert service.asked == [("reboot", "i-00000000000000001")]

    def test_a_node_with_somebody_elses_pod_is_left_to_people(self, run, care, service):
        run.store.seed(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "other", "namespace": "team-b"},
                "spec": {"nodeName": WORKER, "containers": [{"name": "c", "image": "i"}]},
                "status": {"phase": "Running"},
            }
        )
        ecc(run)
        look(run, care, 120)
        assert service.asked == []
        assert "others have pods there" in run.told.notices[-1].text

    def test_who_else_is_there_must_be_known(self, run, care, service):
        def away(verb, kind, name):
            if verb == "list" and kind is POD and run.kube_everywhere:
                raise KubeError("forbidden")

        run.kube_everywhere = True
        ecc(run)
        run.wait(5, beating=True)
        run.kube._before = away
        care.look()
        assert service.asked == []

    def test_hyperpod_is_left_alone_where_it_acts_itself(self, run, care, service):
        ecc(run)
        run.node(WORKER, node_health_status="UnschedulablePendingReplacement")
        for _ in range(20):
            look(run, care)
        assert service.asked == []

    def test_the_budget_counts(self, run, care, service):
        care.section = ClusterSection(replace_nodes=True, budget={"replacements": 0})
        ecc(run)
        for _ in range(20):
            look(run, care)
        assert service.asked == []
        assert any("replacements = 0 is spent" in notice.text for notice in run.told.notices)

    def test_storage_on_several_nodes_is_the_storages_fault(self, run, care, service):
        bad = Finding(kind="storage", cause="storage", text="EIO", time=1.0, count=50)
        write_node_reports(
            run.folder,
            1,
            [NodeReport(ray_node=n, address="a", head=False, pod=worker(run), node=n, findings=[bad]) for n in NODES],
        )
        look(run, care)
        assert service.asked == []
        (notice,) = run.told.notices
        assert notice.kind == "storage"
        assert "several nodes" in notice.text
