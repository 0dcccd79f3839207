"""Nodes of a run: drained before they go, their pods freed when they are gone, repaired where the recipe allows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from argusrl.cluster.hyperpod import HyperPod
from argusrl.cluster.kinds import NODE, POD
from argusrl.cluster.kube_api import (
    Conflict,
    KubeApi,
    KubeError,
    NotFound,
    Object,
    annotations_of,
    labels_of,
    name_of,
)
from argusrl.cluster.names import DRAIN_ANNOTATION, RUN_LABEL, SUBMISSION_LABEL, label_of
from argusrl.cluster.node_health import NodeHealth, node_health
from argusrl.cluster.node_rule import Standing, Suspect, next_step, storage_trouble, suspects
from argusrl.cluster.pod_ends import PodEnds
from argusrl.cluster.run_control import RunControl
from argusrl.cluster.sighting import CLUSTER_LABEL, is_leaving, node_of, uid_of
from argusrl.config.sections import ClusterSection
from argusrl.errors import ArgusError, ClusterError
from argusrl.journal.drains import DRAIN_SECONDS, Drain, ask_for_drain, asked_pods
from argusrl.journal.node_reports import read_node_reports
from argusrl.journal.submissions import (
    NodeAction,
    NodeAnswer,
    node_actions,
    read_answer,
    record_action,
    record_answer,
)

_LOOK_SECONDS = 5.0  # may have passed since a label was set: the whole is to take DRAIN_SECONDS
_ASK_SECONDS = 30.0  # between two questions about an instance
_UNANSWERED_SECONDS = 120.0  # then whoever asked is taken for dead, and a replacement is asked for again
_DRAIN_PATIENCE_SECONDS = 2 * DRAIN_SECONDS


@dataclass(slots=True)
class NodeCare:
    """Of one run. `look` after each reconciliation; it never raises."""

    control: RunControl
    kube: KubeApi
    section: ClusterSection = field(default_factory=ClusterSection)
    hyperpod: Callable[[str], HyperPod | None] = lambda _: None  # by the cluster's name
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    _ends: PodEnds = field(init=False)
    _seen: dict[str, float] = field(default_factory=dict)  # since when, by what
    _gone: dict[str, bool] = field(default_factory=dict)  # instance → whether HyperPod says so
    _instances: dict[str, str] = field(default_factory=dict)  # node → its instance; empty: HyperPod has none

    def __post_init__(self) -> None:
        self._ends = PodEnds(self.control.record.run, self.kube, self.wall)

    def look(self) -> None:
        """Look at the nodes that have pods of this run, and do what is due."""
        view = self.control.view
        if view is None or view.folder != "well" or view.submission is None:
            return
        try:
            pods = self._pods()
            self._ends.look(view.attempt, pods)
            nodes = {name: self._node(name) for name in {node_of(pod) for pod in pods} - {""}}
            asked = asked_pods(self.control.record.run)
            self._drain(pods, nodes, asked)
            self._free(pods, nodes)
            if view.end is None:
                self._own_evidence(pods, nodes, asked)
        except ArgusError as error:
            self.control.notices.write_once("trouble", message=error.message)

    # ---- looking

    def _pods(self) -> list[Object]:
        """Of all submissions of the run: those of a fenced one may still lie on a node that is gone."""
        view = self.control.view
        assert view is not None
        assert view.submission is not None
        found = {uid_of(pod): pod for pod in self.control.sight.pods}
        label = f"{RUN_LABEL}={label_of(self.control.name)}"
        found |= {uid_of(pod): pod for pod in self.kube.list(POD, view.submission.namespace, labels=label).items}
        return list(found.values())

    def _node(self, name: str) -> NodeHealth | None:
        """None where there is no such node any more. Raises KubeError where that is unknown."""
        try:
            return node_health(self.kube.get(NODE, name))
        except NotFound:
            return None

    # ---- draining

    def _drain(self, pods: list[Object], nodes: dict[str, NodeHealth | None], asked: dict[str, bool]) -> None:
        for pod in pods:
            health = nodes.get(node_of(pod))
            wish = annotations_of(pod).get(DRAIN_ANNOTATION)
            if wish is not None:
                self._ask(pod, asked, wish, "person")
            elif health is not None and health.leaving and self._is_of_this_submission(pod):
                self._ask(pod, asked, f"HyperPod: {health.text()}", "controller")
                self._note_events(health)

    def _ask(self, pod: Object, asked: dict[str, bool], reason: str, who: str) -> None:
        name = name_of(pod)
        if name in asked:
            return
        drain = Drain(
            pod=name,
            node=node_of(pod),
            reason=reason,
            asked_by=who,
            time=self.wall(),
            deadline_seconds=DRAIN_SECONDS - _LOOK_SECONDS,
        )
        ask_for_drain(self.control.record.run, drain)
        asked[name] = False
        self.control.notices.write("drain", pod=name, node=node_of(pod), reason=reason)
        self.control.tell("node", f"drain:{name}", f"node {node_of(pod)} is emptied: {reason}")

    def _note_events(self, health: NodeHealth) -> None:
        """What HyperPod wrote about an instance that goes, once: it is gone with it."""
        service, key = self.hyperpod(health.cluster), f"events:{health.instance}"
        if service is None or not health.instance or key in self._seen:
            return
        self._seen[key] = self.clock()
        try:
            events = service.events(health.instance, most=10) or []
        except ClusterError as error:
            self.control.notices.write_once("trouble", message=error.message)
            return
        texts = [f"{event.get('EventTime')} {event.get('Description', '')}" for event in events]
        self.control.notices.write("instance_events", instance=health.instance, node=health.name, events=texts)

    # ---- pods on dead nodes

    def _free(self, pods: list[Object], nodes: dict[str, NodeHealth | None]) -> None:
        for pod in pods:
            name = node_of(pod)
            if not name:
                continue
            why = self._why_free(pod, nodes[name])
            if not why:
                continue
            action = NodeAction(
                action="delete_pod", node=name, pod=name_of(pod), pod_uid=uid_of(pod), reason=why, time=self.wall()
            )
            if record_action(self.control.record.run, action):
                self.control.notices.write("pod_deleted", pod=action.pod, node=name, reason=why)
            try:  # whoever recorded it may have died before this; with its id only this pod can be meant
                self.kube.delete(POD, action.pod, pod["metadata"].get("namespace"), uid=action.pod_uid, grace_seconds=0)
            except (Conflict, NotFound):
                continue

    def _why_free(self, pod: Object, health: NodeHealth | None) -> str:
        """Why a pod is deleted over its kubelet's head; empty where it is not. NotReady alone may be a partition."""
        if health is None:
            return "its node is gone"
        if health.ready:
            return ""
        if is_leaving(pod) and self._is_fenced(pod):
            return "its submission is fenced, and its node does not answer"
        if health.leaving == "replacement":
            return f"HyperPod replaces its node: {health.text()}"
        if health.instance and self._is_gone(health):
            return f"HyperPod says that instance {health.instance} is gone"
        return ""

    def _is_gone(self, health: NodeHealth) -> bool:
        """Ask HyperPod, and not too often."""
        service = self.hyperpod(health.cluster)
        if service is None:
            return False
        if self._is_due(f"instance:{health.instance}"):
            try:
                self._gone[health.instance] = service.describe(health.instance).gone
            except ClusterError:
                return False
        return self._gone.get(health.instance, False)

    def _is_due(self, question: str) -> bool:
        """Whether a question may be asked now; it counts as asked."""
        due = self.clock() - self._seen.get(question, float("-inf")) >= _ASK_SECONDS
        if due:
            self._seen[question] = self.clock()
        return due

    def _is_fenced(self, pod: Object) -> bool:
        """Whether a later submission has its object: before that is made, the fence stands."""
        view, labels = self.control.view, labels_of(pod)
        if view is None or view.made is None or labels.get(CLUSTER_LABEL) == self.control.sight.cluster:
            return False
        number = labels.get(SUBMISSION_LABEL, "")
        return number.isdecimal() and int(number) < view.number

    def _is_of_this_submission(self, pod: Object) -> bool:
        view = self.control.view
        return view is not None and labels_of(pod).get(SUBMISSION_LABEL, str(view.number)) == str(view.number)

    # ---- what probes found

    def _own_evidence(self, pods: list[Object], nodes: dict[str, NodeHealth | None], asked: dict[str, bool]) -> None:
        run, view = self.control.record.run, self.control.view
        assert view is not None
        reports = read_node_reports(run, view.attempt) if view.started else []
        condemned, text = storage_trouble(reports)
        if text:
            what = "the shared storage fails on several nodes" if condemned else "one node has trouble with the storage"
            self.control.tell("storage", f"storage:{condemned}:{view.attempt}", f"{what}: {text}")
        for suspect in suspects(reports):
            health = nodes.get(suspect.node)
            if health is not None:
                self._suspect(suspect, health, pods, asked)

    def _suspect(self, suspect: Suspect, health: NodeHealth, pods: list[Object], asked: dict[str, bool]) -> None:
        run, done = self.control.record.run, node_actions(self.control.record.run)
        repairs = [action for action in done if action.action in ("reboot", "replace")]
        service = self.hyperpod(health.cluster)
        allowed = self.section.replace_nodes and service is not None
        instance: str | None = health.instance
        if not instance and allowed and service is not None:
            instance = self._instance_of(service, suspect.node)
        if instance is None:
            return
        standing = Standing(
            allowed=allowed,
            alone=self._alone(suspect.node, pods) if allowed else False,
            handled=bool(health.leaving) or health.status == "Unschedulable",
            instance=instance,
            drained=self._drained(suspect.pod, asked),
            spent=len(repairs),
            budget=self.section.budget.replacements,
        )
        answers = {action.key: answer for action in repairs if (answer := read_answer(run, action.key)) is not None}
        step, why = next_step(suspect, standing, repairs, {key: answer.done for key, answer in answers.items()})
        if step == "drain":
            for pod in pods:
                if node_of(pod) == suspect.node:
                    self._ask(pod, asked, suspect.text, "controller")
        elif step in ("reboot", "replace") and service is not None:
            action = NodeAction(
                action=step,
                node=suspect.node,
                instance=instance,
                reason=f"{suspect.text}; {why}",
                time=self.wall(),
                evidence=suspect.evidence,
            )
            if record_action(run, action):
                self._repair(service, action)
        if service is not None:
            self._unanswered(service, [action for action in repairs if action.key not in answers])
        if step != "wait":
            self.control.tell(
                "node", f"node:{suspect.node}:{step}", f"node {suspect.node}: {suspect.text}; {step}: {why}"
            )

    def _instance_of(self, service: HyperPod, node: str) -> str | None:
        """The instance id of a node whose name does not hold it; None while it is not known. It lists the cluster."""
        if not self._instances.get(node) and self._is_due(f"node:{node}"):
            self._instances[node] = service.instance_of(node)
        return self._instances.get(node)

    def _alone(self, node: str, pods: list[Object]) -> bool:
        """Whether nobody but this run, and what runs on every node, has a pod there."""
        mine = {uid_of(pod) for pod in pods}
        try:
            there = self.kube.list(POD, "", fields=f"spec.nodeName={node}").items
        except KubeError:
            return False  # not known is not alone
        return all(uid_of(pod) in mine or _on_every_node(pod) or _is_over(pod) for pod in there)

    def _drained(self, pod: str, asked: dict[str, bool]) -> bool:
        if pod not in asked:
            return False
        since = self._seen.setdefault(f"drain:{pod}", self.clock())
        return asked[pod] or self.clock() - since >= _DRAIN_PATIENCE_SECONDS

    def _repair(self, service: HyperPod, action: NodeAction) -> None:
        """Ask, and read what was said about this very node: the request itself succeeds all the same."""
        try:
            (answer,) = service.repair(action.action, [action.instance])  # type: ignore[arg-type]
        except ClusterError as error:
            self.control.notices.write("repair_unanswered", key=action.key, message=error.message)
            return
        text = f"{answer.code} {answer.message}".strip()
        record_answer(
            self.control.record.run, NodeAnswer(key=action.key, done=answer.accepted, text=text, time=self.wall())
        )
        self.control.notices.write(
            "repair", action=action.action, instance=action.instance, accepted=answer.accepted, text=text
        )
        if not answer.accepted:
            self.control.tell(
                "node", f"refused:{action.key}", f"{action.action} of {action.instance} was refused: {text}"
            )

    def _unanswered(self, service: HyperPod, repairs: list[NodeAction]) -> None:
        """A replacement whose asker died is asked for again: an id is replaced once. A reboot would happen twice."""
        for action in repairs:
            since = self._seen.setdefault(f"repair:{action.key}", self.clock())
            if self.clock() - since < _UNANSWERED_SECONDS:
                continue
            if action.action == "replace":
                self._seen[f"repair:{action.key}"] = self.clock()
                self._repair(service, action)
            else:
                text = f"nobody knows whether {action.instance} is rebooted: a person decides what follows"
                self.control.tell("node", f"unanswered:{action.key}", text)


def _on_every_node(pod: Object) -> bool:
    owners = pod["metadata"].get("ownerReferences") or []
    return any(owner.get("kind") in ("DaemonSet", "Node") for owner in owners)


def _is_over(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
