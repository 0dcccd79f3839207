"""argusrl cluster drain: have a node of a run emptied before it goes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cli.cluster.options import ContextOption, NamespaceOption, RunsOption, open_kube, seen_folder
from argusrl.cli.output import say

if TYPE_CHECKING:
    from argusrl.cluster.kube_api import KubeApi
    from argusrl.cluster.overview import PodView, RunOverview
    from argusrl.storage.layout import RunFolder

_ANSWER_SECONDS = 60.0  # for the command in the pod to start, besides the 30 s that a drain may take


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("drain")
    def drain(
        run: Annotated[str, typer.Argument(help="Name of the run.")],
        node: Annotated[str | None, typer.Option("--node", help="Kubernetes node to empty.")] = None,
        pod: Annotated[str | None, typer.Option("--pod", help="Pod whose node to empty.")] = None,
        reason: Annotated[str, typer.Option("--reason", help="Why, for events and logs.")] = "asked by a person",
        root: RunsOption = None,
        namespace: NamespaceOption = None,
        context: ContextOption = None,
    ) -> None:
        """Have a node emptied: its episodes are handed over, and the run goes on without it.

        Exit code 11 where the driver did not answer in time.
        """
        from argusrl.cluster.overview import find_overview
        from argusrl.errors import DeadlineError

        kube = open_kube(context, namespace)
        found = find_overview(kube, run)
        seen = seen_folder(found.folder, root)
        answered = [_drain(kube, found, seen, one, reason) for one in chosen_pods(found, node, pod)]
        if not all(answered):
            raise typer.Exit(DeadlineError.exit_code)


def chosen_pods(found: RunOverview, node: str | None, pod: str | None) -> list[PodView]:
    """Pods of the run that --node or --pod means. Raises ConfigError with what there is."""
    from argusrl.errors import ConfigError

    if (node is None) == (pod is None):
        raise ConfigError("which node?", "give --node NAME or --pod NAME; argusrl cluster status lists both")
    pods = [one for one in found.pods if (one.name == pod if node is None else one.node == node)]
    if not pods:
        there = ", ".join(f"{one.name} on {one.node or 'no node yet'}" for one in found.pods) or "none"
        what = f"pod {pod}" if node is None else f"pod on node {node}"
        raise ConfigError(f"run {found.run} has no {what}", f"its pods: {there}")
    return pods


def _drain(kube: KubeApi, found: RunOverview, seen: RunFolder | None, pod: PodView, reason: str) -> bool:
    """Ask where the run folder is seen: here, by the head pod, or else by the controller. Whether it was answered."""
    from argusrl.cluster.kinds import POD
    from argusrl.cluster.kube_api import KubeError
    from argusrl.cluster.names import DRAIN_ANNOTATION
    from argusrl.journal.drains import Drain, ask_for_drain, await_drained

    if seen is not None:
        wish = Drain(pod=pod.name, node=pod.node, reason=reason, asked_by="person", time=time.time())
        ask_for_drain(seen, wish)
        answer = await_drained(seen, pod.name, wish.deadline_seconds)
        said = "nobody answered" if answer is None else f"{answer.outcome}, {answer.seconds:.1f} s"
        say(f"{pod.name}: {said}", "yellow" if answer is None else "green")
        return answer is not None
    if found.head is not None:
        command = ["argusrl", "drain", "--wait", "--pod", pod.name, "--run", found.folder, "--reason", reason]
        try:
            code, output = kube.execute(
                found.head.name, command, found.namespace, container=found.head.container, seconds=_ANSWER_SECONDS
            )
        except KubeError:  # the right to run commands in pods is one that not everybody has
            pass
        else:
            say(f"{pod.name}: {output.strip()}", "yellow" if code else "green")
            return code == 0
    kube.patch(POD, pod.name, {"metadata": {"annotations": {DRAIN_ANNOTATION: reason}}}, found.namespace)
    say(f"{pod.name}: asked; the controller passes it on to the driver (argusrl cluster status)")
    return True
