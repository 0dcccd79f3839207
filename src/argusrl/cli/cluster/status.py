"""argusrl cluster status: runs in the cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argusrl.cli.cluster.options import AddressOption, ContextOption, NamespaceOption, RunName, RunsOption, open_kube
from argusrl.cli.output import JsonOption, say, say_json, say_table

if TYPE_CHECKING:
    from argusrl.cluster.overview import RunOverview

_GOOD = {"running", "complete"}


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("status")
    def status(
        run: RunName = None,
        root: RunsOption = None,
        brief: Annotated[bool, typer.Option("--brief", help="Objects of the cluster alone; asks no pod.")] = False,
        address: AddressOption = None,
        namespace: NamespaceOption = None,
        context: ContextOption = None,
        as_json: JsonOption = False,
    ) -> None:
        """Runs in the cluster: submissions, attempts, pods, the health of their nodes, and what waits for what."""
        if address is not None:
            _jobs(address, run, as_json=as_json)
            return
        from argusrl.cli.cluster.record import find_run, read_record
        from argusrl.cluster.overview import overviews

        kube = open_kube(context, namespace)
        found = overviews(kube) if run is None else [find_run(kube, run, root)]
        records = [read_record(kube, one, root, ask=not brief) for one in found]
        if as_json:
            runs = [describe(one, *record) for one, record in zip(found, records, strict=True)]
            say_json({"namespace": kube.namespace, "runs": runs})
        elif not found:
            say(f"no runs in namespace {kube.namespace}")
        for one, (record, source) in zip(found, records, strict=True):
            if not as_json:
                _say(one, record, source)


def describe(found: RunOverview, record: Any, source: str) -> dict[str, Any]:
    """What --json prints of a run."""
    submissions = [
        {name: value for name, value in asdict(one).items() if name != "object"} for one in found.submissions
    ]
    return {
        "run": found.run,
        "state": found.state,
        "folder": found.folder,
        "submissions": submissions,
        "pods": [asdict(pod) for pod in found.pods],
        "nodes": [asdict(node) for node in found.nodes],
        "waiting": [asdict(one) for one in found.waiting],
        "record": record,
        "record_source": source if record is not None else None,
        "unknown": [*found.unknown, *([source] if record is None else [])],
    }


def _say(found: RunOverview, record: Any, source: str) -> None:
    from argusrl.observe.display import duration

    say(f"{found.run}  {found.state}", "green" if found.state in _GOOD else "yellow")
    if found.folder:
        say(f"  folder      {found.folder}")
    if record is not None:
        _say_record(record, source)
    for one in found.submissions:
        state = f"{one.state}: {one.reason}" if one.reason else one.state
        say(f"  submission  {one.number or '–'}  {one.kind} {one.name}, {duration(one.age_seconds)} old: {state}")
    if found.pods:
        say()
        rows = [
            [
                f"  {pod.name}",
                pod.role,
                pod.phase + ("" if pod.ready or pod.phase != "Running" else " (not ready)"),
                str(pod.restarts),
                pod.node or "–",
                duration(pod.age_seconds),
                pod.ended,
            ]
            for pod in found.pods
        ]
        say_table(["  pod", "role", "phase", "restarts", "node", "age", ""], rows)
    if found.nodes:
        say()
        nodes = [
            [f"  {node.name}", node.instance or "–", "✓" if node.healthy else "✗", node.detail or node.health]
            for node in found.nodes
        ]
        say_table(["  node", "instance", "", "health"], nodes)
    for waiting in found.waiting:
        if waiting.text:
            say(f"  ! {waiting.what}: {waiting.text}", "yellow")
        if waiting.hint:
            say(f"    → {waiting.hint}", "cyan")
    for text in [*found.unknown, *([source] if record is None else [])]:
        say(f"  ? {text}", "bright_black")
    say()


def _say_record(record: dict[str, Any], source: str) -> None:
    from argusrl.observe.display import duration

    say(f"  run         {record['state']}, step {record['steps']} of {record['total']}  (by {source})")
    beat = record.get("heartbeat")
    if beat:
        say(f"  heartbeat   {duration(beat['age_seconds'])} ago: {beat['phase']}, step {beat['step']}, {beat['host']}")
    for one in record.get("submissions", []):
        end = f" → {one['end']['outcome']}: {one['end']['text']}" if one["end"] else ""
        say(f"  recorded    submission {one['number']} ({one['reason']}): {one['text']}{end}")
    for attempt in record["attempts"]:
        outcome = attempt["outcome"] or "under way"
        say(f"  attempt     {attempt['attempt']}: {outcome} {attempt['reason']}".rstrip())


def _jobs(address: str, run: str | None, *, as_json: bool) -> None:
    from argusrl.cli.cluster.reach import open_jobs
    from argusrl.cluster.submit import jobs_of_run

    with open_jobs(address) as jobs:
        found = jobs.list() if run is None else jobs_of_run(jobs, run)
        if as_json:
            say_json({"address": address, "ray": jobs.version(), "jobs": [asdict(job) for job in found]})
        elif not found:
            say(f"no jobs at {address}")
        else:
            say_table(["job", "status", ""], [[job.submission_id, job.status, job.message] for job in found])
